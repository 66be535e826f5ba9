"""Draws of weights, and what a model computes from them."""
