"""In between two clusters: the problem, and its pieces against sums written out by hand."""

from types import SimpleNamespace

import pytest
import torch
from experiments.two_clusters import on_line

import pyro_dropout as pd
from tests.models.test_scripts import FOLDER, loaded

script = loaded(FOLDER / "in_between.py")


@pytest.mark.deep
@pytest.mark.parametrize(("name", "widest", "least"), [(script.LAPLACE, 0.15, 1.5), (script.LOW_RANK, 0.6, 0.45)])
def test_laplace_doubts_in_the_gap(name: str, widest: float, least: float) -> None:
    """One seed of a small network: at the data NUTS has a width of 0.07, and dropout a ratio of 0.15."""
    how = SimpleNamespace(seed=0, seeds=1, steps=200, quiet=True, quick=True, samples=200, laplace_rate=0.01)
    mean, std = script.laplaced(name, lambda: script.model(1, 10), [script.two_clusters(1, 0)], how)
    assert mean.shape == std.shape == (1, 1, 30 + len(script.GRID))
    at_data, _, ratio = script.gap_ratio(std[0, 0])
    assert 0.04 < at_data < widest
    assert ratio > least


def test_dropout_has_the_variance_of_its_masks_and_cannot_see_the_gap() -> None:
    """Var f(x) = Σ_k p(1 − p) m_k² relu(w_k x + b_k)²: a sum of convex functions, so no gap can be its maximum."""
    torch.manual_seed(0)
    net = script.model(depth=1, width=20)
    guide = script.guide("dropout", net)
    x = on_line(script.GRID, 5)
    hidden = torch.relu(net.net[0](x)).detach()
    out = guide.posterior("2.weight").loc.detach()  # (1, 20)
    variance = 0.9 * 0.1 * (hidden.square() * out.square()).sum(-1)
    drawn = pd.predict(net, guide, x, samples=4000, seed=0).epistemic[:, 0]
    # A variance of 4,000 draws of a sum of twenty coins is known to about 2.5 %: five times that.
    assert torch.allclose(drawn, variance, rtol=0.125)
    assert (variance[2:] - 2 * variance[1:-1] + variance[:-2] > -1e-6).all()
    left, right = (int((script.GRID - t).abs().argmin()) for t in (-1.4, 1.0))
    assert variance[left : right + 1].max() <= max(variance[left], variance[right]) + 1e-6
