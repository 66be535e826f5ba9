"""What the kernel takes, and what it leaves to the steps of any model. No Triton is needed to decide."""

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pyro
import pytest
import torch
from torch import nn

import pyro_dropout as pd
from pyro_dropout.engines.engine import CannotError
from pyro_dropout.generative.precision import products_in
from pyro_dropout.training.compile.functional import Parameters
from pyro_dropout.training.one_kernel import fused_run
from pyro_dropout.training.one_kernel.dropout_network import DropoutNetwork
from pyro_dropout.training.one_kernel.small_network import small_network
from pyro_dropout.training.optimisers import adam, cosine_decay, named, sgd
from pyro_dropout.training.torch_optimisers import from_optimiser


def layers(*parts: nn.Module) -> nn.Sequential:
    return nn.Sequential(*(parts or (nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))))


def looked_at(
    model: Any = None,
    guide: Any = None,
    loss: Any = None,
    update: Any = None,
    x: Any = None,
    y: Any = None,
    batch: int = 6,
) -> DropoutNetwork:
    model = pd.BayesianNet(layers(), likelihood=pd.Gaussian(4.0)) if model is None else model
    guide = pd.AutoDropout(model) if guide is None else guide(model)
    loss = pd.ELBO() if loss is None else loss
    x = torch.randn(12, 3) if x is None else x
    y = torch.randn(12, 2) if y is None else y
    with pyro.get_param_store().scope():
        parameters = Parameters(model, guide, loss, (x, y), {})
        return small_network(model, guide, loss, update or named("adam", 1e-3), parameters, x, y, batch)


def test_an_ordinary_network_is_read_layer_by_layer() -> None:
    found = looked_at()
    assert (found.widths, found.kinds, found.places) == ((3, 8, 2), (0,), (0, 1, 2, 3))
    assert found.adam == (0.9, 0.999, 1e-8)
    assert not found.learned


ACCEPTED: dict[str, Callable[[], DropoutNetwork]] = {
    "one layer alone": lambda: looked_at(pd.BayesianNet(nn.Linear(3, 2))),
    "other activations": lambda: looked_at(
        pd.BayesianNet(
            layers(
                nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4), nn.Sigmoid(), nn.Linear(4, 5), nn.SiLU(), nn.Linear(5, 2)
            )
        )
    ),
    "keep by site": lambda: looked_at(guide=lambda m: pd.AutoDropout(m, keep={"0.weight": 1.0, "2.weight": 0.5})),
    "keep by row": lambda: looked_at(
        guide=lambda m: pd.AutoDropout(m, keep={"0.weight": torch.tensor([0.5, 0.9, 1.0]), "2.weight": 0.5})
    ),
    "torch's Adam": lambda: looked_at(update=from_optimiser(torch.optim.Adam([torch.zeros(1)], betas=(0.8, 0.99)))),
    "learned noise": lambda: looked_at(
        pd.BayesianNet(layers(), likelihood=pd.Gaussian(torch.tensor([1.0, 2.0]), learn=True))
    ),
    "widths of the prior by input": lambda: looked_at(
        pd.BayesianNet(layers(), pd.Prior(length_scale={"0.weight": torch.ones(3)}))
    ),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_it_takes(name: str) -> None:
    assert ACCEPTED[name]().widths[0] == 3


def test_it_takes_standardised_data() -> None:
    x, y = torch.randn(12, 3), torch.randn(12, 2)
    model = pd.Standardised(pd.BayesianNet(layers(), likelihood=pd.Gaussian(4.0)), x, y)
    assert looked_at(model, x=x, y=y).widths == (3, 8, 2)


class Own(nn.Module):
    """A network with code of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


class Louder(pd.Gaussian):
    """A likelihood of someone else."""


def hooked() -> Any:
    net = layers()
    net[0].register_forward_hook(lambda module, args, output: output * 2)
    return pd.BayesianNet(net)


def tied() -> Any:
    net = layers(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))
    net[2].weight = net[0].weight
    return pd.BayesianNet(net)


def frozen() -> Any:
    net = layers()
    net[0].weight.requires_grad_(False)
    return pd.BayesianNet(net)


def small() -> nn.Linear:
    return nn.Linear(2, 2)


PAIR: list[Callable[[], nn.Module]] = [nn.ReLU, small]


def in_doubles() -> Any:
    return pd.BayesianNet(layers().double())


def fifty() -> list[nn.Module]:
    return [nn.Linear(50, 50)]


def doubles(columns: int) -> torch.Tensor:
    return torch.randn(12, columns, dtype=torch.float64)


def wide(model: Any) -> Any:
    return pd.AutoDropout(model, scale=0.1, bias="gaussian")


def shared() -> pd.ELBO:
    return pd.ELBO(per_example=False)


# why, and how
REFUSED: dict[str, tuple[str, Callable[[], DropoutNetwork]]] = {
    "a module of a user": ("code of a user", lambda: looked_at(pd.BayesianNet(Own()))),
    "a hook": ("code of a user", lambda: looked_at(hooked())),
    "an own likelihood": ("code of a user", lambda: looked_at(pd.BayesianNet(layers(), likelihood=Louder(1.0)))),
    "another likelihood": (
        "Gaussian",
        lambda: looked_at(pd.BayesianNet(layers(), likelihood=pd.Poisson()), y=torch.ones(12, 2)),
    ),
    "another model": (
        "not a BayesianNet",
        lambda: looked_at(pd.FiniteRankGP(in_features=3, out_features=2, width=4)),
    ),
    "GELU": ("GELU", lambda: looked_at(pd.BayesianNet(layers(nn.Linear(3, 8), nn.GELU(), nn.Linear(8, 2))))),
    "normalisation": (
        "LayerNorm",
        lambda: looked_at(pd.BayesianNet(layers(nn.Linear(3, 8), nn.LayerNorm(8), nn.Linear(8, 2)))),
    ),
    "two activations": (
        "Linear",
        lambda: looked_at(pd.BayesianNet(layers(nn.Linear(3, 8), nn.ReLU(), nn.Tanh(), nn.Linear(8, 2)))),
    ),
    "an activation at the end": ("last layer", lambda: looked_at(pd.BayesianNet(layers(nn.Linear(3, 2), nn.ReLU())))),
    "no bias": ("no bias", lambda: looked_at(pd.BayesianNet(layers(nn.Linear(3, 2, bias=False))))),
    "a frozen parameter": ("not random", lambda: looked_at(frozen())),
    "tied layers": ("not random", lambda: looked_at(tied())),
    "learned widths": ("learned", lambda: looked_at(pd.BayesianNet(layers(), pd.Prior(learn=True)), wide)),
    "all points at once": ("share", lambda: looked_at(pd.BayesianNet(layers(), whole_batch=True), loss=shared())),
    "one learned noise of two outputs": (
        "share",
        lambda: looked_at(pd.BayesianNet(layers(), likelihood=pd.Gaussian(1.0, learn=True))),
    ),
    "another guide": ("AutoDropout", lambda: looked_at(guide=pd.AutoMeanField)),
    "learned keep": ("AutoDropout", lambda: looked_at(guide=pd.AutoConcreteDropout)),
    "a width": ("neither", lambda: looked_at(guide=lambda m: pd.AutoDropout(m, scale=0.1))),
    "Gaussian biases": ("neither", lambda: looked_at(guide=lambda m: pd.AutoDropout(m, bias="gaussian"))),
    "dropped biases": ("neither", lambda: looked_at(guide=lambda m: pd.AutoDropout(m, bias="dropout"))),
    "rows of outputs": ("neither", lambda: looked_at(guide=lambda m: pd.AutoDropout(m, row_dim=0))),
    "the exact KL": ("KL", lambda: looked_at(loss=pd.ELBO(kl="exact"))),
    "particles": ("particles", lambda: looked_at(loss=pd.ELBO(num_particles=2))),
    "a temperature": ("temperature", lambda: looked_at(loss=pd.ELBO(temperature=0.5))),
    "shared draws": ("share", lambda: looked_at(loss=shared())),
    "another loss": ("not the ELBO", lambda: looked_at(loss=pyro.infer.TraceMeanField_ELBO())),
    "gradient descent": ("not Adam", lambda: looked_at(update=sgd(0.1))),
    "AdamW": ("not Adam", lambda: looked_at(update=named("adamw", 1e-3))),
    "weight decay": ("weight decay", lambda: looked_at(update=adam(weight_decay=0.1))),
    "an own update": (
        "user|not Adam",
        lambda: looked_at(update=dataclasses.replace(adam(), apply=lambda p, g, s, *numbers: (p, s))),
    ),
    "a schedule": ("schedule", lambda: looked_at(update=named("adam", 1e-3, cosine_decay(10)))),
    "clipping": ("clipped", lambda: looked_at(update=named("adam", 1e-3, None, 1.0))),
    "inputs of another type": ("float32", lambda: looked_at(in_doubles(), x=doubles(3), y=doubles(2))),
    "inputs in another order": ("float32, row", lambda: looked_at(x=torch.randn(3, 12).T)),
    "a wide layer": ("units", lambda: looked_at(pd.BayesianNet(layers(nn.Linear(3, 65), nn.ReLU(), nn.Linear(65, 2))))),
    "a deep network": (
        "layers",
        lambda: looked_at(pd.BayesianNet(layers(nn.Linear(3, 2), *(make() for _ in range(4) for make in PAIR)))),
    ),
    "a large layer": (
        "weights",
        lambda: looked_at(pd.BayesianNet(layers(nn.Linear(3, 50), nn.ReLU(), *fifty(), nn.ReLU(), nn.Linear(50, 2)))),
    ),
    "a huge batch": ("products", lambda: looked_at(batch=10**6)),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_it_leaves_alone(name: str) -> None:
    reason, look = REFUSED[name]
    with pytest.raises(CannotError, match=reason):
        look()


def test_it_leaves_products_of_another_precision_alone() -> None:
    with products_in("bf16"):
        looked_at()
    with products_in("fp16"), pytest.raises(CannotError, match="float32"):
        looked_at()
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(CannotError, match="float32"):
        looked_at()


def test_a_point_whose_keep_was_changed_by_hand_is_left_alone() -> None:
    def changed(model: Any) -> Any:
        guide = pd.AutoDropout(model, keep={"0.weight": 1.0, "2.weight": 0.5})
        guide._states[guide._sites["0.weight"].key].keep.fill_(0.5)
        return guide

    with pytest.raises(CannotError, match="of a point"):
        looked_at(guide=changed)


def test_a_handler_around_a_training_is_seen() -> None:
    with pyro.poutine.scale(scale=2.0), pytest.raises(CannotError, match="code of a user"):
        looked_at()


def test_it_is_possible_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_run, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert fused_run.is_possible(gpu)
    assert not fused_run.is_possible(cpu)
    monkeypatch.setattr(fused_run, "find_spec", lambda name: None)
    assert not fused_run.is_possible(gpu)


@pytest.mark.deep
def test_nothing_loads_triton_where_there_is_no_gpu() -> None:
    code = """
import sys, torch, pyro_dropout as pd
model = pd.BayesianNet(torch.nn.Linear(2, 1))
pd.fit(model, pd.AutoDropout(model), torch.zeros(4, 2), torch.zeros(4, 1), steps=2, compile="auto", progress=False)
print("pyro_dropout.training.one_kernel.kernel" in sys.modules)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
