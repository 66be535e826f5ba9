"""Parameters with requires_grad=False stay as they are: not random, not trained, and said to be frozen."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pyro_dropout as pd

X, Y = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), torch.zeros(8, 1)
QUIET: dict[str, Any] = {"compile": False, "progress": False}


class LoRA(nn.Module):
    """peft's: a frozen layer, and a trained product of two thin matrices beside it."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Linear(base.in_features, rank, bias=False)
        self.lora_b = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.lora_b(self.lora_a(x))


def backbone_and_head() -> nn.Sequential:
    net = nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 1))
    net[:2].requires_grad_(False)
    return net


def frozen_of(net: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in net.named_parameters() if not p.requires_grad}


@pytest.mark.parametrize("make", [backbone_and_head, lambda: nn.Sequential(LoRA(nn.Linear(3, 8)), nn.Linear(8, 1))])
@pytest.mark.parametrize("how", ["dropout", "ensemble"])
def test_frozen_parameters_are_neither_random_nor_trained(make: Any, how: str) -> None:
    net = make()
    before = frozen_of(net)
    model = pd.BayesianNet(net)
    assert not set(model.sites) & set(before)
    guide = pd.AutoDropout(model, keep=0.9) if how == "dropout" else pd.Ensemble(model, members=3)
    pd.fit(model, guide, X, Y, steps=3, lr=0.1, **QUIET)
    assert all(torch.equal(value, before[name]) for name, value in frozen_of(net).items())
    assert set(frozen_of(net)) == set(before)
    assert not set(guide.mean()) & set(before)


def test_a_network_that_is_frozen_whole_is_refused_by_name() -> None:
    net = nn.Linear(3, 1).requires_grad_(False)
    with pytest.raises(
        pd.errors.PyroDropoutError, match=r"all 2 parameters .* requires_grad=False.*include_frozen=True"
    ):
        pd.BayesianNet(net)
    assert list(pd.BayesianNet(net, pd.Prior(include_frozen=True)).sites) == ["weight", "bias"]


def test_a_saved_posterior_brings_the_frozen_ones_along(tmp_path: Path) -> None:
    pairs = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = pd.BayesianNet(backbone_and_head())
        pairs.append((model, pd.AutoDropout(model)))
    pd.save(tmp_path / "q", *pairs[0])
    pd.load(tmp_path / "q", *pairs[1])
    means = [pd.predict(*pair, X, method="standard").mean for pair in pairs]
    assert torch.equal(*means)
    everything = pd.BayesianNet(backbone_and_head(), pd.Prior(include_frozen=True))
    with pytest.raises(pd.errors.PyroDropoutError, match="another model or guide"):
        pd.load(tmp_path / "q", everything, pd.AutoDropout(everything))


@pytest.mark.parametrize("all_of_it", [True, False])
def test_from_dropout_reads_a_frozen_network(all_of_it: bool) -> None:
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    (net if all_of_it else net[:4]).requires_grad_(False)
    expected = copy.deepcopy(net)
    model, guide = pd.from_dropout(net)
    assert {"0.weight", "3.weight"} & set(model.sites) == {"3.weight"}
    rows = X[:1].expand(4000, 3)
    with torch.no_grad():
        spread = net(rows).var()
    assert float(pd.predict(model, guide, rows, samples=2, seed=0).samples.var() / spread) == pytest.approx(1, abs=0.15)
    if all_of_it:
        with pytest.raises(pd.errors.PyroDropoutError, match="nothing to train"):
            pd.fit(model, guide, X, Y, steps=2, lr=0.1, **QUIET)
        return
    pd.fit(model, guide, X, Y, steps=2, lr=0.1, **QUIET)
    assert torch.allclose(guide.mean()["3.weight"], expected[3].weight)
    assert torch.equal(model.net.get_parameter("0.weight"), expected[0].weight)
    assert not torch.allclose(guide.mean()["5.weight"], expected[5].weight)
    assert [p.requires_grad for p in net.parameters()] == [p.requires_grad for p in expected.parameters()]
