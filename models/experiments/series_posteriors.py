"""Posteriors beside MC dropout in the experiments on series: five guides of one network, and anchored ensembles.

The paper's λ implies a prior under which weights in layers of 1024 units have a standard deviation of about 5.
Functions that are drawn from it reach billions, too wild to anchor a member at. So the ensembles have their own priors:
N(0, 1) for the weights of the first layer and for all biases, and for later weights either N(0, 2/fan-in), which keeps
the size of a layer's outputs, or N(0, 2), under which functions grow with width and depth, though less than before.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from pyro_dropout.errors import DivergedError
from pyro_dropout.generative.likelihoods import Gaussian
from pyro_dropout.generative.networks import BayesianNet
from pyro_dropout.generative.priors import Prior
from pyro_dropout.guides import (
    AutoConcreteDropout,
    AutoLowRank,
    AutoMeanField,
    AutoMultiplicative,
    AutoRowMixture,
)
from pyro_dropout.guides.ensemble import Ensemble
from pyro_dropout.training.fit import fit

_NEXT_TO_ALL = 0.999  # a learned keep must start below 1


def other_guides(
    keep: Callable[[str], float], init_scale: float = 0.01, rank: int = 5
) -> dict[str, Callable[[Any], Any]]:
    """Return factories of the guides other than dropout, by name; all start from the paper's weights."""
    return {
        "concrete": lambda model: AutoConcreteDropout(model, lambda s: min(keep(s), _NEXT_TO_ALL), init="paper"),
        "multiplicative": lambda model: AutoMultiplicative(model, lambda s: 1 / keep(s) - 0.999999, init="paper"),
        "mean field": lambda model: AutoMeanField(model, init="paper", init_scale=init_scale),
        "row mixture": lambda model: AutoRowMixture(model, init="paper", init_scale=init_scale),
        "low rank": lambda model: AutoLowRank(model, rank=rank, init="paper", init_scale=init_scale),
    }


def learned_prior_guides(rank: int = 5) -> dict[str, Callable[[Any], Any]]:
    """Return factories of the Gaussian guides, by name, for a model with ``Prior(learn=True)``."""
    made: dict[str, Callable[[Any], Any]] = {
        "mean field": lambda model: AutoMeanField(model, init="paper"),
        "row mixture": lambda model: AutoRowMixture(model, init="paper", bias="gaussian"),
        "low rank": lambda model: AutoLowRank(model, rank=rank, init="paper"),
    }
    return {f"{name}, learned prior": make for name, make in made.items()}


def reproduced(
    errors: Mapping[str, float], dropout: float, whose: str = "dropout", limit: float = 2.0
) -> tuple[str, list[tuple[float]], Callable[[tuple[float]], bool], str]:
    """Return the claim that Gaussian guides with learned priors reproduce the data: numbers, rule and text."""
    words = f"RMSE on the data over that of {whose}: {{}}; ≤ {limit:g} asked"
    rows = [(error / dropout,) for error in errors.values()]
    return (
        f"Gaussian guides with learned priors reproduce the data, beside {whose}",
        rows,
        lambda row: row[0] <= limit,
        words,
    )


def fit_beside(
    build: Callable[[], Any], guides: Mapping[str, Callable[[Any], Any]], x: Tensor, y: Tensor, **how: Any
) -> dict[str, tuple[Any, Any]]:
    """Fit each of several guides to its own model; one that diverges keeps its last finite parameters."""
    found, folder = {}, how.pop("checkpoint", None)
    for name, make in guides.items():
        model = build()
        found[name] = model, make(model)
        try:
            fit(*found[name], x, y, checkpoint=folder and Path(folder, name), **how)
        except DivergedError as cause:
            print(f"{name}: {cause}", flush=True)
    return found


RATE = 1e-3  # of Adam; it falls linearly to zero
SCALED = {"anchored ensemble, prior N(0, 2/fan-in)": True, "anchored ensemble, prior N(0, 2)": False}


def anchored_prior(net: nn.Module, scaled: bool) -> Prior:
    """Return the prior of an ensemble: N(0, 1) for the first layer and biases, N(0, 2/fan-in) or N(0, 2) after it."""
    weights = {name: value for name, value in net.named_parameters() if value.dim() == 2}
    later = {name: ((value.shape[1] if scaled else 1) / 2) ** 0.5 for name, value in weights.items()}
    return Prior(later | {next(iter(weights)): 1.0})


def anchored_ensemble(
    net: nn.Module, x: Tensor, y: Tensor, *, scaled: bool, tau: float, members: int, steps: int, seed: int, **how: Any
) -> tuple[BayesianNet, Ensemble]:
    """Train an anchored ensemble of a network; return its model and the ensemble."""
    model = BayesianNet(net, anchored_prior(net, scaled), Gaussian(tau))
    ensemble = Ensemble(model, members=members, start="fresh", seed=seed)
    fit(model, ensemble, x, y, steps=steps, lr=RATE, schedule=lambda done: 1 - done / steps, seed=seed, **how)
    return model, ensemble
