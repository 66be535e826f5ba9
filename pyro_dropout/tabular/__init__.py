"""From a table to predictions that can be used: the choice of a model, its training and its answers."""
