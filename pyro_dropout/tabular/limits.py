"""The largest counts and seeds that commands and records may hold; importing this module does not import torch."""

LARGEST = 10**9  # of counts
SEEDS = 2**32  # seeds are below
