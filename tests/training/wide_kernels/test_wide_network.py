"""What the kernels of wide layers take, and what they leave to the steps of any model. No Triton is needed for it."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pyro
import pytest
import torch
from torch import nn

import pyro_dropout as pd
from pyro_dropout.engines.engine import CannotError
from pyro_dropout.generative.precision import Precision, products_in
from pyro_dropout.training.compile.functional import Parameters
from pyro_dropout.training.optimisers import named
from pyro_dropout.training.wide_kernels.wide_network import DropoutNetwork, wide_network


def layers(*widths: int) -> nn.Sequential:
    parts = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*parts[:-1])


def looked_at(
    *widths: int,
    likelihood: Any = None,
    guide: Any = pd.AutoDropout,
    y: Any = None,
    batch: int = 6,
    precision: Precision = "bf16",
    **how: Any,
) -> DropoutNetwork:
    widths = widths or (3, 256, 2)
    model = pd.BayesianNet(layers(*widths), likelihood=likelihood or pd.Gaussian(4.0), **how)
    x = torch.randn(12, widths[0])
    y = torch.randn(12, widths[-1]) if y is None else y
    posterior, loss = guide(model), pd.ELBO()
    with pyro.get_param_store().scope(), products_in(precision):
        parameters = Parameters(model, posterior, loss, (x, y), {})
        return wide_network(model, posterior, loss, named("adam", 1e-3), parameters, x, y, batch)


def classes(kind: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.arange(12).to(kind) % 3


ACCEPTED: dict[str, Callable[[], DropoutNetwork]] = {
    "one hidden layer": looked_at,
    "several": lambda: looked_at(3, 256, 300, 1024, 2),
    "classes": lambda: looked_at(3, 256, 3, likelihood=pd.Categorical(), y=classes()),
    "many inputs and outputs": lambda: looked_at(1024, 256, 64),
    "a large batch": lambda: looked_at(batch=512),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_they_take(name: str) -> None:
    assert len(ACCEPTED[name]().widths) > 2


def test_classes_have_no_noise() -> None:
    found = ACCEPTED["classes"]()
    assert found.classes
    assert found.log_tau is None


REFUSED: dict[str, tuple[str, Callable[[], DropoutNetwork]]] = {
    "full precision": ("not in bf16", lambda: looked_at(precision="float32")),
    "a narrow layer": ("fewer", lambda: looked_at(3, 255, 2)),
    "one narrow layer of several": ("fewer", lambda: looked_at(3, 512, 16, 2)),
    "no hidden layer": ("hidden", lambda: looked_at(3, 2)),
    "a very wide layer": ("more than 1024 units", lambda: looked_at(3, 1025, 2)),
    "very many inputs": ("more than 1024 units", lambda: looked_at(1025, 256, 2)),
    "many outputs": ("outputs", lambda: looked_at(3, 256, 65)),
    "many layers": ("layers", lambda: looked_at(3, *[256] * 12, 2)),
    "a huge batch": ("points", lambda: looked_at(batch=513)),
    "learned noise": ("learned", lambda: looked_at(likelihood=pd.Gaussian(torch.ones(2), learn=True))),
    "another likelihood": (
        "Gaussian or Categorical",
        lambda: looked_at(likelihood=pd.Poisson(), y=torch.ones(12, 2)),
    ),
    "classes that may be missing": (
        "targets",
        lambda: looked_at(3, 256, 3, likelihood=pd.Categorical(ignore_index=-1), y=classes()),
    ),
    "classes of another type": (
        "64 bits",
        lambda: looked_at(3, 256, 3, likelihood=pd.Categorical(), y=classes(torch.int32)),
    ),
    "another guide": ("AutoDropout", lambda: looked_at(guide=pd.AutoMeanField)),
    "Gaussian biases": ("neither", lambda: looked_at(guide=lambda model: pd.AutoDropout(model, bias="gaussian"))),
    "learned widths": (
        "AutoDropout|learned",
        lambda: looked_at(prior=pd.Prior(learn=True, tempered=False), guide=pd.AutoMeanField),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_they_leave_alone(name: str) -> None:
    reason, look = REFUSED[name]
    with pytest.raises(CannotError, match=reason):
        look()
