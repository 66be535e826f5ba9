"""A small network under dropout, its outputs under every mask, and how near to an exact number a draw must come."""

import itertools
from typing import Any

import torch
from torch import Tensor, nn

import pyro_dropout as pd

F64 = torch.float64
# A comparison with an exact number fails on correct code with probability 4e-8; there are fewer than 100 in all.
SIGMAS = 5.5


def hidden_net(out: int = 1, dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, out)).to(dtype)


def problem(likelihood: Any = None, out: int = 1, dtype: torch.dtype = torch.float32) -> tuple[Any, Any, Tensor]:
    model = pd.BayesianNet(hidden_net(out, dtype), likelihood=likelihood or pd.Gaussian(tau=4.0))
    return model, pd.AutoDropout(model, keep=0.7), torch.randn(5, 2, dtype=dtype)


def close_by_chance(found: Tensor, exact: Tensor, error: Tensor, sigmas: float = SIGMAS) -> None:
    score = (found.to(F64) - exact).abs() / (error + 1e-6 * (1 + exact.abs()))
    assert score.max() < sigmas, f"{score.max():.2f} standard errors from the exact number"


def enumerated(guide: Any, x: Tensor, keep: float) -> tuple[Tensor, Tensor]:
    """Outputs under all 2⁵ masks of a net 2-3-D, (32, N, D), with their probabilities."""
    m1, m2 = (guide.posterior(name).loc.detach().to(F64) for name in ("0.weight", "2.weight"))
    b1, b2 = (guide.posterior(name).v.detach().to(F64) for name in ("0.bias", "2.bias"))
    masks = torch.tensor(list(itertools.product([0.0, 1.0], repeat=5)), dtype=F64)
    h = torch.tanh(torch.einsum("sq,kq,nq->snk", masks[:, :2], m1, x.to(F64)) + b1)
    f = torch.einsum("sk,dk,snk->snd", masks[:, 2:], m2, h) + b2
    return f, (masks * keep + (1 - masks) * (1 - keep)).prod(-1)
