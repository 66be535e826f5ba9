"""What the folds choose from on the nine regression tables, for each kind of posterior; which kinds are ensembles."""

from typing import Any

import pyro_dropout as pd

DROPS, DECAY = (0.0002, 0.002, 0.005, 0.01, 0.05, 0.1), (1e-6,)
BELIEFS: dict[str, tuple[float, ...]] = {"drop": (0.0,), "length": (0.3, 2.0), "lr": (3e-3, 1e-2)}  # widths are learned
GRIDS: dict[str, dict[str, tuple[float, ...]]] = {  # in addition to τ
    "dropout": {"drop": DROPS, "decay": DECAY, "lr": (3e-3, 1e-2, 3e-2)},
    "multiplicative": {"drop": DROPS, "decay": DECAY, "lr": (3e-3, 1e-2)},
    "concrete": BELIEFS | {"drop": (0.05,)},
    "mean-field": BELIEFS,
    "row-mixture": BELIEFS,
    "low-rank": BELIEFS,
    "heteroscedastic": {"drop": DROPS, "length": (0.5,), "lr": (1e-3, 5e-3)},  # dropout, and noise by input
    "ensemble": {"drop": (0.0,), "tau": (3.0, 30.0, 300.0, 3000.0, 3e4), "length": (1.0,), "lr": (1e-2,)},
    "ensemble of dropout": {"drop": (0.0002, 0.005, 0.05), "decay": DECAY, "lr": (1e-2, 3e-2)},
    "ensemble of mean-field": BELIEFS,
}
ANCHORED = "ensemble"  # its members are points, each with its own anchor
ENSEMBLES = (ANCHORED, "ensemble of dropout", "ensemble of mean-field")
DEEPER = {"drop": (0.002, 0.005, 0.02, 0.05)}  # with 2 hidden layers, for guides that drop


def beliefs(
    points: int, drop: float, decay: float | None = None, length: float = 1.0, tau: float | None = None
) -> tuple[pd.Prior, pd.Gaussian]:
    """Return prior and noise on standardised data, from a weight decay, a length-scale, or a length-scale and τ.

    Without a weight decay and without τ, τ is learned. With τ given, as for anchored points, the functions of the prior
    have about the size of the data: later layers are N(0, 1/fan_in).

    Example:
        >>> from experiments.regression_grids import beliefs
        >>> prior, noise = beliefs(100, drop=0.0, length=2.0, tau=30.0)
        >>> prior.length_scale, round(noise.tau.item())
        (2.0, 30)
    """
    if decay is not None:
        length = pd.implied_length_scale(1 - drop, 1.0, decay, points)
    prior = pd.Prior(length_scale=length, bias_length_scale=length, width_scaled=tau is not None)
    return prior, pd.Gaussian(tau or 1.0, learn=decay is None and tau is None)


def grid_of(kind: str, layers: int, most: int) -> dict[str, tuple[float, ...]]:
    """Return at most ``most`` values of each setting.

    Example:
        >>> from experiments.regression_grids import grid_of
        >>> grid_of("mean-field", layers=1, most=1)
        {'drop': (0.0,), 'length': (0.3,), 'lr': (0.003,)}
    """
    own = GRIDS[kind]
    grid = own | (DEEPER if layers > 1 and len(own["drop"]) > 1 else {})
    return {name: values[:most] for name, values in grid.items()}


def members_of(kind: str, args: Any) -> dict[str, Any]:
    """Return how many members an ensemble has, in the end and in the folds; nothing for a single network."""
    return {"members": args.members, "fold_members": args.fold_members} if kind in ENSEMBLES else {}
