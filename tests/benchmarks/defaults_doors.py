"""The defaults of ``fit_table`` and of the estimators, called as a person calls them, for the map of defaults.

``estimator-auto`` is an estimator as it comes; ``estimator`` has the guide that was the default before.

Both learn the noise of numbers, so plain torch beside them has a Gaussian with the variance of its training residuals.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import pyro_dropout as pd
from tests.benchmarks.defaults_tables import SEEDS, Rows

_SAMPLES = 100


def _estimator(rows: Rows, depth: int, width: int, seed: int, **how: str) -> Tensor:
    kind = pd.DropoutClassifier if rows.classes else pd.DropoutRegressor
    found = kind((width,) * depth, random_state=seed, **how)
    found.fit(rows.train[0].numpy(), rows.train[1].reshape(-1).numpy())
    x, y = rows.test
    answer = pd.predict(*found.model_and_guide(), x.double(), samples=_SAMPLES, shared=True, seed=0)
    return answer.log_prob(y if rows.classes else y.double())


def _fit_table(rows: Rows, depth: int, width: int, seed: int) -> Tensor:
    import pandas

    if depth != 1:
        raise ValueError(f"fit_table has one hidden layer; got depth={depth}.")

    def frame(x: Tensor, y: Tensor) -> "pandas.DataFrame":
        columns = {f"x{k}": x[:, k].tolist() for k in range(x.shape[1])}
        named = [f"class {k}" for k in y.tolist()] if rows.classes else y[:, 0].tolist()
        return pandas.DataFrame({**columns, "target": named})

    found = pd.fit_table(frame(*rows.train), "target", width=width, seed=seed, progress=False)
    x, y = found._read(frame(*rows.test))[1], rows.test[1]
    if rows.classes:
        y = torch.tensor([found.encoding.classes.index(f"class {k}") for k in y.tolist()])
    return found.prediction(x, _SAMPLES).log_prob(y)


DOORS: dict[str, Callable[[Rows, int, int, int], Tensor]] = {
    "fit_table": _fit_table,
    "estimator-auto": _estimator,
    "estimator": partial(_estimator, guide="dropout-ensemble"),
}


def log_prob_of(door: str, rows: Rows, depth: int, width: int) -> Tensor:
    """Return log p(y) of each seed and test row, (seeds, N)."""
    return torch.stack([DOORS[door](rows, depth, width, seed).double().cpu() for seed in SEEDS])
