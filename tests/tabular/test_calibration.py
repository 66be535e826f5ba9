"""Quantiles and probabilities agree with the calibrated intervals."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import pyro_dropout as pd
from pyro_dropout.tabular.calibration import Calibration, calibrate

ROWS = 199


def told(likelihood: Any, y: Tensor) -> tuple[Calibration, pd.prediction.Prediction]:
    """Return what held-back targets say of a posterior that does not depend on x, and a prediction of four rows."""
    torch.manual_seed(0)
    model = pd.BayesianNet(torch.nn.Linear(2, 1), likelihood=likelihood)
    guide = pd.AutoMeanField(model, init=lambda name, shape: torch.zeros(shape), init_scale=0.01)

    def ask(rows: int) -> pd.prediction.Prediction:
        return pd.predict(model, guide, torch.zeros(rows, 2), samples=50, seed=0)

    data = (torch.zeros(len(y), 2), y), (torch.zeros(3, 2), y[:3])
    return calibrate(ask(len(y)), *data, ()), ask(4)


@pytest.fixture(scope="module")
def normal() -> tuple[Calibration, pd.prediction.Prediction]:
    return told(pd.Gaussian(tau=100.0), torch.randn(ROWS, 1, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("level", [0.5, 0.95])
def test_quantiles_are_the_ends_of_intervals(normal: Any, level: float) -> None:
    known, found = normal
    low, high = known.interval(found, level)
    assert torch.equal(known.quantile(found, (1 - level) / 2), low)
    assert torch.equal(known.quantile(found, (1 + level) / 2), high)
    assert bool(
        (high - low > 5 * (found.interval(level)[1] - found.interval(level)[0])).all()
    )  # the noise is 1, not 0.1


def test_quantiles_rise_also_beyond_what_rows_support(normal: Any) -> None:
    known, found = normal
    levels = [1e-9, 1e-5, 0.001, 0.0025, 0.01, 0.2, 0.5, 0.8, 0.99, 0.9975, 0.999, 1 - 1e-5]
    values = torch.stack([known.quantile(found, level) for level in levels])
    assert bool((values.diff(dim=0) >= 0).all())
    assert torch.equal(known.quantile(found, 0.5), found.quantile(0.5))


@pytest.mark.parametrize("rows", [10, 12, 20, 60, 100])
def test_quantiles_of_any_level_are_there_for_any_number_of_rows(rows: int) -> None:
    known, found = told(pd.Gaussian(tau=1.0), torch.linspace(-2, 2, rows).unsqueeze(-1))
    ends = torch.stack([known.quantile(found, level) for level in (1e-4, 0.01, 0.04, 0.5, 0.96, 0.99, 0.9999)])
    assert bool((ends.diff(dim=0) >= 0).all())


@pytest.mark.parametrize("level", [0.005, 0.3, 0.5, 0.95])
def test_a_quantile_has_its_probability_above_it(normal: Any, level: float) -> None:
    known, found = normal
    above = known.probability_above(found, known.quantile(found, level)[0].item())
    assert above.flatten().tolist() == pytest.approx([1 - level] * 4, abs=0.003)  # of steps of 1/200


def test_probabilities_fall_from_one_to_nothing(normal: Any) -> None:
    known, found = normal
    values = torch.stack([known.probability_above(found, t) for t in torch.linspace(-20, 20, 400).tolist()])
    assert bool((values.diff(dim=0) <= 1e-6).all())
    assert values[0].min() > 1 - 1e-6
    assert values[-1].max() < 1e-6
    exact = 0.5 * math.erfc(1 / math.sqrt(2))
    assert known.probability_above(found, 1.0)[0].item() == pytest.approx(exact, abs=0.05)  # the posterior says 1e-23
    assert found.probability_above(1.0)[0].item() < 1e-20


def test_whole_numbers() -> None:
    y = torch.poisson(torch.full((ROWS, 1), 1.0), generator=torch.Generator().manual_seed(2))
    known, found = told(pd.Poisson(), y)
    low, high = known.interval(found, 0.8)
    assert (torch.equal(known.quantile(found, 0.1), low), torch.equal(known.quantile(found, 0.9), high)) == (True, True)
    for t in (-1.0, 0.0, 0.5, 1.0, 3.0):  # intervals of whole numbers hold more than their level, and say too little
        assert torch.equal(known.probability_above(found, t), found.probability_above(t))
