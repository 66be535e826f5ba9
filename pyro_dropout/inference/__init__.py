"""Fitting a guide to a model."""
