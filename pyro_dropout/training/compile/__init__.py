"""A training step as one compiled program."""
