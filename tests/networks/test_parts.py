"""Parts of a network that are not random: frozen parameters and statistics, and all that `only` does not name."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from pyro.infer import Predictive
from torch import Tensor, nn

import pyro_dropout as pd

X, Y = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), torch.zeros(8, 1)
QUIET: dict[str, Any] = {"compile": False, "progress": False}


def backbone_and_head() -> nn.Sequential:
    net = nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 1))
    net[:2].requires_grad_(False)
    return net


def frozen_of(net: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in net.named_parameters() if not p.requires_grad}


@pytest.mark.parametrize("how", ["dropout", "ensemble"])
def test_frozen_parameters_are_neither_random_nor_trained(how: str) -> None:
    net = backbone_and_head()
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


def body_and_head() -> nn.Sequential:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU())
    return nn.Sequential(body, nn.Linear(6, 2))


@pytest.mark.parametrize("only", ["1.*", ["1.weight", "1.bias"], ("1.?????*", "1.bias")])
def test_only_the_named_parameters_are_random_and_trained(only: Any) -> None:
    net = body_and_head()
    model = pd.BayesianNet(net, only=only)
    assert list(model.sites) == ["1.weight", "1.bias"]
    before = {name: value.clone() for name, value in net.state_dict().items()}
    guide = pd.AutoMeanField(model)
    x, y = torch.randn(8, 3), torch.randn(8, 2)
    pd.fit(model, guide, x, y, steps=3, compile=False, progress=False)
    body = {name: value for name, value in net.state_dict().items() if name.startswith("0.")}
    assert all(torch.equal(value, before[name]) for name, value in body.items())  # running statistics too
    assert set(guide.posterior("1.weight").variance.shape) == {2, 6}


@pytest.mark.parametrize(
    ("only", "said"),
    [
        ("classifier.*", r"only names 'classifier.\*', which matches none of the 6 parameters, such as"),
        ([], "only must be a pattern of names"),
        (3, "only must be a pattern of names"),
        ("0.1.*", "normalisation|hidden|hides"),
    ],
)
def test_what_matches_nothing_is_named(only: Any, said: str) -> None:
    net = body_and_head()
    with pytest.raises(pd.errors.PyroDropoutError, match=said):
        pd.BayesianNet(net, only=only)


def network(affine: bool = True) -> nn.Sequential:
    """A frozen backbone with normalisation, as torchvision's ResNets have it, and a head."""
    backbone = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8, affine=affine), nn.ReLU())
    backbone.train()(torch.randn(64, 3))  # it has seen other data
    return nn.Sequential(backbone.requires_grad_(False), nn.Linear(8, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1))


def statistics(net: nn.Module, layer: str) -> Tensor:
    found = net.get_submodule(layer)
    return torch.cat([found.running_mean, found.running_var, found.num_batches_tracked.reshape(1)])


def runs(model: pd.BayesianNet, guide: Any) -> dict[str, Any]:
    return {
        "fit": lambda: pd.fit(model, guide, X, Y, steps=2, **QUIET),
        "Predictive": lambda: Predictive(model, guide=guide, num_samples=3)(X),
        "vectorised": lambda: Predictive(model, guide=guide, num_samples=3, parallel=True)(X),
        "loss": lambda: pd.ELBO(num_particles=2).loss(model, guide, X, Y),
        "call": lambda: model(X),
    }


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("run", ["fit", "Predictive", "vectorised", "loss", "call"])
def test_frozen_statistics_stay(run: str, affine: bool) -> None:
    net = network(affine)
    model = pd.BayesianNet(net)
    guide = pd.AutoDropout(model)
    before, other = statistics(net, "0.1"), statistics(net, "2")
    runs(model, guide)[run]()
    assert torch.equal(statistics(net, "0.1"), before)
    assert not torch.equal(statistics(net, "2"), other)  # those of a trained layer move, as in torch
    assert all(module.training for module in net.modules())


@pytest.mark.parametrize(("choice", "moved"), [(False, {"0.1", "2"}), (True, {"2"}), ("all", set())])
def test_it_can_be_chosen(choice: Any, moved: set[str]) -> None:
    net = network()
    model = pd.BayesianNet(net, frozen_statistics=choice)
    before = {layer: statistics(net, layer) for layer in ("0.1", "2")}
    model(X)
    assert {layer for layer, value in before.items() if not torch.equal(value, statistics(net, layer))} == moved
    for layer in before:
        kind = "running statistics that move in train(): " if layer in moved else "running statistics that stay: "
        line = next(line for line in repr(model).splitlines() if kind in line)
        assert layer in line.split(": ")[1].split(", ")
    with pytest.raises(pd.errors.PyroDropoutError, match="frozen_statistics"):
        pd.BayesianNet(net, frozen_statistics="some")  # type: ignore[arg-type]
