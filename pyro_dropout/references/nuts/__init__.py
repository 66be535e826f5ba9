"""A no-U-turn sampler for Pyro models, with compiled energies."""
