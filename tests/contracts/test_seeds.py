"""A function that takes a seed leaves the random generators of the process as they were."""

import inspect
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from torch import nn

import pyro_dropout as pd
from pyro_dropout import judging, paper, prediction
from tests.test_public_names import API, found_at

QUICK: dict[str, Any] = {"compile": False, "progress": False}
X = torch.linspace(-1, 1, 24).unsqueeze(-1)
DATA = (X, X.sin())


def pair(guide: Any = pd.AutoMeanField) -> tuple[Any, Any]:
    with torch.random.fork_rng():  # what a user builds is not drawn from the seed
        model = pd.BayesianNet(nn.Linear(1, 1), likelihood=pd.Gaussian(tau=4.0))
        return model, guide(model)


def members(model: Any) -> pd.Ensemble:
    return pd.Ensemble(model, members=2)


def fleet() -> pd.Fleet:
    return pd.Fleet(lambda k: pair(), {"k": [0, 1]})


def estimator(seed: int) -> Any:
    made: Any = pd.DropoutRegressor(max_steps=5, random_state=seed)
    return made.fit(X.numpy(), X[:, 0].numpy())


def table(seed: int) -> Any:
    frame = pandas.DataFrame({"x": X[:, 0].tolist() * 3, "y": X[:, 0].sin().tolist() * 3})
    return pd.fit_table(frame, "y", seed=seed, steps=20, compile=False, progress=False)


# What each does with a seed; the first number that it draws is not the process's.
ACTS: dict[str, Callable[[int], Any]] = {
    "fit": lambda seed: pd.fit(*pair(), *DATA, steps=2, batch_size=8, seed=seed, **QUICK),
    "fit in plain C": lambda seed: pd.fit(*pair(), *DATA, steps=2, seed=seed, compile=True, progress=False),
    "fit an Ensemble": lambda seed: pd.fit(*pair(members), *DATA, steps=2, seed=seed, **QUICK),
    "Ensemble.__init__": lambda seed: pd.Ensemble(pair()[0], members=2, seed=seed),
    "Fleet.fit": lambda seed: fleet().fit(*DATA, steps=2, seed=seed, **QUICK),
    "FiniteRank.__init__": lambda seed: paper.FiniteRank("relu", 5, 1, seed=seed),
    "Support.of": lambda seed: judging.Support.of(torch.sin(torch.arange(80.0)).view(40, 2), seed=seed),
    "compare": lambda seed: pd.compare(pair()[0], {"a": pd.AutoMeanField}, DATA, DATA, seeds=[seed], steps=2, **QUICK),
    "crps": lambda seed: pd.crps(pd.predict(*pair(), X, samples=5, keep_samples=True, seed=0), X, seed=seed),
    "elbo_report": lambda seed: judging.elbo_report(*pair(), *DATA, samples=5, seed=seed),
    "khat": lambda seed: pd.khat(*pair(), *DATA, samples=50, seed=seed),
    "loo": lambda seed: pd.loo(*pair(), *DATA, samples=200, seed=seed),
    "mclmc": lambda seed: pd.mclmc(pair()[0], *DATA, samples=4, warmup=100, chains=2, seed=seed, progress=False),
    "nuts": lambda seed: pd.nuts(pair()[0], *DATA, samples=4, warmup=4, chains=2, seed=seed, **QUICK),
    "plot_kl_gap": lambda seed: pd.comparison.plot_kl_gap(draws=2, seed=seed),
    "predict": lambda seed: pd.predict(*pair(), X, samples=5, seed=seed),
    "predict_fleet": lambda seed: prediction.predict_fleet(fleet(), X, samples=5, seed=seed),
    "sbc": lambda seed: pd.sbc(pair()[0], lambda m, x, y: pair()[1], X, replications=2, progress=False, seed=seed),
    "swag": lambda seed: pd.swag(*pair(), *DATA, rank=2, steps=6, batch_size=8, lr=0.01, seed=seed, **QUICK),
    "thompson": lambda seed: judging.thompson(*pair(), X.view(6, 4, 1), seed=seed),
    "to_arviz": lambda seed: pd.to_arviz(*pair(), *DATA, samples=5, seed=seed),
    "estimators": estimator,
    "fit_table": table,
}  # fmt: skip


SLOW = ("fit_table",)


def state() -> list[Any]:
    found = np.random.get_state()  # noqa: NPY002
    return [torch.get_rng_state().tolist(), random.getstate(), found[1].tolist(), found[2]]  # type: ignore[index]


@pytest.mark.filterwarnings("ignore")  # these trainings are too short
@pytest.mark.parametrize(
    "name",
    [*(name for name in ACTS if name not in SLOW), *(pytest.param(name, marks=pytest.mark.deep) for name in SLOW)],
)
def test_the_generators_stay_as_they_were(name: str) -> None:
    before = state()
    ACTS[name](5)
    assert state() == before


def test_every_public_function_with_a_seed_is_here() -> None:
    found = {each.split(".")[-1]: found_at(each) for each in API}
    methods = {f"{name}.__init__": each.__init__ for name, each in found.items() if inspect.isclass(each)}
    functions = {name: each for name, each in found.items() if inspect.isfunction(each)}
    takes = {name for name, each in (methods | functions).items() if "seed" in inspect.signature(each).parameters}
    unseen = {"LinearisedPrediction.__init__", "SecondLayer.__init__"}  # by predict; as FiniteRank
    assert takes - unseen <= set(ACTS)
