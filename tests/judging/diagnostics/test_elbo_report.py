"""The evidence lower bound against the evidence itself, and against sums over all masks."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from pyro.infer.autoguide import AutoNormal
from scipy import integrate, stats
from torch import nn

import pyro_dropout as pd
from tests.oracles.lines import Line
from tests.oracles.predictions import problem


@pytest.mark.parametrize("family", ["low_rank", "mean_field"])
def test_the_bound_is_the_evidence_where_the_guide_is_the_posterior(family: str, dtype: torch.dtype) -> None:
    """Within 5.5 standard errors: fails with probability 4e-8 a case."""
    line = Line(dtype, orthogonal=family == "mean_field")
    guide = line.low_rank() if family == "low_rank" else line.mean_field()
    report = pd.judging.elbo_report(line.model, guide, line.x, line.y, samples=2000)
    assert report.defined
    assert report.elbo == pytest.approx(line.evidence(), abs=5.5 * report.standard_error + 1e-3)
    assert report.standard_error < 0.1
    assert report.why == ""


def test_parts_of_dropout_with_a_scale() -> None:
    """One weight, one output: the exact KL is a one-dimensional integral, the nll a sum over two masks."""
    model = pd.BayesianNet(nn.Linear(1, 1, bias=False).double(), likelihood=pd.Gaussian(4.0))
    guide = pd.AutoDropout(model, keep=0.7, scale=0.5)
    x, y = torch.tensor([[1.0], [2.0]]).double(), torch.tensor([[0.5], [1.5]]).double()
    m = guide.posterior("weight").loc.item()
    parts = [(0.7, m), (0.3, 0.0)]

    def q(w: float) -> float:
        return float(sum(p * stats.norm.pdf(w, at, 0.5) for p, at in parts))

    exact, _ = integrate.quad(lambda w: q(w) * (np.log(q(w)) - stats.norm.logpdf(w)), -8, 8, limit=200)
    nll = sum(
        p * (0.5 * 4 * ((float(b) - float(a) * at) ** 2 + float(a) ** 2 * 0.25) - 0.5 * np.log(4 / (2 * np.pi)))
        for (p, at), (a, b) in itertools.product(parts, zip(x, y, strict=True))
    )
    report = pd.judging.elbo_report(model, guide, x, y, samples=4000)
    assert report.kl_exact == pytest.approx(exact, abs=1e-5)
    assert report.nll == pytest.approx(nll, abs=5.5 * report.standard_error)  # fails with probability 4e-8
    assert report.kl_gap is not None
    assert report.kl_gap == pytest.approx(pd.paper.kl_gap(guide.posterior("weight")).item(), abs=1e-6)
    assert report.objective == pytest.approx(report.nll + exact - report.kl_gap, abs=1e-5)
    assert report.elbo == pytest.approx(-report.nll - exact, abs=1e-5)


def test_a_guide_whose_divergence_is_sampled() -> None:
    """Pyro's AutoNormal has a Gaussian's KL, and here only draws of it: within 5.5 standard errors, 4e-8."""
    line = Line(torch.float32)
    guide = AutoNormal(line.model, init_scale=0.3)
    guide(line.x, line.y)
    middle = guide.median()["weight"].detach().double().numpy()
    report = pd.judging.elbo_report(line.model, guide, line.x, line.y, samples=150)
    exact = (0.5 * (0.09 + middle**2 - 1) - np.log(0.3)).sum()
    assert report.kl_exact == pytest.approx(exact, abs=5.5 * report.standard_error)
    assert report.kl_gap == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(
    ("options", "reason"), [({"scale": 0.0}, r"(scale) is 0"), ({"scale": 0.2}, "'0.bias': it is a point")]
)
def test_where_there_is_no_bound_the_objective_stands(options: Any, reason: str) -> None:
    model, _, x = problem()
    guide, y = pd.AutoDropout(model, keep=0.8, **options), torch.zeros(5, 1)
    report = pd.judging.elbo_report(model, guide, x, y, seed=0)
    assert not report.defined
    assert report.elbo is report.kl_exact is report.kl_gap is None
    assert reason in report.why
    kl = pd.ELBO(per_example=False).parts(model, guide, x, y)["kl"].item()
    assert report.kl_large_k == pytest.approx(kl, rel=1e-5)
    assert report.objective == pytest.approx(report.nll + kl, rel=1e-5)
    assert repr(report).startswith("ElboReport(undefined: the guide has no density")
