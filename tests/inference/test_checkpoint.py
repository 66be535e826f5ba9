"""Saving and loading what was learned: the same posterior comes back, and into nothing else."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pyro_dropout as pd
from pyro_dropout.guides import GUIDES
from pyro_dropout.inference.checkpoint import read_extra


def net(width: int = 4, dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 1)).to(dtype)


def pair(seed: int = 0, keep: float = 0.9, tau: float = 4.0, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = pd.BayesianNet(net(**options), likelihood=pd.Gaussian(tau))
    return model, pd.AutoDropout(model, keep=keep)


@pytest.mark.parametrize("kind", GUIDES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_guide_comes_back(tmp_path: Path, kind: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    pairs = [(model := pd.BayesianNet(net(dtype=dtype)), kind(model)) for _ in range(2)]
    pd.save(tmp_path / "q", *pairs[0])
    assert pd.load(tmp_path / "q", *pairs[1]) == {}
    x = torch.randn(5, 2, dtype=dtype)
    first, second = (pd.predict(*each, x, samples=7, seed=1, keep_samples=True).samples for each in pairs)
    assert torch.equal(first, second)


def test_what_is_learned_beside_the_guide_comes_back(tmp_path: Path) -> None:
    x = torch.randn(30, 2)
    made = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        body = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1))
        model = pd.Standardised(pd.BayesianNet(body, likelihood=pd.Gaussian(1.0, learn=True)), x, x[:, :1])
        made.append((model, pd.AutoMeanField(model)))
    pd.fit(*made[0], x, x[:, :1], steps=5, compile=False, progress=False)
    pd.save(tmp_path / "q", *made[0], extra={"columns": ["a", "b"]})
    assert read_extra(tmp_path / "q") == {"columns": ["a", "b"]} == pd.load(tmp_path / "q", *made[1])
    for name, tensor in made[0][0].state_dict().items():
        assert torch.equal(tensor, made[1][0].state_dict()[name]), name


DIFFERENT = {
    "another width": ({"width": 5}, r"guide.states.0/weight.loc: \(4, 2\) in the file, \(5, 2\) here"),
    "another type": ({"dtype": torch.float64}, "torch.float32 in the file, torch.float64 here"),
    "another keep": ({"keep": 0.8}, "keep: 0.9 in the file, 0.8 here"),
    "another tau": ({"tau": 9.0}, "model.likelihood.log_tau: 1.38629 in the file, 2.19722 here"),
    "a point in place of a mixture": ({"keep": 1.0}, "keep: 0.9 in the file, 1 here"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_another_model_is_refused_with_what_differs(tmp_path: Path, name: str) -> None:
    options, words = DIFFERENT[name]
    pd.save(tmp_path / "q", *pair())
    model, guide = pair(1, **options)
    before = {key: value.clone() for key, value in guide.state_dict().items()}
    with pytest.raises(pd.DifferentModelError, match=words):
        pd.load(tmp_path / "q", model, guide)
    assert all(torch.equal(value, before[key]) for key, value in guide.state_dict().items())


def test_another_guide_and_another_likelihood_are_named(tmp_path: Path) -> None:
    model, _ = pair()
    pd.save(tmp_path / "q", model, pd.AutoMeanField(model))
    with pytest.raises(pd.DifferentModelError, match="guide: AutoMeanField in the file, AutoDropout here"):
        pd.load(tmp_path / "q", *pair())
    other = pd.BayesianNet(net(), likelihood=pd.Poisson())
    with pytest.raises(pd.DifferentModelError, match="likelihood: Gaussian in the file, Poisson here"):
        pd.load(tmp_path / "q", other, pd.AutoMeanField(other))


def test_bad_places_and_extras(tmp_path: Path) -> None:
    with pytest.raises(pd.PyroDropoutError, match="cannot be written"):
        pd.save(tmp_path / "no" / "folder", *pair())
    with pytest.raises(pd.PyroDropoutError, match="extra must be what JSON can hold"):
        pd.save(tmp_path / "q", *pair(), extra={"x": object()})
    with pytest.raises(pd.PyroDropoutError, match="has not seen its model"):
        pd.save(tmp_path / "q", lambda x: None, pd.AutoDropout(lambda x: None))
    with pytest.raises(pd.PyroDropoutError, match="nothing to save"):
        pd.save(tmp_path / "q", lambda x: None, lambda x: None)
    with pytest.raises(pd.PyroDropoutError, match="there is no file"):
        pd.load(tmp_path / "q", *pair())
    assert list(tmp_path.iterdir()) == []
