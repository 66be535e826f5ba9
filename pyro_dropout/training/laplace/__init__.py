"""Laplace approximations: the curvature of a log-likelihood at a trained point."""
