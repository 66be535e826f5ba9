"""Posterior predictions: moments, densities, intervals and draws."""
