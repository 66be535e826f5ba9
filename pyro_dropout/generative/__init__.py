"""Pyro models: likelihoods, Bayesian networks and Gaussian processes."""
