"""The one door to ArviZ: arrays in, its container and its Pareto smoothing out, on version 0.2x and on 1.x.

Nothing here knows torch, so this file can be tried alone wherever an ArviZ is installed. The two lines differ in three
ways that matter: ``InferenceData`` has become xarray's ``DataTree``; the warnings at import; and ``psislw``, which took
log ratios and now takes minus log ratios.
"""

import importlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Variable = tuple[Sequence[str], NDArray[Any]]

FEWEST = 25  # draws; with fewer, a fifth of them is too short a tail to fit


def arviz() -> Any:
    """Return the module ``arviz``, imported without its notice about the versions to come."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        import arviz as az
    return az


def holds_trees(az: Any) -> bool:
    """Whether this ArviZ is of the line that holds its data in a DataTree, 1.x."""
    return int(az.__version__.split(".")[0]) >= 1


def container(groups: Mapping[str, Mapping[str, Variable]], attrs: Mapping[str, Mapping[str, str]]) -> Any:
    """Put named arrays into what the installed ArviZ works on.

    Args:
        groups: {group: {variable: (names of its dimensions, array)}}.
        attrs: notes on each group, {group: {name: text}}.

    Returns:
        ``arviz.InferenceData`` on 0.2x, ``xarray.DataTree`` on 1.x.

    Example:
        >>> import numpy as np
        >>> data = container({"posterior": {"w": (("chain", "draw"), np.zeros((1, 50)))}}, {})
        >>> data["posterior"]["w"].sizes["draw"]
        50
    """
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


def pareto_smooth(log_ratios: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Smooth importance ratios by ArviZ's PSIS.

    Args:
        log_ratios: log r of S draws, (..., S), up to a constant.

    Returns:
        Log weights that sum to one, (..., S), and k̂, (...): the shape of the Pareto distribution fitted to the largest
        ratios. Where all ratios are one number there is no tail, and k̂ is -inf; where no tail can be fitted, +inf.

    Example:
        >>> import numpy as np
        >>> weights, khat = pareto_smooth(np.linspace(0.0, 1.0, 100))
        >>> weights.shape, bool(khat < 0.5)
        ((100,), True)
    """
    flat = np.asarray(log_ratios, dtype=np.float64).reshape(-1, np.shape(log_ratios)[-1])
    rows = [_one(row - row.max()) for row in flat]
    shape = np.shape(log_ratios)
    weights = np.stack([weight for weight, _ in rows]).reshape(shape)
    return weights, np.array([khat for _, khat in rows]).reshape(shape[:-1])


def _one(row: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    raw = row - np.log(np.exp(row).sum())
    if not row.any():  # the largest was taken off, so all ratios are equal
        return raw, -np.inf
    if len(row) < FEWEST:
        return raw, np.inf
    try:
        weights, khat = _psislw(row.copy())
    except ValueError:  # the largest ratios are all the same, says 1.x
        return raw, np.inf
    return np.asarray(weights), float(khat)


def _psislw(row: NDArray[np.float64]) -> Any:
    az = arviz()
    if not holds_trees(az):
        return az.psislw(row)
    stats = importlib.import_module("arviz_stats.base").array_stats
    return stats.psislw(-row)  # it takes log likelihoods, whose negatives are the log ratios of LOO
