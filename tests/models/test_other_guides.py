"""The guides beside dropout: each is one of the model that it is given, and starts as it says."""

from typing import Any

import pytest
import torch
from experiments.other_guides import other_guides
from torch import nn

import pyro_dropout as pd


def keep(site: str) -> float:
    return 1.0 if site == "0.weight" else 0.9


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    return pd.BayesianNet(nn.Sequential(nn.Linear(1, 6), nn.ReLU(), nn.Linear(6, 1)))


@pytest.mark.parametrize("name", list(other_guides(keep)))
def test_every_guide_has_every_site_and_a_finite_bound(name: str, model: Any) -> None:
    guide = other_guides(keep)[name](model)
    assert set(guide.mean()) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    parts = pd.ELBO().parts(model, guide, torch.zeros(4, 1), torch.zeros(4, 1))
    assert bool(torch.isfinite(parts["kl"]))


def test_the_kept_input_has_next_to_no_noise(model: Any) -> None:
    guides = {name: make(model) for name, make in other_guides(keep, init_scale=0.02).items()}
    draws = guides["multiplicative"].sample_weights(2000)
    for site, noise in (("0.weight", 1e-3), ("2.weight", (1 / 0.9 - 1) ** 0.5)):
        mean = guides["multiplicative"].mean()[site]
        assert (draws[site].std(0) / mean.abs()).median().item() == pytest.approx(noise, rel=0.1)
    assert torch.allclose(guides["mean field"].posterior("2.weight").stddev, torch.tensor(0.02))
    with pytest.raises(pd.RangeError, match="init_scale"):
        other_guides(keep, init_scale=0.0)
