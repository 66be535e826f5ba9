"""Fitting a guide to a model: the loss, SVI, `fit`, optimisers."""
