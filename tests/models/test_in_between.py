"""In between two clusters: the problem, and its pieces against sums written out by hand."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from experiments.two_clusters import GRID, gap_ratio, on_line

import pyro_dropout as pd
from tests.models.test_scripts import FOLDER, loaded

script = loaded(FOLDER / "in_between.py")


def test_verdicts_follow_the_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def row(name: str, relative: float) -> dict[str, Any]:
        return {"guide": name, "ratio ÷ NUTS": relative, "± of that": 0.01}

    class Record:
        def __init__(self) -> None:
            self.said: dict[str, str] = {}

        def claim(self, text: str, verdict: str, number: str) -> None:
            self.said[text.split(" is ")[0]] = verdict

    record = Record()
    ratios = {"dropout": (0.1, 0.2), "mean field": (0.3, 0.8), "low rank": (0.31, 0.81), "row mixture": (0.5, 0.95)}
    script.judge(record, [row(name, value) for name, both in ratios.items() for value in both])
    assert record.said == {
        "dropout": "holds",
        "mean field": "holds in part",
        "low rank": "does not hold",
        "row mixture": "holds",
    }


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


@pytest.mark.parametrize("name", [*script.KIN[1:], "mean field", "low rank"])
def test_the_large_k_form_may_stand_for_the_exact_one(name: str) -> None:
    """For one Gaussian the two are the same; for dropout they differ by the entropy of a coin a hidden unit at most."""
    torch.manual_seed(0)
    net = script.model(depth=1, width=20)
    guide = script.guide(name, net)
    x, y = sample()
    large, exact = (float(pd.ELBO(kl=kind).parts(net, guide, x, y)["kl"].detach()) for kind in ("large_k", "exact"))
    coin = -0.9 * math.log(0.9) - 0.1 * math.log(0.1)
    most = 20 * coin if name.startswith("dropout") else 1e-3
    assert -1e-3 <= exact - large <= most


def sample() -> tuple[torch.Tensor, torch.Tensor]:
    problem = script.two_clusters(5, 0)
    return problem.x, problem.y


def test_a_ratio_is_that_of_the_averages() -> None:
    std = torch.ones(2, 30 + len(GRID))
    std[0, 30:][GRID.abs() < 1] = 3.0  # the whole middle of the gap, and more
    std[1, :30] = 4.0
    at_data, in_gap, ratio = gap_ratio(std)
    assert at_data.tolist() == [1, 4]
    assert in_gap.tolist() == [3, 1]
    assert ratio.tolist() == [3, 0.25]
    std[0, 30:][(GRID < -0.81) | (GRID > 0.41)] = 1.0
    assert gap_ratio(std)[1, 0] == 3  # only the middle counts
