"""The problems of the benchmark."""
