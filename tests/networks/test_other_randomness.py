"""from_dropout refuses what draws random numbers beside the dropout that it reads: the pair would lack its spread."""

import copy
import random
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import pyro_dropout as pd
from tests.networks.noisy_layers import (
    Attention,
    DropPath,
    GaussianNoise,
    LayerDrop,
    OldAttention,
    OwnGenerator,
    StochasticDepth,
    network,
)

NOISY: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "drop path": (lambda: DropPath(0.3), "DropPath '1.noisy'"),
    "attention": (lambda: Attention(0.3), "Attention '1.noisy'"),
    "attention before kernels": (lambda: OldAttention(0.3), "OldAttention '1.noisy'"),
    "noise": (lambda: GaussianNoise(0.3), "GaussianNoise '1.noisy'"),
    "layer drop": (lambda: LayerDrop(0.5), "LayerDrop '1.noisy'"),
    "random slopes": (nn.RReLU, "RReLU '1.noisy'"),
    "stochastic depth": (lambda: StochasticDepth(0.3), "StochasticDepth '1.noisy'"),
    "a generator of its own": (OwnGenerator, "OwnGenerator '1.noisy'"),
}
# torch.fx does not see what these do: they are noticed with the first data.
UNSEEN = {"stochastic depth", "a generator of its own", "layer drop", "random slopes"}


@pytest.mark.parametrize("trained", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", NOISY)
def test_other_randomness_is_refused_by_name(name: str, trained: bool) -> None:
    make, words = NOISY[name]
    net = network(make()).train(trained)
    before = states()
    with pytest.raises(pd.PyroDropoutError, match=re.escape(words)):
        read_and_predict(net, name in UNSEEN)
    assert states() == before
    assert net.training is trained
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


def read_and_predict(net: nn.Module, unseen: bool) -> None:
    model, guide = pd.from_dropout(net)
    assert unseen
    pd.predict(model, guide, torch.ones(5, 3), samples=3, seed=0)


def states() -> tuple[object, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())  # noqa: NPY002 - the shared one


def build(seed: int = 0) -> tuple[nn.Module, nn.Module]:
    return pd.from_dropout(network(StochasticDepth(0.3)).eval())


VERBS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "fit": lambda x, y: pd.fit(*build(), x, y, steps=1, compile=False, progress=False),
    "compiled": lambda x, y: pd.fit(*build(), x, y, steps=1, compile=True, progress=False),
    "shared": lambda x, y: pd.predict(*build(), x, samples=3, shared=True),
    "fleet": lambda x, y: pd.Fleet(build, {"seed": [0, 1]}).fit(x, y, steps=1, progress=False),
}


@pytest.mark.parametrize("verb", [pytest.param("compiled", marks=pytest.mark.deep), "fit", "shared", "fleet"])
def test_it_is_noticed_by_every_verb(verb: str) -> None:
    with pytest.raises(pd.PyroDropoutError, match=r"StochasticDepth '1\.noisy' draws"):
        VERBS[verb](torch.randn(6, 3), torch.randn(6, 1))


@pytest.mark.parametrize("make", [lambda: DropPath(0.0), lambda: StochasticDepth(0.0), lambda: Attention(0.0)])
def test_a_probability_of_zero_is_no_randomness(make: Callable[[], nn.Module]) -> None:
    net = network(make())
    state = copy.deepcopy(net.state_dict())
    model, guide = pd.from_dropout(net)
    x = torch.randn(2000, 3)[:1].expand(2000, 3)
    found = pd.predict(model, guide, x, samples=5, seed=0).samples.std()
    with torch.no_grad():
        expected = torch.cat([net(x) for _ in range(5)]).std()
    assert float(found / expected) == pytest.approx(1, abs=0.06)
    assert all(torch.equal(value, state[key]) for key, value in net.state_dict().items())


def test_batch_statistics_stay_and_one_row_is_enough() -> None:
    net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1)).eval()
    model, guide = pd.from_dropout(net)
    pd.predict(model, guide, torch.randn(1, 3), samples=3)
    assert float(model.net[1].running_mean.abs().sum()) == 0
    assert int(model.net[1].num_batches_tracked) == 0
    assert not model.net.training


def test_what_runs_in_evaluation_mode_only_is_taken() -> None:
    class NeedsTargets(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                raise ValueError("give targets in training mode")
            return super().forward(x)

    model, guide = pd.from_dropout(NeedsTargets(nn.Dropout(0.5), nn.Linear(3, 1)).eval())
    assert float(pd.predict(model, guide, torch.ones(4, 3), samples=200).epistemic.min()) > 0
