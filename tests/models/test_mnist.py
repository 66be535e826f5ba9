"""LeNet on digits: the script's attacks, turns, costs and scores against oracles of their own, and its record."""

from types import ModuleType
from typing import Any

import pytest
import torch

import pyro_dropout as pd
from tests.models.test_scripts import FOLDER, loaded

pytestmark = pytest.mark.deep  # the script runs whole, which takes a minute

WIDTHS = (3, 4, 12)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return loaded(FOLDER / "mnist.py")


def pair_of(script: ModuleType, arm: str, seed: int = 0) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    net = script.model(WIDTHS, 100)
    posterior = script.guide(net, arm)
    posterior(torch.zeros(2, 1, 28, 28), torch.zeros(2, dtype=torch.long))
    return net, posterior


def test_the_prior_is_the_weight_decay(script: ModuleType) -> None:
    net, posterior = pair_of(script, "none")
    terms = pd.ELBO().by_site(net, posterior, torch.zeros(2, 1, 28, 28), torch.zeros(2, dtype=torch.long), 100)
    for name in script.WEIGHTS:
        expected = 100 * script.WEIGHT_DECAY * posterior.mean()[name].square().sum().item()
        assert terms[name].item() == pytest.approx(expected, rel=1e-5)
