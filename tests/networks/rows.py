"""What becomes of each network of the zoo: how its dropout is read, and whether training and predictions are right."""

import pathlib
import tempfile
import warnings
from typing import NamedTuple
from unittest import mock

import pyro
import torch
from torch import Tensor, nn

import pyro_dropout as pd
from tests.networks.agreement import largest_z, predicted, stochastic_passes
from tests.networks.zoo import ZOO, Graph

STEPS = 20
SAMPLES = 1000  # a network has 8 differences, each beyond 4 standard errors with probability 6e-5 on correct code


class Network(NamedTuple):
    """A network of the zoo with data, and the function that makes a fresh pair of it."""

    net: nn.Module
    x: Tensor
    y: Tensor

    def pair(self) -> tuple[pd.BayesianNet, pd.AutoDropout]:
        pyro.clear_param_store()
        whole = isinstance(self.net, Graph)
        return pd.from_dropout(self.net.eval(), example=self.x, whole_batch=whole)


def network(name: str) -> Network:
    torch.manual_seed(0)
    net, x = ZOO[name].make(), ZOO[name].inputs(6)
    with torch.no_grad():
        return Network(net, x, torch.randn_like(net.eval()(x)))


def distance(made: Network) -> float:
    """How far the pair's predictions are from passes in training mode, in standard errors."""
    whole = isinstance(made.net, Graph)  # one pass for each draw
    x = made.x if whole else made.x[:2]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the network's own noise .* is drawn for each point although shared=True")
        found = predicted(*made.pair(), x, SAMPLES, shared=whole)
    assert float(found.std(0).min()) > 0
    passes = [stochastic_passes(made.net, x, 1) for _ in range(SAMPLES)] if whole else None
    return largest_z(stochastic_passes(made.net, x, SAMPLES) if passes is None else torch.cat(passes), found)


def losses(made: Network, compile: bool | str) -> tuple[Tensor, str]:
    """Losses of the same parameters at every step, and why training was not compiled."""
    # So few steps would run eagerly by themselves.
    undecided = mock.patch("pyro_dropout.training.fit.decided", lambda compile, *sizes, **how: compile)
    with undecided, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model, guide = made.pair()
        history = pd.fit(model, guide, made.x, made.y, steps=STEPS, lr=1e-12, compile=compile, progress=False, seed=0)
    reasons = [str(each.message) for each in told if "compile" in str(each.message)]
    return torch.as_tensor(history.losses), reasons[0] if reasons else ""


def compiled(made: Network) -> tuple[str, str]:
    """Whether compiled training gives the losses of eager training; the reason if it cannot be compiled."""
    found, reason = losses(made, "auto")
    if reason:
        return "no, with a reason", reason
    eager, _ = losses(made, False)
    return "yes" if torch.allclose(eager, found, rtol=1e-5) else "NO", ""


def carried_on(made: Network) -> None:
    """Export a pair to ArviZ, and save it and load it; raise unless the copy predicts the same."""
    model, guide = made.pair()
    data = pd.to_arviz(model, guide, made.x, made.y, samples=4, seed=0)
    assert data["log_likelihood"]["y"].shape[-1] == len(made.x)
    path = pathlib.Path(tempfile.mkdtemp()) / "pair.safetensors"
    pd.fit(model, guide, made.x, made.y, steps=1, compile=False, progress=False, seed=0)
    pd.save(path, model, guide)
    fresh = made.pair()
    pd.load(path, *fresh)
    one, other = (pd.predict(*pair, made.x, samples=5, seed=0).mean for pair in ((model, guide), fresh))
    assert torch.equal(one, other)


def read(made: Network) -> list[str]:
    """How its dropout is read: dropout layers on rows, modules with noise of their own."""
    model, _ = made.pair()
    return [str(len(model.dropped)), str(len(model.noise))]


def line(name: str) -> str:
    """Return the line of a network in the table of docs/benchmarks.md."""
    made = network(name)
    cells = [name, *read(made), "yes" if distance(made) < 4 else "NO", compiled(made)[0]]
    carried_on(made)
    return "| " + " | ".join(cells) + " |"
