"""The interface to ArviZ 0.2x and 1.x: its container, its Pareto smoothing and its LOO results, from arrays.

Nothing here uses torch, so this file can be tested alone with any ArviZ. The two versions differ in four ways that
matter: ``InferenceData`` became xarray's ``DataTree``; the warnings on import; ``psislw``, which took log ratios and
now takes minus log ratios; and ``ELPDData``, which was a pandas Series and is now a dataclass.
"""

import functools
import importlib
import warnings
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

Variable = tuple[Sequence[str], NDArray[np.generic]]
Container = Any  # arviz.InferenceData on 0.2x, xarray.DataTree on 1.x

FEWEST = 25  # draws; with fewer, the tail (a fifth of them) is too short to fit


def arviz() -> ModuleType:
    """Import ArviZ without its warning about future versions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return importlib.import_module("arviz")


def holds_trees(az: ModuleType) -> bool:
    """Return whether this ArviZ keeps its data in a DataTree, as 1.x does."""
    return int(az.__version__.split(".")[0]) >= 1


def container(groups: Mapping[str, Mapping[str, Variable]], attrs: Mapping[str, Mapping[str, str]]) -> Container:
    """Put {group: {variable: (dimensions, array)}} into the container of the installed ArviZ, with notes on groups."""
    import xarray

    datasets = {}
    for group, variables in groups.items():
        sizes = {dim: size for dims, value in variables.values() for dim, size in zip(dims, value.shape, strict=True)}
        datasets[group] = xarray.Dataset(
            {name: (tuple(dims), value) for name, (dims, value) in variables.items()},
            coords={dim: np.arange(size) for dim, size in sizes.items()},
            attrs=dict(attrs.get(group, {})),
        )
    az = arviz()
    return xarray.DataTree.from_dict(datasets) if holds_trees(az) else az.InferenceData(**datasets)


def pareto_smooth(
    log_ratios: NDArray[np.float64], efficiency: float = 1.0
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return log weights that sum to one and k̂, (...), from log ratios of S draws, (..., S), by ArviZ's PSIS.

    A lower relative ``efficiency`` of the draws makes the tail longer. If all ratios are equal there is no tail, and k̂
    is -inf; if no tail can be fitted, +inf.
    """
    shape = log_ratios.shape
    rows = [_one(row - row.max(), efficiency) for row in log_ratios.reshape(-1, shape[-1])]
    weights = np.stack([weight for weight, _ in rows]).reshape(shape)
    return weights, np.array([khat for _, khat in rows]).reshape(shape[:-1])


def _one(row: NDArray[np.float64], efficiency: float) -> tuple[NDArray[np.float64], float]:
    raw = row - np.log(np.exp(row).sum())
    if not row.any():  # the maximum was subtracted, so all ratios are equal
        return raw, -np.inf
    if len(row) < FEWEST:
        return raw, np.inf
    az = arviz()
    try:
        if holds_trees(az):  # it takes log likelihoods, whose negatives are the log ratios of LOO
            weights, khat = importlib.import_module("arviz_stats.base").array_stats.psislw(-row, r_eff=efficiency)
        else:
            weights, khat = az.psislw(row.copy(), efficiency)
    except ValueError:  # 1.x raises if the largest ratios are all equal
        return raw, np.inf
    return np.asarray(weights), float(khat)


def efficiency_of(draws: Mapping[str, NDArray[np.generic]]) -> float:
    """Return the mean relative efficiency of draws, {variable: (chains, draws, ...)}, as in ``az.loo``."""
    chains, count = next(iter(draws.values())).shape[:2]
    if chains == 1:
        return 1.0
    import xarray

    dims = {name: ("chain", "draw", *(f"{name}_{k}" for k in range(value.ndim - 2))) for name, value in draws.items()}
    worth = arviz().ess(xarray.Dataset({name: (dims[name], value) for name, value in draws.items()}), method="mean")
    found = np.hstack([worth[name].values.ravel() for name in draws]).mean() / (chains * count)
    return float(found) if np.isfinite(found) else 1.0


@functools.cache
def loo_results() -> type:
    """Return a class of leave-one-out results that ``az.compare`` accepts, for the installed ArviZ."""
    trees = holds_trees(arviz())
    home = importlib.import_module("arviz_stats.utils" if trees else "arviz.stats.stats_utils")
    base = getattr(home, "ELPDDataLOO", home.ELPDData)

    class Results(base):  # type: ignore[misc,valid-type]
        """Expected log predictive density with its pointwise terms, in ArviZ's form."""

        def __init__(
            self,
            elpd: float,
            se: float,
            p: float,
            pointwise: NDArray[np.generic],
            khat: NDArray[np.generic],
            samples: int,
            approximate: bool,
        ) -> None:
            import xarray

            good = 0.7 if samples < 2 else min(1 - 1 / float(np.log10(samples)), 0.7)
            each, shape = (xarray.DataArray(np.asarray(part, dtype=float), dims="point") for part in (pointwise, khat))
            both = {"n_samples": samples, "n_data_points": len(pointwise), "scale": "log", "good_k": good}
            both |= {"se": se, "warning": bool((shape > good).any()), "pareto_k": shape}
            if trees:
                own = {"elpd": elpd, "p": p, "elpd_i": each, "approx_posterior": approximate, "kind": "loo"}
                fields = base.__dataclass_fields__  # they differ between ArviZ 1.0 and 1.3
                super().__init__(**{name: value for name, value in (both | own).items() if name in fields})
            else:
                entries = {"elpd_loo": elpd, "se": se, "p_loo": p, "loo_i": each, **both}  # elpd_loo must be first
                super().__init__(data=list(entries.values()), index=list(entries))

    return Results
