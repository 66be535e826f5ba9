"""Where people meet the library: figures, comparisons, estimators and the command line."""
