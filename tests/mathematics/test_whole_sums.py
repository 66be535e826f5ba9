"""Sums over whole layers: their values and gradients, and the KL made of them against the KL written out."""

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal

import pyro_dropout as pd
from pyro_dropout.mathematics.distributions import LowRankNormal
from pyro_dropout.mathematics.row_mixture_distribution import RowMixture


def test_a_distribution_that_was_used_without_gradients_has_them_afterwards() -> None:
    prior = Normal(0.0, 1.0)
    for q, tensors in mixtures(torch.zeros(())).values():
        with torch.no_grad():
            pd.paper.kl(q, prior)
        before = torch.autograd.grad(pd.paper.kl(q, prior), tensors, retain_graph=True)
        torch.testing.assert_close(torch.autograd.grad(pd.paper.kl(q, prior), tensors, retain_graph=True), before)


def mixtures(like: Tensor) -> dict[str, tuple[RowMixture, list[Tensor]]]:
    def draw(*shape: int) -> Tensor:
        return torch.randn(shape).to(like).requires_grad_()

    loc, locs, width, widths = draw(4, 3), draw(2, 4, 3), draw(4, 3), draw(2, 4, 3)
    columns, by_row = draw(12, 2), draw(2, 3, 4, 2)
    half = torch.tensor([0.3, 0.7]).to(like)
    one = torch.ones(1).to(like)
    return {
        "dropout": (pd.paper.BernoulliMixture(loc, keep=0.8, scale=0.0), [loc]),
        "mean field": (RowMixture(loc[None], width.exp(), one, row_dim=None), [loc, width]),
        "row mixture": (RowMixture(locs, widths.exp(), half, row_dim=1), [locs, widths]),
        "low rank": (LowRankNormal(loc, width.exp(), columns), [loc, width, columns]),
        "factors by component": (
            RowMixture(locs, width.exp(), half, row_dim=1, cov_factor=by_row),
            [locs, width, by_row],
        ),
    }


@pytest.mark.parametrize("name", list(mixtures(torch.zeros(()))))
def test_the_divergence_equals_the_one_written_out(name: str, dtype: torch.dtype) -> None:
    q, tensors = mixtures(torch.zeros((), dtype=dtype))[name]
    scale = torch.tensor(0.7, dtype=dtype, requires_grad=True)
    apart = pd.paper.kl(q, Normal(torch.zeros((), dtype=dtype), scale))
    written = pd.paper.kl(q, Normal(torch.zeros(4, 3, dtype=dtype), scale * torch.ones(4, 3, dtype=dtype)))
    torch.testing.assert_close(apart, written)
    slopes = (torch.autograd.grad(each, [*tensors, scale], retain_graph=True) for each in (apart, written))
    torch.testing.assert_close(*slopes, rtol=1e-5, atol=1e-5)
