"""Scores against closed forms, or computations that share no code with them."""

import math
from typing import Any

import pytest
import scipy.stats
import torch
from torch import Tensor

from pyro_dropout.benchmark import problems, scores
from pyro_dropout.benchmark.scores import Drawn, Truth, half_of, scored

F64 = torch.float64


def truth(draws: Tensor, **more: Any) -> Truth:
    std = draws.std(0, correction=0)
    known: dict[str, Any] = {"draws": draws, "mean": draws.mean(0), "std": std, "unit": std}
    return Truth(**{**known, "regions": None, "moments": {}, **more})


def normal(*shape: int, mean: float = 0.0, std: float = 1.0) -> Tensor:
    return mean + std * torch.randn(*shape, dtype=F64)


def test_wasserstein_of_few_numbers_is_that_by_hand() -> None:
    drawn = Drawn(torch.tensor([[3.0], [0.0]], dtype=F64), {})
    known = torch.tensor([[2.0], [0.0], [1.0]], dtype=F64)
    # thirds and halves: |0-0| on 1/3, |0-1| on 1/6, |3-1| on 1/6, |3-2| on 1/3
    by_hand = math.sqrt(1 / 6 + 4 / 6 + 1 / 3)
    assert scores.w2(drawn, truth(known, unit=torch.ones(1))) == pytest.approx(by_hand)


def test_wasserstein_of_normals_is_the_closed_form_in_the_references_widths() -> None:
    drawn, known = Drawn(normal(4000, 2, mean=1.0, std=0.5), {}), normal(3000, 2, std=2.0)
    assert scores.w2(drawn, truth(known)) == pytest.approx(math.hypot(1.0, 1.5) / 2, rel=0.05)  # by 4 errors


def test_energy_is_scipys_without_the_pairs_of_a_draw_with_itself() -> None:
    x, y = normal(60, 1, mean=0.5), normal(40, 1, std=2.0)
    squared = scipy.stats.energy_distance(x[:, 0].numpy(), y[:, 0].numpy()) ** 2
    within = [(part - part.T).abs().mean().item() for part in (x, y)]
    across = 2 * (x - y.T).abs().mean().item()
    squared -= sum(each / (len(part) - 1) for each, part in zip(within, (x, y), strict=True))
    assert scores.energy(Drawn(x, {}), truth(y, unit=torch.ones(1))) == pytest.approx(squared / across)


def test_energy_sees_correlations_that_no_single_point_shows() -> None:
    one = normal(500, 1)
    drawn, known = Drawn(one.expand(-1, 5), {}), truth(normal(500, 5))
    assert scores.w2(drawn, known) < 0.2
    assert scores.energy(drawn, known) > 0.03 > abs(scores.energy(Drawn(normal(500, 5), {}), known))


def test_classes_by_hand() -> None:
    probs = torch.tensor([[[0.9, 0.1], [0.4, 0.6]], [[0.7, 0.3], [0.2, 0.8]]], dtype=F64)
    known = torch.tensor([[[0.6, 0.4], [0.8, 0.2]]], dtype=F64)
    assert scores.agreement(Drawn(probs, {}), truth(known)) == 0.5
    assert scores.total_variation(Drawn(probs, {}), truth(known)) == pytest.approx((0.2 + 0.5) / 2)


def test_widths_are_ratios_by_region() -> None:
    known = normal(50, 3) * torch.tensor([1.0, 2.0, 3.0], dtype=F64)
    drawn = Drawn(known * torch.tensor([2.0, 0.5, 0.1], dtype=F64), {})
    found = truth(known, regions=torch.tensor([0, 1, 1]))
    assert scores.width(drawn, found) == pytest.approx(2.0)
    assert scores.width_gap(drawn, found) == pytest.approx(0.3)
    assert math.isnan(scores.width_outside(drawn, found))  # no such rows
    assert scores.width(drawn, truth(known)) == pytest.approx(2.6 / 3)  # parameters: all of them
    probabilities = truth(known, regions=torch.tensor([0, 0, 1]), unit=torch.ones(3))
    widths = known.std(0, correction=0)
    assert scores.width(drawn, probabilities) == pytest.approx(
        float((2 * widths[0] + widths[1] / 2) / widths[:2].sum())
    )


def test_coverage_is_the_probability_of_the_interval() -> None:
    drawn, known = Drawn(normal(20_000, 1, std=0.5), {}), truth(normal(20_000, 1))
    exact = scipy.stats.norm.cdf(0.5 * 1.95996) - scipy.stats.norm.cdf(-0.5 * 1.95996)
    assert scores.coverage(drawn, known) == pytest.approx(exact, abs=0.02)  # by 5 errors


def test_moments_are_those_of_normals() -> None:
    weights = {"w": torch.tensor([[1.0, 5.0], [3.0, 5.0]])}  # means 2 and 5, widths 1 and 0
    known = truth(normal(9, 1), moments={"w": (torch.tensor([2.0, 4.0]), torch.tensor([3.0, 1.0]))})
    expected = (2 / 3 + math.sqrt(2)) / 2
    assert scores.moments(Drawn(normal(2, 1), weights), known) == pytest.approx(expected)
    assert math.isnan(scores.moments(Drawn(normal(2, 1), {}), known))


@pytest.mark.parametrize(("different", "copies"), [(200, 1), (32, 10)])  # draws of a guide, and of an ensemble
def test_the_monte_carlo_error_is_how_far_the_score_scatters(different: int, copies: int) -> None:
    known = truth(normal(300, 4))
    drawn = [Drawn(normal(different, 4, mean=0.5).repeat(copies, 1), {}) for _ in range(40)]
    found = [scored(each, known, "numbers")["w2"] for each in drawn]
    values, errors = torch.tensor(found, dtype=F64).unbind(1)
    assert float(errors.mean() / values.std()) == pytest.approx(1.0, abs=0.45)  # by 4 errors of the standard deviation
    assert math.isnan(scored(Drawn(normal(1, 4), {}), known, "numbers")["w2"][1])  # one draw says nothing of it


@pytest.mark.parametrize("name", problems("full"))
def test_half_of_a_reference_is_nearly_the_other_half(name: str) -> None:
    problem = problems("full")[name]
    known = Truth.of(problem)
    found = scored(half_of(problem), known, problem.kind)
    assert abs(found["coverage"][0] - 0.95) < 0.03
    assert abs(found["energy"][0]) < 0.03
    assert found["width"][0] == pytest.approx(1.0, abs=0.15)
    shifted = Drawn(half_of(problem).quantities + known.std, {})
    assert scored(shifted, known, problem.kind)["w2"][0] > 2 * found["w2"][0]
