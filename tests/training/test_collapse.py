"""Networks of any width learn with the default prior, and say so where a prior keeps them from it."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pyro_dropout as pd
from pyro_dropout.guides.summary import ignored_inputs
from pyro_dropout.training import collapse
from pyro_dropout.training.collapse import learned_from

QUIET: Any = {"progress": False, "seed": 0, "compile": "traced"}


def data(count: int = 60) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, 4)
    return x, (x[:, 0] > 0).long()


def wide(prior: pd.Prior | None = None) -> pd.BayesianNet:
    net = nn.Sequential(nn.Linear(4, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 2))
    return pd.BayesianNet(net, prior, pd.Categorical())


GUIDES = {
    "dropout": pd.AutoDropout,
    "mean field": pd.AutoMeanField,
    "concrete": pd.AutoConcreteDropout,
    "row mixture": pd.AutoRowMixture,
    "laplace": pd.guides.AutoLaplace,
    "plain ensemble": lambda model: pd.Ensemble(model, members=2, anchored=False),
}


@pytest.mark.thinned(6)
@pytest.mark.parametrize("name", GUIDES)
def test_a_wide_network_learns_by_default(name: str) -> None:
    model, (x, y) = wide(), data()
    guide = GUIDES[name](model)
    with warnings.catch_warnings():  # any other warning would be an error here
        warnings.filterwarnings("ignore", "this Laplace approximation is less confident than it is right")
        history = pd.fit(model, guide, x, y, steps=120, lr=3e-3, **QUIET)
    assert history.learned is not None
    assert not history.learned.shut
    how = "linearised" if name == "laplace" else "mc"
    answer = pd.predict(model, guide, x, samples=50, seed=0, method=how)
    assert (answer.probs.argmax(-1) == y).double().mean() > 0.9


@pytest.mark.parametrize("name", ["dropout", pytest.param("mean field", marks=pytest.mark.deep)])
def test_a_prior_that_wins_is_named(name: str, tmp_path: Path) -> None:
    model, (x, y) = wide(pd.Prior()), data()
    guide = GUIDES[name](model)
    with pytest.warns(
        pd.errors.IgnoredInputsWarning, match=r"ignores its inputs.*2\.weight.*Prior\(\.\.\., tempered=True\)"
    ):
        history = pd.fit(model, guide, x, y, steps=200, lr=1e-2, **QUIET)
    assert history.learned is not None
    assert history.learned.ignores_inputs
    with pytest.warns(pd.errors.IgnoredInputsWarning, match="best constant"):
        pd.predict(model, guide, x, samples=5)
    pd.save(tmp_path / "posterior", model, guide)
    with torch.no_grad():  # whoever changes it knows better
        next(guide.parameters()).add_(0.1)
    assert not ignored_inputs(guide)
    pd.load(tmp_path / "posterior", model, guide)
    assert "best constant" in ignored_inputs(guide)


def test_a_prior_that_wins_and_a_loss_that_falls_to_it_are_told_alike() -> None:
    """More steps are no remedy for a posterior that goes to its prior."""
    model, (x, y) = wide(pd.Prior()), data()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        history = pd.fit(model, pd.AutoMeanField(model), x, y, steps=200, lr=2e-3, **QUIET)
    assert history.unfinished is not None
    said = {each.category: str(each.message) for each in caught}
    assert "Leave the prior out" in said[pd.errors.IgnoredInputsWarning]
    falling = said[pd.errors.UnfinishedTrainingWarning]
    assert "but they are the prior's. More steps would bring the posterior nearer to the prior" in falling
    assert "Raise steps" not in falling


def deep_gp(count: int) -> tuple[Any, Any, Tensor, Tensor]:
    """Return the paper's model with dropout, and data of a wave."""
    torch.manual_seed(0)
    x = torch.linspace(-2, 2, count).unsqueeze(-1)
    y = torch.sin(2 * x) + 0.3 * torch.randn(count, 1)
    model = pd.paper.DeepGP(1, [20, 20], 1, nonlinearity="tanh", likelihood=pd.Gaussian(10.0))
    return model, pd.AutoDropout(model, keep=lambda name: 1.0 if name == "W1" else 0.9), x, y


@pytest.mark.parametrize("count", [12, 1000])
def test_a_deep_gaussian_process_is_looked_at_too(count: int) -> None:
    model, guide, x, y = deep_gp(count)
    if count == 1000:
        history = pd.fit(model, guide, x, y, steps=400, lr=1e-2, **QUIET)  # a warning would be an error here
        assert history.learned is not None
        assert min(history.learned.gains.values()) > 0.1
        return
    with pytest.warns(pd.errors.IgnoredInputsWarning, match="Nothing passes W1, W2, because .* AutoMeanField"):
        pd.fit(model, guide, x, y, steps=400, lr=1e-2, **QUIET)
    with pytest.warns(pd.errors.IgnoredInputsWarning, match="best constant"):
        answer = pd.predict(model, guide, x, samples=5)
    assert answer.mean.std() < 0.01


@pytest.mark.deep
def test_a_fleet_and_a_comparison_say_it_too() -> None:
    x, y = data()

    def build(seed: int) -> Any:
        torch.manual_seed(seed)
        model = wide(pd.Prior())
        return model, pd.AutoDropout(model)

    with pytest.warns(pd.errors.IgnoredInputsWarning, match="2 of 2 replicas"):
        pd.Fleet(build, {"seed": [0, 1]}).fit(x, y, steps=200, lr=1e-2, **QUIET)
    how: Any = {"steps": 200, "seeds": 1, "samples": 20, "compile": False, "progress": False}
    found = pd.compare(wide(pd.Prior()), {"dropout": pd.AutoDropout}, (x, y), (x, y), **how)
    assert "ignores its inputs" in found.rows[0].note


def test_looking_changes_nothing() -> None:
    model, (x, y) = wide(), data()
    guide = pd.AutoDropout(model)
    model.train()
    state = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert learned_from(model, guide, x, y) is not None
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert learned_from(lambda x, y: None, guide, x, y) is None


def test_a_check_that_fails_says_so_once_and_the_training_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    def gains(*_: object) -> None:
        raise LookupError("no variance")  # as the guide or the likelihood of a stranger may

    monkeypatch.setattr(collapse, "_gains", gains)
    model, (x, y) = wide(), data()
    guide = pd.AutoMeanField(model)
    with pytest.warns(UserWarning, match=r"could not be checked \(LookupError: no variance\)") as told:
        history = pd.fit(model, guide, x, y, steps=2, **QUIET)
    assert (len(told), history.learned, history.steps) == (1, None, 2)
    assert not ignored_inputs(guide)  # predict does not repeat it

    def build(seed: int) -> Any:
        model = wide()
        return model, pd.AutoMeanField(model)

    with pytest.warns(UserWarning, match="2 of 2 replicas, number 0: whether .* could not be checked"):
        pd.Fleet(build, {"seed": [0, 1]}).fit(x, y, steps=2, **QUIET)


def test_inputs_in_a_dict_are_asked_too() -> None:
    """A prior that is too narrow shuts the only layer, so that the network is run on some of the rows."""
    x, y = data()
    model = pd.BayesianNet(nn.Linear(4, 2), pd.Prior(length_scale=100.0), pd.Categorical())
    guide = pd.AutoMeanField(model, init=lambda name, shape: torch.zeros(shape))
    found = learned_from(model, guide, {"input": x}, y)
    assert found is not None
    assert found.ignores_inputs


@pytest.mark.parametrize(
    ("gain", "better", "ignores"),
    [(0.001, 0.05, True), (0.001, 0.2, False), (0.03, 0.01, True), (0.03, 0.05, False), (0.2, -0.1, False)],
)
def test_a_layer_without_any_signal_may_be_lucky(gain: float, better: float, ignores: bool) -> None:
    """Low rank under ``Prior()`` was 0.04 nats better than a constant on its training data, and no better on others."""
    found = collapse.Learned({"0.weight": gain, "2.weight": 0.5}, 9e4, 398, -0.65 + better, -0.65)
    assert found.ignores_inputs == ignores
