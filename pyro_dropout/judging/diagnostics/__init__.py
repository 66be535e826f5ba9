"""Diagnostics of a posterior: ArviZ, k-hat, LOO, SBC and the ELBO."""
