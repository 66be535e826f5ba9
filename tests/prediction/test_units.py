"""Answers do not depend on the unit of y: from 1e-30 to 1e30 they are those at unit 1, scaled."""

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pyro_dropout as pd
from pyro_dropout.judging.scores.errors import rmse

X = torch.linspace(-1, 1, 30).unsqueeze(-1)
Y = 3 + torch.sin(3 * X) + 0.2 * torch.randn(30, 1, generator=torch.Generator().manual_seed(1))
LIKELIHOODS: dict[str, Any] = {"gaussian": lambda: pd.Gaussian(9.0), "own noise": pd.HeteroscedasticGaussian}


def pair(unit: float, kind: str, dtype: torch.dtype) -> tuple[Any, Any, Tensor, Tensor]:
    """Return a model in this unit, with the same weights at every unit, its guide, and the data."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1 if kind == "gaussian" else 2)).to(dtype)
    x, y = (X / unit).to(dtype), (Y.double() * unit).to(dtype)
    model = pd.Standardised(pd.BayesianNet(net, likelihood=LIKELIHOODS[kind]()), x, y)
    return model, pd.AutoMeanField(model, init_scale=0.3), x, y


def in_units(unit: float, kind: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return every answer in the unit of y, as numbers that should not depend on it."""
    model, guide, x, y = pair(unit, kind, dtype)
    answer = pd.predict(model, guide, x, samples=20, seed=1)
    found = {"mean": answer.mean, "std": answer.std}
    found |= {f"interval {k}": end for k, end in enumerate(answer.interval(0.9))}
    found |= {f"crps {how}": pd.crps(answer, y, how, seed=2) for how in ("mixture", "sample")}  # type: ignore[arg-type]
    found["rmse"] = torch.tensor(rmse(answer, y))
    squares = {"variance": answer.variance, "epistemic": answer.epistemic, "aleatoric": answer.aleatoric}
    squares |= {"covariance": answer.covariance}
    whole = {name: value.double() / unit for name, value in found.items()}
    whole |= {name: value.double() / unit**2 for name, value in squares.items()}
    logs = {"log_prob": answer.log_prob(y)}
    logs["to_arviz"] = torch.from_numpy(pd.to_arviz(model, guide, x, y, samples=5, seed=0).log_likelihood["y"].values)
    whole |= {name: value.double() + math.log(unit) for name, value in logs.items()}
    if kind == "gaussian":
        whole["refit_tau"] = torch.tensor(pd.judging.refit_tau(answer, y) * unit**2)
        whole["with_tau"] = pd.judging.with_tau(answer, 4.0 / unit**2).std.double() / unit
    return whole | {"pit": pd.judging.pit(answer, y).double(), "coverage": torch.tensor(pd.coverage(answer, y, 0.8))}


@functools.cache
def at_one(kind: str, dtype: torch.dtype) -> dict[str, Tensor]:
    return in_units(1.0, kind, dtype)


def check(kind: str, dtype: torch.dtype, exponent: float) -> None:
    for name, value in in_units(10.0**exponent, kind, dtype).items():
        expected = at_one(kind, dtype)[name].to(value)
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("exponent", [-30.0, -20.0, 22.0])
@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_answers_scale_with_the_unit(kind: str, exponent: float) -> None:
    check(kind, torch.float32, exponent)


def test_references_scale_with_the_unit() -> None:
    def line(unit: float) -> tuple[Any, Tensor, Tensor]:
        _, _, x, y = pair(unit, "gaussian", torch.float32)
        return pd.Standardised(pd.BayesianNet(nn.Linear(1, 1), likelihood=pd.Gaussian(4.0)), x, y), x, y

    exact = pd.references.conjugate(*line(1.0))
    for unit in (1e-30, 1e30):
        found = pd.references.conjugate(*line(unit))
        torch.testing.assert_close(found.mean(), exact.mean())
        assert found.log_evidence + 30 * math.log(unit) == pytest.approx(exact.log_evidence, abs=1e-3)
        with pytest.raises(pd.errors.PyroDropoutError, match="not linear"):
            pd.references.conjugate(*(pair(unit, "gaussian", torch.float32)[k] for k in (0, 2, 3)))
