"""Scores of predictions on held-out data."""
