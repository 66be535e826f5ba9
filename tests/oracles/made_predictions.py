"""Predictions over outputs that a test writes down, and targets for which they are exactly calibrated."""

from typing import Any

import torch
from torch import Tensor

import pyro_dropout as pd
from pyro_dropout.generative.likelihoods.moments import Running, block_sums


def made(samples: Tensor, likelihood: Any) -> pd.prediction.Prediction:
    """What ``predict`` would return had the network's outputs been ``samples``, (T, N, outputs)."""
    running = Running(samples.shape[1])
    running.add(0, len(samples), slice(None), block_sums(likelihood, samples))
    return pd.prediction.Prediction(likelihood, running.sums, len(samples), samples[:1, :1], samples)


def regression(
    points: int, draws: int = 20, tau: float = 4.0, dtype: torch.dtype = torch.float64
) -> pd.prediction.Prediction:
    """Normal outputs about a mean of their own at each point."""
    middle, spread = torch.randn(points, 1, dtype=dtype), 0.2 + torch.rand(points, 1, dtype=dtype)
    return made(middle + spread * torch.randn(draws, points, 1, dtype=dtype), pd.Gaussian(tau))


def drawn_targets(prediction: pd.prediction.Prediction, tau: float = 4.0) -> Tensor:
    """Targets from the predicted mixture itself: at each point one of the draws, and noise."""
    f = prediction.samples
    chosen = torch.randint(len(f), (f.shape[1],))
    return f[chosen, torch.arange(f.shape[1])] + torch.randn_like(f[0]) / tau**0.5
