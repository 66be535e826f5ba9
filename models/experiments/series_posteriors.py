"""Posteriors beside MC dropout in the experiments on series: five guides of one network, and anchored ensembles.

The paper's λ implies a prior under which weights in layers of 1024 units have a standard deviation of about 5.
Functions that are drawn from it reach billions, too wild to anchor a member at. So the ensembles have their own priors:
N(0, 1) for the weights of the first layer and for all biases, and for later weights either N(0, 2/fan-in), which keeps
the size of a layer's outputs, or N(0, 2), under which functions grow with width and depth, though less than before.
"""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from pyro.contrib.gp.kernels import RBF
from torch import Tensor, nn

from pyro_dropout.errors import DivergedError
from pyro_dropout.generative.exact_gp import GP
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
from pyro_dropout.references.exact import gp_posterior
from pyro_dropout.training.fit import fit

_NEXT_TO_ALL = 0.999  # a learned keep must start below 1


def other_guides(
    keep: Callable[[str], float], init_scale: float = 0.01, rank: int = 5
) -> dict[str, Callable[[Any], Any]]:
    """Return factories of the guides other than dropout, by name; all start from the paper's weights."""
    return {
        "concrete": lambda model: AutoConcreteDropout(
            model, lambda s: min(keep(s), _NEXT_TO_ALL), max_keep=1.0, init="paper"
        ),
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


def fit_beside(
    build: Callable[[], Any], guides: Mapping[str, Callable[[Any], Any]], x: Tensor, y: Tensor, **how: Any
) -> dict[str, tuple[Any, Any]]:
    """Fit each of several guides to its own model; one that diverges keeps its last finite parameters."""
    found = {}
    for name, make in guides.items():
        model = build()
        found[name] = model, make(model)
        try:
            fit(*found[name], x, y, **how)
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


def anchored_ensembles(
    build: Callable[[], nn.Module], x: Tensor, y: Tensor, tau: float, args: Any, **how: Any
) -> dict[str, tuple[Any, Any]]:
    """Train an anchored ensemble of a network under each of two priors; return the models and the ensembles."""
    found, steps = {}, args.ensemble_steps
    for name, scaled in SCALED.items():
        net = build()
        model = BayesianNet(net, anchored_prior(net, scaled), Gaussian(tau))
        found[name] = model, Ensemble(model, members=args.members, start="fresh", seed=args.seed)
        fit(*found[name], x, y, steps=steps, lr=RATE, schedule=lambda done: 1 - done / steps, **how)
    return found


def fitted_gp(x: Tensor, y: Tensor, tau: float, args: Any) -> dict[str, tuple[Any, Any]]:
    """Return a Gaussian process with the squared exponential, its hyperparameters fitted."""
    gp = GP(RBF(1, lengthscale=torch.tensor(0.1)), tau, learn_tau=True)
    gp.fit(x, y, steps=args.gp_steps, progress=not args.quiet)
    return {"GP": (SimpleNamespace(likelihood=Gaussian(gp.tau)), gp_posterior(gp))}
