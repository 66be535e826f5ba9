"""Saving and loading what was learned: the same posterior comes back, and into nothing else."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pyro_dropout as pd
from pyro_dropout.guides import GUIDES
from pyro_dropout.training.checkpoints.tensor_file import read_facts


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
    assert read_facts(tmp_path / "q")["extra"] == {"columns": ["a", "b"]} == pd.load(tmp_path / "q", *made[1])
    for name, tensor in made[0][0].state_dict().items():
        assert torch.equal(tensor, made[1][0].state_dict()[name]), name


# --- what a model was told ------------------------------------------------------------------------------------------


def told(
    length_scale: float = 1.0,
    activation: nn.Module | None = None,
    wrapped: bool = False,
    learned: bool = False,
    double: bool = False,
) -> tuple[Any, Any]:
    body = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), activation or nn.ReLU(), nn.Linear(4, 1))
    likelihood = pd.Gaussian(torch.rand(()) + 1, learn=True) if learned else None
    model: Any = pd.BayesianNet(body, pd.Prior(length_scale=length_scale), likelihood)
    if double:
        model = model.double()
    if wrapped:
        model = pd.Standardised(model, torch.randn(9, 2), torch.randn(9, 1))
    return model, pd.AutoDropout(model)


def asked(kind: Any = pd.AutoDropout, members: int = 0, **options: Any) -> tuple[Any, Any]:
    model = pd.BayesianNet(net())
    if members:
        return model, pd.Ensemble(model, lambda model: kind(model, **options), members, seed=0)
    return model, kind(model, **options)


# How a pair is made, its options in the file, those that differ here, and what is said.
DIFFERENT: dict[str, tuple[Any, Any, Any, str]] = {
    "another width": (pair, {}, {"width": 5}, r"guide.states.0/weight.loc: \(4, 2\) in the file, \(5, 2\) here"),
    "another type": (pair, {}, {"dtype": torch.float64}, "torch.float32 in the file, torch.float64 here"),
    "another keep": (pair, {}, {"keep": 0.8}, "keep: 0.9 in the file, 0.8 here"),
    "another tau": (pair, {}, {"tau": 9.0}, "model.likelihood.log_tau: 1.38629 in the file, 2.19722 here"),
    "a point in place of a mixture": (pair, {}, {"keep": 1.0}, "keep: 0.9 in the file, 1 here"),
    "prior": (told, {}, {"length_scale": 10.0}, r"prior_scale/0/weight: 1 in the file, 0\.1 here"),
    "prior inside": (
        told,
        {"wrapped": True},
        {"length_scale": 10.0},
        r"prior_scale/0/weight: 1 in the file, 0\.1 here",
    ),
    "kind of layer": (told, {}, {"activation": nn.Tanh()}, "model.net.2: ReLU in the file, Tanh here"),
    "setting of a layer": (
        told,
        {"activation": nn.LeakyReLU()},
        {"activation": nn.LeakyReLU(0.3)},
        r"model.net.2.negative_slope: 0\.01 in the file, 0\.3 here",
    ),
    "rows elsewhere": (asked, {}, {"row_dim": 0}, r"guide.0.weight.row_dim: 1 in the file, 0 here"),
    "rows of members elsewhere": (
        asked,
        {"members": 2},
        {"row_dim": 0},
        r"guide.0.weight.row_dim: 1 in the file, 0 here",
    ),
    "biases dropped each by itself": (
        asked,
        {"bias": "dropout"},
        {"bias": "dropout_each"},
        "guide.0.bias.bias: dropout in the file, dropout_each here",
    ),
    "noise of each weight": (
        asked,
        {"kind": pd.AutoMultiplicative},
        {"per": "weight"},
        "guide.per: row in the file, weight here",
    ),
    "another relaxation": (
        asked,
        {"kind": pd.AutoConcreteDropout},
        {"temperature": 0.5},
        "guide.temperature: 0.1 in the file, 0.5 here",
    ),
    "more layers": (told, {}, {"activation": nn.Sequential(nn.ReLU())}, "model.net.2.0: not in the file"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_another_pair_is_refused_with_what_differs_and_stays(tmp_path: Path, name: str) -> None:
    make, options, other, words = DIFFERENT[name]
    pd.save(tmp_path / "q", *make(**options))
    torch.manual_seed(1)
    parts = make(**{**options, **other})
    before = [{key: value.clone() for key, value in part.state_dict().items()} for part in parts]
    with pytest.raises(pd.errors.DifferentModelError, match=words):
        pd.load(tmp_path / "q", *parts)
    for part, values in zip(parts, before, strict=True):
        assert all(torch.equal(value, values[key]) for key, value in part.state_dict().items())


@pytest.mark.parametrize("options", [{"wrapped": True}, {"learned": True}, {"double": True}], ids=str)
def test_what_a_model_learned_or_gathered_is_no_difference(tmp_path: Path, options: dict[str, Any]) -> None:
    """Data's means, a learned τ, running means, the mode of a network, an activation in place."""
    first, second = told(**options), told(activation=nn.ReLU(inplace=True), **options)
    with torch.no_grad():
        for buffer in first[0].buffers():
            if buffer.shape == (4,):
                buffer.add_(1.0)
    first[0].eval()
    pd.save(tmp_path / "q", *first)
    assert pd.load(tmp_path / "q", *second) == {}
