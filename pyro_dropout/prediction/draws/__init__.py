"""Draws of weights, and what a model computes with them."""
