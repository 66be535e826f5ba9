"""The guides compared with MC dropout in the experiments on series: five more guides of one network and prior."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from pyro_dropout.guides import (
    AutoConcreteDropout,
    AutoLowRank,
    AutoMeanField,
    AutoMultiplicative,
    AutoRowMixture,
)
from pyro_dropout.mathematics.checks import check_positive
from pyro_dropout.training.fit import fit
from pyro_dropout.training.history import DivergedError

_NEXT_TO_ALL = 0.999  # a learned keep must start below 1


def other_guides(
    keep: Callable[[str], float], init_scale: float = 0.01, rank: int = 5
) -> dict[str, Callable[[Any], Any]]:
    """Return factories of the guides other than dropout, by name; all start from the paper's weights.

    Args:
        keep: the probability that a site's row is kept, by the site's name. If it is 1, concrete dropout starts from
            0.999, and multiplicative noise has a variance of 10⁻⁶.
        init_scale: initial value of learned widths. With 0.01 and a thousand weights, the noise is a third of a signal
            of 1.
        rank: of the low-rank guide.

    Returns:
        Functions that return a guide for a model.

    Example:
        >>> import torch, pyro_dropout as pd
        >>> from experiments.other_guides import other_guides
        >>> guides = other_guides(lambda site: 1.0 if site == "0.weight" else 0.9)
        >>> list(guides)
        ['concrete', 'multiplicative', 'mean field', 'row mixture', 'low rank']
        >>> model = pd.BayesianNet(torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1)))
        >>> type(guides["mean field"](model)).__name__
        'AutoMeanField'
    """
    check_positive("init_scale", init_scale)
    return {
        "concrete": lambda model: AutoConcreteDropout(model, lambda s: min(keep(s), _NEXT_TO_ALL), init="paper"),
        "multiplicative": lambda model: AutoMultiplicative(model, lambda s: 1 / keep(s) - 0.999999, init="paper"),
        "mean field": lambda model: AutoMeanField(model, init="paper", init_scale=init_scale),
        "row mixture": lambda model: AutoRowMixture(model, init="paper", init_scale=init_scale),
        "low rank": lambda model: AutoLowRank(model, rank=rank, init="paper", init_scale=init_scale),
    }


def learned_prior_guides(rank: int = 5) -> dict[str, Callable[[Any], Any]]:
    """Return factories of the Gaussian guides, by name, for a model with ``Prior(learn=True)``.

    Example:
        >>> import torch, pyro_dropout as pd
        >>> from experiments.other_guides import learned_prior_guides
        >>> model = pd.BayesianNet(torch.nn.Linear(1, 1), pd.Prior(learn=True))
        >>> type(learned_prior_guides()["low rank, learned prior"](model)).__name__
        'AutoLowRank'
    """
    made: dict[str, Callable[[Any], Any]] = {
        "mean field": lambda model: AutoMeanField(model, init="paper"),
        "row mixture": lambda model: AutoRowMixture(model, init="paper", bias="gaussian"),
        "low rank": lambda model: AutoLowRank(model, rank=rank, init="paper"),
    }
    return {f"{name}, learned prior": make for name, make in made.items()}


def reproduced(
    errors: Mapping[str, float], dropout: float, whose: str = "dropout", limit: float = 2.0
) -> tuple[str, list[tuple[float]], Callable[[tuple[float]], bool], str]:
    """Return the claim that Gaussian guides with learned priors reproduce the data, its numbers, its rule and a text.

    Args:
        errors: their RMSE on the data, by name.
        dropout: that of dropout.
        whose: what the text calls it.
        limit: how many times dropout's each may be.

    Example:
        >>> from experiments.other_guides import reproduced
        >>> text, rows, rule, words = reproduced({"mean field": 0.3, "low rank": 0.9}, dropout=0.2)
        >>> [rule(row) for row in rows]
        [True, False]
    """
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
    """Fit each of several guides to its own model; one that diverges keeps its last finite parameters.

    Args:
        build: returns the model.
        guides: factories of guides by name, as returned by ``other_guides``.
        x: inputs.
        y: targets.
        how: options of ``fit``; with ``checkpoint``, a folder, each guide gets a subfolder.

    Returns:
        (model, guide) by name.

    Example:
        >>> import torch, pyro_dropout as pd
        >>> from experiments.other_guides import fit_beside
        >>> build = lambda: pd.BayesianNet(torch.nn.Linear(1, 1), likelihood=pd.Gaussian(4.0))
        >>> x = torch.linspace(-1, 1, 20).unsqueeze(-1)
        >>> quiet = {"compile": False, "progress": False}
        >>> found = fit_beside(build, {"mean field": pd.AutoMeanField}, x, x, steps=5, **quiet)
        >>> list(found)
        ['mean field']
    """
    found, folder = {}, how.pop("checkpoint", None)
    for name, make in guides.items():
        model = build()
        found[name] = model, make(model)
        try:
            fit(*found[name], x, y, checkpoint=folder and Path(folder, name), **how)
        except DivergedError as cause:
            print(f"{name}: {cause}", flush=True)
    return found
