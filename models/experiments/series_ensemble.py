"""Anchored ensembles of a ReLU network on a series, with priors whose draws a member can be anchored at.

The paper's λ implies a prior under which weights in layers of 1024 units have a standard deviation of about 5.
Functions that are drawn from it reach billions, too wild to anchor a member at. So the ensembles have their own priors:
N(0, 1) for the weights of the first layer and for all biases, and for later weights either N(0, 2/fan-in), which keeps
the size of a layer's outputs, or N(0, 2), under which functions grow with width and depth, though less than before.
"""

from typing import Any

from torch import Tensor, nn

from pyro_dropout.generative.likelihoods import Gaussian
from pyro_dropout.generative.networks import BayesianNet
from pyro_dropout.generative.priors import Prior
from pyro_dropout.guides.ensemble import Ensemble
from pyro_dropout.training.fit import fit

RATE = 1e-3  # of Adam; it falls linearly to zero
SCALED = {"anchored ensemble, prior N(0, 2/fan-in)": True, "anchored ensemble, prior N(0, 2)": False}


def anchored_prior(net: nn.Module, scaled: bool) -> Prior:
    """Return the prior of an ensemble: N(0, 1) for the first layer and biases, N(0, 2/fan-in) or N(0, 2) after it.

    Args:
        net: a network of linear layers.
        scaled: whether later weights are divided by their fan-in.

    Example:
        >>> import torch
        >>> from experiments.series_ensemble import anchored_prior
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        >>> [round(anchored_prior(net, scaled).scales(net)["2.weight"].item(), 3) for scaled in (True, False)]
        [0.5, 1.414]
    """
    weights = {name: value for name, value in net.named_parameters() if value.dim() == 2}
    later = {name: ((value.shape[1] if scaled else 1) / 2) ** 0.5 for name, value in weights.items()}
    return Prior(later | {next(iter(weights)): 1.0})


def anchored_ensemble(
    net: nn.Module, x: Tensor, y: Tensor, *, scaled: bool, tau: float, members: int, steps: int, seed: int, **how: Any
) -> tuple[BayesianNet, Ensemble]:
    """Train an anchored ensemble of a network; return its model and the ensemble.

    Args:
        net: a network of linear layers.
        x: inputs.
        y: targets.
        scaled: which prior, as in ``anchored_prior``.
        tau: precision of the noise.
        members: how many.
        steps: of Adam, on all data.
        seed: of members and training.
        how: further options of ``fit``.

    Example:
        >>> import torch, pyro_dropout as pd
        >>> from experiments.series_ensemble import anchored_ensemble
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        >>> x = torch.linspace(-1, 1, 20).unsqueeze(-1)
        >>> how = {"scaled": True, "tau": 100.0, "members": 3, "steps": 5, "seed": 0}
        >>> anchored_ensemble(net, x, x, **how, compile=False, progress=False)[1].members
        3
    """
    model = BayesianNet(net, anchored_prior(net, scaled), Gaussian(tau))
    ensemble = Ensemble(model, members=members, start="fresh", seed=seed)
    fit(model, ensemble, x, y, steps=steps, lr=RATE, schedule=lambda done: 1 - done / steps, seed=seed, **how)
    return model, ensemble
