"""The choice of a recipe: what is tried, by which rule one wins, and what is said about it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import pyro_dropout as pd
from pyro_dropout.tables.settings import Training, Wanted
from pyro_dropout.tabular import choice
from pyro_dropout.tabular.choice import Choice, _Search, choose_recipe
from pyro_dropout.tabular.recipe import Recipe, natural_scale

X = torch.linspace(-1, 1, 60).unsqueeze(-1)
ROUGH = torch.sin(157 * X)  # stands for noise
HELD = torch.arange(60) % 3 == 0


def halves(y: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    return (X[~HELD], y[~HELD]), (X[HELD], y[HELD])


@pytest.mark.parametrize(
    ("y", "scale"),
    [
        ([0.2, 0.3, 0.9], "logit"),
        ([0.0, 0.3, 0.9], "plain"),  # 0 has no log-odds
        ([0.0, 1.0, 0.0], "plain"),  # yes and no are no counts
        ([0.0, 1.0, 5.0], "count"),
        ([0.0, 900.0, 5000.0], "plain"),  # whole, but large
        ([25.0, 90.0, 110.0], "plain"),  # whole, but far from 0
        ([-1.0, 1.0, 50.0], "plain"),
        ([0.0, 1.5, 50.0], "plain"),  # 0 has no logarithm
        ([8.0, 9.5, 10.0], "plain"),  # positive, but not skewed
        ([1.5, 1.6, 50.0], "log"),
        ([1e6, 1e6 + 1, 1e6 + 50], "plain"),  # positive and skewed, but the logarithm is one more unit
        ([0.5, 0.50001, 0.5001], "plain"),
    ],
)
def test_the_natural_scale_is_that_of_the_values(y: list[float], scale: str) -> None:
    assert natural_scale(torch.tensor(y).unsqueeze(-1)) == scale


def rule(monkeypatch: pytest.MonkeyPatch, gain: Any, y: Tensor, **given: Any) -> tuple[choice.Choice, list[Recipe]]:
    """Choose with the log densities ``gain(recipe)`` instead of those of trained networks."""
    tried: list[Recipe] = []

    class Answer:
        def __init__(self, recipe: Recipe) -> None:
            self.recipe = recipe

        def log_prob(self, y: Tensor) -> Tensor:
            return torch.as_tensor(gain(self.recipe)).expand(len(y))

    def train(self: Recipe, *args: Any, **how: Any) -> tuple[tuple[None, torch.nn.Module], None]:
        tried.append(self)
        return (None, torch.nn.Identity()), None

    monkeypatch.setattr(Recipe, "train", train)
    monkeypatch.setattr(Recipe, "predict", lambda self, *args, **how: Answer(self))
    found = choose_recipe(*halves(y), given.pop("classes", ()), Wanted(**given))
    assert tried.pop() == found.recipe  # trained again, with all steps
    return found, tried


def test_candidates_come_in_order_and_build_on_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    gains = {"log": 1.0, "plain": 0.0, "by-input": 0.5, "constant": 0.0, "ensemble": -2.0, "mean-field": 0.0}
    found, tried = rule(monkeypatch, lambda r: gains[r.scale] + gains[r.noise] + gains[r.guide], torch.exp(3 * X))
    assert [(r.guide, r.scale, r.noise) for r in tried] == [
        ("mean-field", "log", "constant"),
        ("mean-field", "plain", "constant"),
        ("mean-field", "log", "by-input"),
        ("ensemble", "log", "by-input"),
    ]
    assert found.recipe == tried[2]
    assert found.recipe.prior == "learned"
    assert [r.temperature for r in tried] == [1.0] * 4
    assert tried[3].prior == "fixed"  # points have no best prior
    assert found.said == (
        "mean-field with a learned prior, log target, noise by input: chosen on 33 % held back; constant noise would"
        " lose 0.5 nats, plain target with constant noise would lose 1.5 nats, ensemble would lose 2 nats."
    )
    assert list(found.scores.values()) == pytest.approx([1.0, 0.0, 1.5, -0.5])


def test_a_gain_within_its_error_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    noisy = torch.zeros(20)
    noisy[0], noisy[1] = 2.0, -1.0  # 0.05 on average, and its standard error is 0.11

    def gain(recipe: Recipe) -> Tensor:
        return noisy if recipe.noise == "by-input" else torch.zeros(20)

    found, _ = rule(monkeypatch, gain, ROUGH, guide="mean-field")
    assert found.recipe.noise == "constant"
    assert "noise by input would gain 0.05 ± 0.1 nats (may be chance)" in found.said
    noisy.fill_(0.1)  # surely, but little
    found, _ = rule(monkeypatch, gain, ROUGH, guide="mean-field")
    assert "noise by input would gain 0.1 nats (too few to count; --noise by-input takes it)" in found.said


@pytest.mark.parametrize("broken", [torch.nan, -torch.inf])
def test_a_candidate_without_a_density_never_wins(monkeypatch: pytest.MonkeyPatch, broken: float) -> None:
    found, _ = rule(monkeypatch, lambda r: broken if r.noise == "constant" else -5.0, ROUGH, guide="mean-field")
    assert found.recipe.noise == "by-input"
    found, _ = rule(monkeypatch, lambda r: broken if r.noise == "by-input" else -5.0, ROUGH, guide="mean-field")
    assert found.recipe.noise == "constant"


def test_what_is_given_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"guide": "dropout", "scale": "plain", "noise": "by-input", "width": 7}
    found, tried = rule(monkeypatch, lambda r: 0.0, torch.exp(3 * X), **given)
    assert tried == [found.recipe] == [Recipe("dropout", 7, noise="by-input", prior="default")]
    assert found.said == "dropout, plain target, noise by input: chosen on 33 % held back."


def test_counts_with_a_laplace_approximation_have_constant_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = (torch.arange(60.0) % 7).unsqueeze(-1)
    _, tried = rule(monkeypatch, lambda r: 1.0 if r.scale == "count" else 0.0, counts, guide="laplace")
    assert [(r.scale, r.noise) for r in tried] == [("count", "constant"), ("plain", "constant")]


def test_classes_have_neither_scale_nor_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    labels = (X[:, 0] > 0).long()
    found, tried = rule(monkeypatch, lambda r: 0.0, labels, classes=("no", "yes"))
    assert [(r.guide, r.scale, r.noise) for r in tried] == [
        ("mean-field", "plain", "constant"),
        ("mean-field", "plain", "constant"),
        ("ensemble", "plain", "constant"),
    ]
    assert found.said.startswith(
        "mean-field with a learned prior: chosen on 33 % held back; mean-field with a learned prior (cold) would lose"
    )
    for wrong in ({"noise": "by-input"}, {"scale": "log"}):
        with pytest.raises(pd.errors.PyroDropoutError, match="classes have no scale and no noise"):
            choose_recipe(*halves(labels), ("no", "yes"), Wanted(**wrong))


@pytest.mark.deep
def test_noise_that_grows_is_found_by_training() -> None:
    y = 2 * X + torch.where(X > 0, 1.0, 0.02) * ROUGH
    found = choose_recipe(*halves(y), (), Wanted("mean-field", "plain", width=10), Training(2400))
    assert found.recipe.noise == "by-input"
    low, high = found.prediction.interval(0.95)
    assert (high - low)[-5:].mean() > 2 * (high - low)[:5].mean()


@pytest.mark.deep
def test_a_candidate_that_more_steps_spoil_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise by input may win a short training and explode in a long one; its intervals would be of no use."""
    real = _Search._tried

    def tried(self: _Search, recipe: Recipe, steps: int | None = None) -> Choice:
        found = real(self, recipe, steps)
        if recipe.noise != "by-input":
            return found
        return replace(found, log_prob=found.log_prob + (100.0 if steps is None else -100.0))

    monkeypatch.setattr(_Search, "_tried", tried)
    found = choose_recipe(*halves(ROUGH), (), Wanted("mean-field", "plain", width=5), Training(20))
    assert found.recipe.noise == "constant"
    assert "noise by input diverged" in found.said


def test_a_cold_loss_rises_to_its_temperature() -> None:
    loss = Recipe("mean-field", prior="learned", temperature=0.3).how(10)["loss"]
    assert loss is not None
    found = [float(loss.temperature(torch.tensor(float(step)))) for step in (0, 4, 9)]  # type: ignore[operator]
    assert found == pytest.approx([0.06, 0.3, 0.3])
    assert Recipe("mean-field").how(10) == {"loss": None, "schedule": None}
