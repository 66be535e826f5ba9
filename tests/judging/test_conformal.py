"""Conformal intervals and sets: exact counts when each row is left out in turn, coverage against theory, refusals."""

import json
import math
from fractions import Fraction

import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

import pyro_dropout as pd
from pyro_dropout.protocols import Distribution
from tests.oracles.made_predictions import drawn_targets, made, regression


class Prices(pd.Gaussian):
    """Positive targets whose log is normal."""

    def distribution(self, f: Tensor) -> Distribution:
        return dist.LogNormal(f, 0.1).to_event(1)


def rows(prediction: pd.prediction.Prediction, chosen: list[int]) -> pd.prediction.Prediction:
    return made(prediction.samples[:, chosen], prediction.likelihood)


def place(n: int, level: str) -> int:
    return math.ceil((n + 1) * Fraction(level))


def held(prediction: pd.prediction.Prediction, y: Tensor, level: float) -> list[bool]:
    """Whether each row is inside when it is left out of the calibration."""
    found = []
    for k in range(len(y)):
        others = [row for row in range(len(y)) if row != k]
        calibrated = pd.conformal(rows(prediction, others), y[others])
        if calibrated.classes:
            found.append(bool(calibrated.sets(rows(prediction, [k]), level)[0, y[k]]))
        else:
            low, high = calibrated.interval(rows(prediction, [k]), level)
            found.append(bool((low <= y[k]) & (y[k] <= high)))
    return found


# --- the guarantee ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["calibrated", "too narrow", "another place", "positive", "learned noise"])
@pytest.mark.parametrize("level", ["0.5", "0.55", "0.8", "0.95"])
@pytest.mark.thinned(2)
def test_of_all_rows_left_out_in_turn_exactly_k_are_inside(kind: str, level: str) -> None:
    # Scores that differ have k of n + 1 at most at the k-th of the others: no chance is left in this.
    prediction = regression(20, draws=8)
    y = drawn_targets(prediction)
    if kind == "too narrow":
        prediction = made(prediction.samples.mean(0, keepdim=True), pd.Gaussian(900.0))
    elif kind == "another place":
        y = 5 * y + 40
    elif kind == "positive":
        prediction, y = made(prediction.samples, Prices()), y.exp()
    elif kind == "learned noise":
        wide = torch.cat([prediction.samples, torch.randn_like(prediction.samples)], -1)
        prediction = made(wide, pd.HeteroscedasticGaussian())
    assert sum(held(prediction, y, float(level))) == place(19, level)


def test_whole_numbers_are_inside_at_least_as_often() -> None:
    log_rate = torch.randn(8, 40, 1, dtype=torch.float64) + 1
    y = torch.poisson(3 * log_rate.mean(0).exp())
    inside = sum(held(made(log_rate, pd.Poisson()), y, 0.8))
    assert place(39, "0.8") <= inside < 40


def test_classes_are_in_their_sets_at_least_as_often_and_no_set_is_empty() -> None:
    logits = 2 * torch.randn(6, 40, 4, dtype=torch.float64)
    prediction = made(logits, pd.Categorical())
    y = torch.distributions.Categorical(probs=(prediction.probs + 0.1)).sample()
    for level in ("0.5", "0.9"):
        assert sum(held(prediction, y, float(level))) >= place(39, level)
    best = prediction.probs.argmax(-1)  # always right: the set of a low level is the top class, even if it is doubtful
    assert torch.equal(
        pd.conformal(prediction, best).sets(prediction, 0.1), torch.nn.functional.one_hot(best, 4).bool()
    )


# --- what the intervals are -------------------------------------------------------------------------------------------


def test_several_targets_have_limits_of_their_own() -> None:
    prediction = made(torch.zeros(1, 99, 2, dtype=torch.float64), pd.Gaussian(1.0))
    y = torch.randn(99, 2, dtype=torch.float64) * torch.tensor([1.0, 7.0])
    _, high = pd.conformal(prediction, y).interval(prediction, 0.9)
    wanted = y.abs().sort(0).values[place(99, "0.9") - 1]
    torch.testing.assert_close(high[0], wanted, rtol=1e-6, atol=0)


def test_it_passes_through_json_unchanged() -> None:
    prediction = made(torch.zeros(1, 15, 1), pd.Poisson())
    y = torch.poisson(torch.ones(15, 1))
    y[3] = 1e4  # its tail cannot be told from zero: an infinite score
    calibrated = pd.conformal(prediction, y)
    again = pd.judging.Conformal.from_json(json.loads(json.dumps(calibrated.as_json(), allow_nan=False)))
    assert repr(again) == repr(calibrated) == "Conformal(15 rows, Poisson; levels up to 0.9375)"
    for level in (0.5, 0.9375):
        both = zip(calibrated.interval(prediction, level), again.interval(prediction, level), strict=True)
        assert all(torch.equal(one, other) for one, other in both)
    assert again.interval(prediction, 0.9375)[1][0].item() == math.inf
    assert again.interval(prediction, 0.8)[1][0].item() < 20


@pytest.mark.parametrize(
    "change",
    [
        {"scores": {"": []}},
        {"scores": {"": [[2.0], [1.0]]}},
        {"scores": {"": [["1"]]}},
        {"scores": {"a": [[1.0]]}},
        {"scores": {"": [[1.0], [1.0, 2.0]]}},
        {"scores": {}},
        {"family": 3},
        {"grouped": "no"},
    ],
)
def test_a_damaged_record_is_refused(change: dict[str, object]) -> None:
    whole = pd.conformal(made(torch.zeros(1, 5, 1), pd.Gaussian(1.0)), torch.randn(5, 1)).as_json()
    with pytest.raises(TypeError):
        pd.judging.Conformal.from_json(whole | change)


@pytest.mark.parametrize(
    ("n", "level", "fits"), [(19, 0.95, True), (18, 0.95, False), (99, 0.55, True), (9, 0.9, True)]
)
def test_a_level_is_refused_exactly_where_the_rows_do_not_support_it(n: int, level: float, fits: bool) -> None:
    prediction = made(torch.zeros(1, n, 1), pd.Gaussian(1.0))
    calibrated = pd.conformal(prediction, torch.randn(n, 1))
    assert (level <= calibrated.highest_level) == fits
    if fits:
        inside = [low <= 0 <= high for low, high in zip(*calibrated.interval(prediction, level), strict=True)]
        assert all(inside)
    else:
        with pytest.raises(pd.errors.RangeError, match=r"at most 0\.9474 with 18 .* needs 19"):
            calibrated.interval(prediction, level)


def test_the_highest_level_is_one_that_rows_support() -> None:
    """12/13 in floating point is a little more than twelve thirteenths."""
    for n in range(1, 400):
        known = pd.judging.Conformal(torch.arange(1.0, n + 1, dtype=torch.float64).unsqueeze(-1), "Gaussian")
        assert known.highest_level == pytest.approx(n / (n + 1), rel=1e-15)
        assert known.posterior_level(known.highest_level).item() == pytest.approx(1 - 2 * math.exp(-n))
