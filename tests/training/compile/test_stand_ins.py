"""Scripts of Pyro's tutorials, whose networks no module holds, train as with Pyro's own SVI on every engine."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyro
import pyro.contrib.gp as gp
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.optim import Adam
from torch import Tensor, nn

import pyro_dropout as pd
from pyro_dropout.errors import PyroDropoutError
from tests.contracts.models import recurrent

Case = tuple[Any, Any, tuple[Tensor, ...], nn.Module]  # model, guide, arguments, and the module that is trained


def _registered(net: nn.Module, **options: Any) -> Callable[[Tensor, Tensor], None]:
    def model(x: Tensor, y: Tensor) -> None:
        pyro.module("net", net, **options)
        shift = pyro.sample("shift", dist.Normal(torch.tensor(0.0), 0.1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(net(x) + shift, 0.5).to_event(1), obs=y)

    return model


def _pairs() -> tuple[Tensor, Tensor]:
    x = torch.randn(40, 5, 2)
    return x, x[:, :, 0].sum(1, keepdim=True) * 0.5


def _recurrent() -> nn.Module:
    """A network whose weights are also held in a list."""
    return recurrent(nn.LSTM(2, 4, batch_first=True), 1)


class _VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 4), nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 6))

    def model(self, x: Tensor) -> None:
        pyro.module("decoder", self.decoder)
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(x.new_zeros(len(x), 2), 1.0).to_event(1))
            pyro.sample("x", dist.Normal(self.decoder(z), 0.3).to_event(1), obs=x)

    def guide(self, x: Tensor) -> None:
        pyro.module("encoder", self.encoder)
        loc, log_scale = self.encoder(x).chunk(2, -1)
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(loc, (log_scale - 1).exp()).to_event(1))


def _function(net: nn.Module, **options: Any) -> Case:
    model = _registered(net, **options)
    return model, pd.AutoMeanField(model), _pairs(), net


def _vae() -> Case:
    vae = _VAE()
    return vae.model, vae.guide, (torch.randn(50, 2) @ torch.randn(2, 6) * 0.5,), vae


def _sparse_gp() -> Case:
    x = torch.linspace(0, 3, 30)
    y, points = torch.sin(2 * x) + 0.1 * torch.randn(30), torch.linspace(0, 3, 6)
    made = gp.models.SparseGPRegression(x, y, gp.kernels.RBF(1), Xu=points, jitter=1e-4)
    return made.model, made.guide, (), made


def _tied() -> Case:
    model, _, data, net = _function(nn.Sequential(nn.Flatten(), nn.Linear(10, 1)))

    def twice(x: Tensor, y: Tensor) -> None:
        pyro.module("head", net[1])  # type: ignore[index]
        model(x, y)

    return twice, pd.AutoMeanField(twice), data, net


def _small() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(10, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


CASES: dict[str, Callable[[], Case]] = {
    "function": lambda: _function(_small()),
    "written back": lambda: _function(_small(), update_module_params=True),
    "recurrent": lambda: _function(_recurrent()),
    "two names": _tied,
    "bound methods": _vae,
    "sparse gp": _sparse_gp,
}


def _built(name: str) -> Case:
    pyro.clear_param_store()
    pyro.set_rng_seed(3)
    return CASES[name]()


def _ends(losses: Tensor) -> Tensor:
    return torch.stack([losses[:10].mean(), losses[-10:].mean()])


@pytest.mark.thinned(9)
@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.deep) if each == "function" else each for each in CASES]
)
def test_they_train_as_with_pyro(name: str) -> None:
    """Every engine descends as Pyro's SVI does; fails never: all seeds are set."""
    model, guide, data, owner = _built(name)
    svi = SVI(model, guide, Adam({"lr": 0.02}), Trace_ELBO())
    stock = _ends(torch.tensor([svi.step(*data) for _ in range(80)]))
    results = []
    for how in (False, "traced", *[True] * (name in ("function", "bound methods"))):
        model, guide, data, owner = _built(name)
        before = [p.detach().clone() for p in owner.parameters()]
        quiet: dict[str, Any] = {"lr": 0.02, "compile": how, "progress": False, "seed": 1}
        found = _ends(pd.fit(model, guide, *data, steps=80, **quiet).losses)
        assert ((found - stock).abs() < 0.1 * (stock[0] - stock[1])).all()
        assert all(not torch.equal(p, old) for p, old in zip(owner.parameters(), before, strict=True))
        assert all(isinstance(p, nn.Parameter) for p in owner.parameters())
        results.append([*owner.parameters(), *owner.buffers()])
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-2, atol=1e-2)


def test_members_of_an_ensemble_share_them() -> None:
    """An ensemble trains the network that its members share."""
    model, _, data, net = _function(nn.Sequential(nn.Flatten(), nn.Linear(10, 1)))
    before = net[1].weight.detach().clone()  # type: ignore[index]
    pd.fit(
        model, pd.Ensemble(model, pd.AutoMeanField, members=2), *data, steps=5, compile=False, progress=False, seed=1
    )
    assert not torch.equal(net[1].weight, before)  # type: ignore[index]


@pytest.mark.parametrize("how", [False, "traced", True])
def test_a_registered_parameter_without_a_gradient_is_an_error(how: Any) -> None:
    """What the loss does not depend on is named, unless it is frozen; so is a network that is not run."""
    model, _, data, _ = _function(nn.Sequential(nn.Flatten(), nn.Linear(10, 1)))
    idle = nn.Linear(1, 1)

    def with_idle(*args: Any) -> None:
        pyro.module("idle", idle.train(False))
        model(*args)

    def by_hand(x: Tensor, y: Tensor) -> None:
        pyro.module("idle", idle)
        slope = pyro.sample("slope", dist.Normal(torch.tensor(0.0), 1.0))
        mean = slope * nn.functional.linear(x[:, 0, :1], idle.weight, idle.bias)
        pyro.sample("y", dist.Normal(mean, 1.0).to_event(2), obs=y)

    quiet: dict[str, Any] = {"steps": 2, "compile": how, "progress": False}
    for program in (with_idle, by_hand):
        with pytest.raises(PyroDropoutError, match=r"does not depend on 'idle\$\$\$weight', 'idle\$\$\$bias'"):
            pd.fit(program, pd.AutoMeanField(program), *data, **quiet)
    idle.requires_grad_(False)
    pyro.clear_param_store()
    assert pd.fit(with_idle, pd.AutoMeanField(with_idle), *data, **quiet).steps == 2


def test_they_are_saved_and_loaded(tmp_path: Path) -> None:
    """A file and a checkpoint hold the network of a plain function: parameters and running means."""
    quiet: dict[str, Any] = {"lr": 0.02, "compile": False, "progress": False, "seed": 1}
    model, guide, data, net = _built("function")
    whole = pd.fit(model, guide, *data, steps=12, checkpoint=tmp_path / "whole", **quiet).losses
    pd.save(tmp_path / "posterior", model, guide)
    model, guide, data, loaded = _built("function")
    guide(*data)
    pd.load(tmp_path / "posterior", model, guide)
    for steps in (5, 12):
        model, guide, data, resumed = _built("function")
        parts = pd.fit(model, guide, *data, steps=steps, checkpoint=tmp_path / "parts", **quiet).losses
    assert torch.equal(parts, whole)
    for other in (loaded, resumed):
        assert all(torch.equal(mine, other.state_dict()[name]) for name, mine in net.state_dict().items())
    model, guide, data, stock = _built("function")
    SVI(model, guide, Adam({"lr": 0.02}), Trace_ELBO()).step(*data)  # which tells this package nothing
    pd.save(tmp_path / "stock", model, guide)
    before = stock[1].weight.detach().clone()  # type: ignore[index]
    stock[1].weight.data.zero_()  # type: ignore[index]
    pd.load(tmp_path / "stock", model, guide)
    assert torch.equal(stock[1].weight, before)  # type: ignore[index]
    pyro.clear_param_store()
    with pytest.raises(PyroDropoutError, match=r"store\.net\$\$\$1\.weight: only in the file"):
        pd.load(tmp_path / "posterior", _function(nn.Linear(1, 1))[0], guide)
