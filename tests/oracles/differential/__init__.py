"""Random networks, guides, likelihoods and data, on which two ways to the same answer are compared."""
