"""Recipes: what they build."""

import pytest
import torch

from pyro_dropout.tabular.recipe import Recipe


def test_a_cold_loss_rises_to_its_temperature() -> None:
    loss = Recipe("mean-field", prior="learned", temperature=0.3).how(10)["loss"]
    assert loss is not None
    found = [float(loss.temperature(torch.tensor(float(step)))) for step in (0, 4, 9)]  # type: ignore[operator]
    assert found == pytest.approx([0.06, 0.3, 0.3])
    assert Recipe("mean-field").how(10) == {"loss": None, "schedule": None}
