"""What draws random numbers beside dropout of rows: the model keeps it and draws it as the network does, or refuses."""

import copy
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pyro_dropout as pd
from tests.networks.agreement import largest_z, predicted, stochastic_passes
from tests.networks.layers import (
    Attention,
    BatchDepth,
    Counting,
    DropPath,
    ForwardOfPart,
    GaussianNoise,
    LayerDrop,
    OldAttention,
    OwnGenerator,
    OwnTorchGenerator,
    Shuffle,
    StochasticDepth,
    network,
)

pytestmark = pytest.mark.filterwarnings("ignore:the network's own noise")  # of shared draws

KEPT: dict[str, Callable[[], nn.Module]] = {
    "drop path": lambda: DropPath(0.3),
    "stochastic depth": lambda: StochasticDepth(0.3),
    "attention": lambda: Attention(0.3),
    "attention before kernels": lambda: OldAttention(0.3),
    "noise": lambda: GaussianNoise(0.3),
    "random slopes": nn.RReLU,
    "dropout before a shortcut": lambda: nn.Dropout(0.4),
    "alpha dropout": lambda: nn.AlphaDropout(0.3),
    "whole rows of units": lambda: nn.Dropout1d(0.3),
}
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "layer drop": (lambda: LayerDrop(0.5), "LayerDrop '1.noisy' draws .* Python's"),
    "a generator of its own": (OwnGenerator, "a module of Sequential draws .* a generator of its own"),
    "a generator of torch's": (OwnTorchGenerator, "OwnTorchGenerator '1.noisy' draws .* a generator of its own"),
    "one draw for a batch": (lambda: BatchDepth(0.3), "BatchDepth '1.noisy' draws .* same for all data points"),
    "shuffled points": (Shuffle, "Shuffle '1.noisy' draws .* may mix data points"),
    "a forward pass that is called": (ForwardOfPart, "ForwardOfPart '1.noisy' draws .* it alone is in training mode"),
    "statistics of its own": (Counting, "Counting '1.noisy' draws .* changes its buffers"),
}
X = torch.linspace(-1, 1, 6).reshape(2, 3)


@pytest.mark.parametrize("name", KEPT)
def test_noise_is_drawn_as_in_training_mode(name: str) -> None:
    # 4 differences, each beyond 4 standard errors with probability 6e-5 on correct code; the seed is fixed.
    torch.manual_seed(3)
    trained = len(name) % 2 == 0  # whatever the mode
    net = network(KEPT[name]())
    model, guide = pd.from_dropout(net.train(trained))
    model.train(trained)
    passes = stochastic_passes(net, X, 4000)
    assert largest_z(passes, predicted(model, guide, X, 4000)) < 4
    assert model.noise == ["1.noisy"]
    assert model.dropped == ["1.drop"]
    assert "noise of the network's own, at every pass: 1.noisy" in repr(model)
    assert all(module.training is trained for module in model.net.modules())


@pytest.mark.parametrize("name", REFUSED)
def test_other_noise_is_refused_by_name(name: str) -> None:
    make, words = REFUSED[name]
    trained = len(name) % 2 == 0
    net = network(make()).train(trained)
    model, guide = pd.from_dropout(net)
    before = states()
    with pytest.raises(pd.errors.PyroDropoutError, match=words):
        pd.predict(model, guide, X, samples=3, seed=0)
    with pytest.raises(pd.errors.PyroDropoutError, match=words):
        pd.from_dropout(net, example=X)
    assert states() == before
    assert net.training is trained
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


def states() -> tuple[object, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())  # noqa: NPY002 - the shared one


def test_the_standard_prediction_has_no_noise() -> None:
    net = network(GaussianNoise(0.3))
    model, guide = pd.from_dropout(net)
    found = pd.predict(model, guide, X, method="standard").mean
    assert torch.allclose(found, net.eval()(X), atol=1e-6)


NEEDS_FUNCTIONS: dict[str, Callable[[pd.BayesianNet, nn.Module], object]] = {
    "nuts": lambda model, guide: pd.nuts(model, X, torch.zeros(2, 1), samples=4, warmup=4, chains=1),
    "conjugate": lambda model, guide: pd.references.conjugate(model, X, torch.zeros(2, 1)),
    "thompson": lambda model, guide: pd.judging.thompson(model, guide, X),
}


@pytest.mark.parametrize("asker", NEEDS_FUNCTIONS)
def test_what_needs_functions_of_the_weights_is_refused(asker: str) -> None:
    with pytest.raises(pd.errors.PyroDropoutError, match=r"noise of its own at every pass, in '1\.noisy'"):
        NEEDS_FUNCTIONS[asker](*pd.from_dropout(network(GaussianNoise(0.3))))


def build(seed: int = 0) -> tuple[nn.Module, nn.Module]:
    return pd.from_dropout(network(BatchDepth(0.3)).eval())


VERBS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "fit": lambda x, y: pd.fit(*build(), x, y, steps=1, compile=False, progress=False),
    "compiled": lambda x, y: pd.fit(*build(), x, y, steps=1, compile=True, progress=False),
    "shared": lambda x, y: pd.predict(*build(), x, samples=3, shared=True),
    "fleet": lambda x, y: pd.Fleet(build, {"seed": [0, 1]}).fit(x, y, steps=1, progress=False),
}


@pytest.mark.parametrize("verb", [pytest.param("compiled", marks=pytest.mark.deep), "fit", "shared", "fleet"])
def test_it_is_noticed_by_every_verb(verb: str) -> None:
    with pytest.raises(pd.errors.PyroDropoutError, match=r"BatchDepth '1\.noisy' draws"):
        VERBS[verb](torch.randn(6, 3), torch.randn(6, 1))


@pytest.mark.parametrize("make", [lambda: DropPath(0.0), lambda: StochasticDepth(0.0), lambda: Attention(0.0)])
def test_a_probability_of_zero_is_no_randomness(make: Callable[[], nn.Module]) -> None:
    net = network(make())
    state = copy.deepcopy(net.state_dict())
    model, guide = pd.from_dropout(net, example=X)
    assert model.noise == []
    assert largest_z(stochastic_passes(net, X, 3000), predicted(model, guide, X, 3000)) < 4
    assert all(torch.equal(value, state[key]) for key, value in net.state_dict().items())


class NeedsTargets(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            raise ValueError("give targets in training mode")
        return super().forward(x)


def test_what_runs_in_evaluation_mode_only_is_taken_with_a_warning() -> None:
    net = NeedsTargets(nn.Dropout(0.5), nn.Linear(3, 4), nn.Dropout(0.5)).eval()
    model, guide = pd.from_dropout(net)
    with pytest.warns(UserWarning, match=r"does not run in training mode \(ValueError: give targets"):
        assert float(pd.predict(model, guide, torch.ones(4, 3), samples=200).epistemic.min()) > 0
    assert model.noise == ["0", "2"]  # torch cannot follow it, so that both stay where they are


class Pair(nn.Module):
    """Takes two inputs and returns several things, as the networks of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, inputs: Tensor, mask: Tensor) -> dict[str, Tensor | None]:
        return {"loss": None, "logits": F.dropout(self.layer(inputs * mask), 0.3, self.training)}


def test_networks_with_several_inputs_and_outputs() -> None:
    torch.manual_seed(5)
    net, x = Pair(), {"inputs": X, "mask": torch.ones(2, 3)}
    model, guide = pd.from_dropout(net, output="logits", example=x)
    assert model.noise == [""]
    many = {name: part.repeat(3000, 1) for name, part in x.items()}
    with torch.no_grad():
        passes = net.train()(**many)["logits"].reshape(3000, 2, 2)
    assert largest_z(passes, pd.predict(model, guide, x, samples=3000, keep_samples=True, seed=0).samples) < 4


def test_standardised_networks_keep_their_noise() -> None:
    x, y = torch.randn(8, 3) + 5, torch.randn(8, 1)
    model, guide = pd.from_dropout(network(GaussianNoise(3.0)))
    whole = pd.Standardised(model, x, y)
    with pytest.raises(pd.errors.PyroDropoutError, match="Thompson sampling needs"):
        pd.judging.thompson(whole, guide, x)
    quiet, same = pd.from_dropout(network(GaussianNoise(0.0)))
    for noisy, other in zip(guide.parameters(), same.parameters(), strict=True):
        other.data.copy_(noisy)
    loud, low = (pd.predict(m, g, x[:1], samples=300, seed=0).epistemic for m, g in ((whole, guide), (quiet, same)))
    assert float(loud / low) > 3


@pytest.mark.deep
def test_noise_that_networks_would_share_is_refused() -> None:
    x, y = torch.randn(8, 3), torch.randn(8, 1)
    model, _ = pd.from_dropout(network(StochasticDepth(0.3)))
    with pytest.raises(pd.errors.PyroDropoutError, match=r"noise in place .*'1\.noisy'"):
        pd.fit(model, pd.Ensemble(model, members=2), x, y, steps=1, compile=False, progress=False)
