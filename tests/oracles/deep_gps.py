"""Points, widths and length-scales of small deep Gaussian processes, and draws of their priors in numpy."""

import itertools
import math

import numpy as np
import torch

from tests.oracles.covariances import NUMPY

POINTS = torch.tensor([[-1.0, 0.5], [0.3, -0.2], [1.5, 1.0], [0.0, 0.0], [-0.4, -2.0]])
WIDTHS = [6, 4, 3]  # more and fewer units than points: both ways in which function space is drawn
LENGTH, BIAS_LENGTH = 0.8, 1.3
SCALES = {"length_scale": LENGTH, "bias_length_scale": BIAS_LENGTH}


def numpy_functions(name: str, depth: int, shared: bool, count: int, outputs: int) -> np.ndarray:
    """Draws of f from the prior, (count, N, outputs), by the definition of the network."""
    rng, act, x = np.random.default_rng(7), NUMPY[name], POINTS.numpy().astype(float)
    weight = rng.normal(size=(count, WIDTHS[0], 2)) / LENGTH
    phi = act(np.einsum("nq,skq->snk", x, weight) + rng.normal(size=(count, 1, WIDTHS[0])) / BIAS_LENGTH)
    phi /= math.sqrt(WIDTHS[0])
    for below, width in itertools.pairwise(WIDTHS[:depth]):
        h = phi @ rng.normal(size=(count, below, below if shared else width))
        if shared:  # §4.5: K1 x K1, and then K1 x K2
            h = h @ (rng.normal(size=(count, below, width)) / LENGTH)
        phi = act(h + rng.normal(size=(count, 1, width)) / BIAS_LENGTH) / math.sqrt(width)
    return phi @ rng.normal(size=(count, WIDTHS[depth - 1], outputs))
