"""Recipes: what they build."""

import pytest
import torch

from pyro_dropout.generative.likelihoods import Categorical, Gaussian, HeteroscedasticGaussian
from pyro_dropout.tabular.recipe import Recipe

X = torch.linspace(-1, 1, 12).reshape(6, 2)


@pytest.mark.parametrize(
    ("recipe", "classes", "likelihood", "outputs"),
    [
        (Recipe("mean-field", 4), (), Gaussian, 1),
        (Recipe("mean-field", 4, noise="by-input"), (), HeteroscedasticGaussian, 2),
        (Recipe("mean-field", 4), ("a", "b", "c"), Categorical, 3),
    ],
)
def test_a_recipe_builds_its_model(recipe: Recipe, classes: tuple[str, ...], likelihood: type, outputs: int) -> None:
    y = torch.arange(6) % 3 if classes else X[:, :1]
    model, _ = recipe.build((X, y), classes)
    assert isinstance(model.model.likelihood, likelihood)
    assert model.model.net[-1].out_features == outputs
    assert model.model.net[0].out_features == 4


def test_a_cold_loss_rises_to_its_temperature() -> None:
    loss = Recipe("mean-field", prior="learned", temperature=0.3).how(10)["loss"]
    assert loss is not None
    found = [float(loss.temperature(torch.tensor(float(step)))) for step in (0, 4, 9)]  # type: ignore[operator]
    assert found == pytest.approx([0.06, 0.3, 0.3])
    assert Recipe("mean-field").how(10) == {"loss": None, "schedule": None}
