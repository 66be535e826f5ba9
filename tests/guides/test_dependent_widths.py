"""Points are refused where the width of a prior is latent: their density has no maximum there."""

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer.reparam import LocScaleReparam
from torch import Tensor

import pyro_dropout as pd
from pyro_dropout.guides.points import dependent_width

SIGMA = torch.tensor([15.0, 10.0, 16.0, 11.0])
Y = torch.tensor([28.0, 8.0, -3.0, 7.0])


def schools(sigma: Tensor, y: Tensor | None = None) -> None:
    """Groups around a mean, with a spread that is learned: Rubin's schools."""
    mu, tau = pyro.sample("mu", dist.Normal(0.0, 5.0)), pyro.sample("tau", dist.HalfCauchy(5.0))
    with pyro.plate("groups", len(sigma)):
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        pyro.sample("y", dist.Normal(theta, sigma), obs=y)


def lognormal() -> None:
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    pyro.sample("a", dist.LogNormal(mu, 1.0))
    pyro.sample("b", dist.Exponential(mu.exp()))


def student() -> None:
    mu = pyro.sample("mu", dist.Normal(torch.zeros(3), 5.0).to_event(1))
    pyro.sample("a", dist.StudentT(4.0, mu, 2.0).to_event(1))
    pyro.sample("b", dist.MultivariateNormal(mu, torch.eye(3)))


def correlated() -> None:
    root = pyro.sample("root", dist.LKJCholesky(3, 2.0))
    pyro.sample("b", dist.MultivariateNormal(torch.zeros(3), scale_tril=root))


def beta() -> None:
    a = pyro.sample("a", dist.Gamma(2.0, 1.0))
    pyro.sample("share", dist.Beta(a, 1.0))


@pytest.mark.parametrize(
    ("model", "args", "found"),
    [
        (schools, (SIGMA, Y), ("theta", "tau")),
        (poutine.reparam(schools, config={"theta": LocScaleReparam(0.0)}), (SIGMA, Y), None),
        (lognormal, (), None),  # a location of their logarithms
        (student, (), None),
        (correlated, (), ("b", "root")),
        (beta, (), ("share", "a")),
    ],
)
def test_only_widths_that_are_latent_are_found(
    model: Callable[..., None], args: tuple[Tensor, ...], found: tuple[str, str] | None
) -> None:
    assert dependent_width(model, poutine.trace(model).get_trace(*args), args, {}) == found


QUIET: dict[str, Any] = {"steps": 3, "compile": False, "progress": False}


@pytest.mark.parametrize("anchored", [True, False])
def test_an_ensemble_of_points_refuses_a_hierarchy_by_name(anchored: bool) -> None:
    with pytest.raises(pd.errors.PyroDropoutError, match="width of site 'theta' depends on 'tau'"):
        pd.fit(schools, pd.Ensemble(schools, members=3, anchored=anchored), SIGMA, Y, **QUIET)
