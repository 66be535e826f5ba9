"""Inputs of an estimator: checks of its settings, and the choice of held-back rows."""

from collections.abc import Sequence
from dataclasses import fields
from numbers import Integral
from typing import Any

import numpy as np
import scipy.sparse
import torch
from torch import Tensor

from pyro_dropout.errors import RangeError
from pyro_dropout.mathematics.checks import (
    check_choice,
    check_count,
    check_flag,
    check_keep,
    check_level,
    check_positive,
)
from pyro_dropout.registry import guide_names
from pyro_dropout.tables.table import EXACT

# What the choice decides, or has values of its own for.
_DECIDED = ("activation", "keep", "length_scale", "tau", "learning_rate", "batch_size")


def held_back(count: int, fraction: float, seed: int, classes: Tensor | None = None) -> Tensor:
    """Return which of ``count`` rows are held back, as booleans (N,); about the same share of each class."""
    size = max(1, round(fraction * count))
    if count - size < 2:
        raise RangeError(
            f"validation_fraction={fraction:g} holds back {size} of {count} rows, and at least 2 must be left to train"
            " on. Give more data, a smaller fraction, or a named guide with a number as tau."
        )
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed), device="cpu")
    if classes is not None:
        order = order[torch.argsort(classes[order], stable=True)]
    held = torch.zeros(count, dtype=torch.bool)
    # Evenly spaced rows: when they are sorted by class, every class contributes its share.
    held[order[((torch.arange(size) + 0.5) * count / size).long()]] = True
    return held


def check_numbers(name: str, values: Any) -> None:
    """Raise for dates, and if float64, in which estimators compute, would merge whole numbers.

    ``values`` are as the user gave them.
    """
    values = values.tocsr().data if scipy.sparse.issparse(values) else values
    for column in values.columns if hasattr(values, "columns") else [...]:
        array = np.asarray(values if column is ... else values[column])
        if array.dtype.kind in "mM":  # as numbers, the same dates differ with the unit in which they are stored
            raise RangeError(
                f"{name} holds dates or spans of time ({array.dtype}); make numbers of them, such as days since a date."
            )
        array = array[abs(array.astype(float)) >= EXACT] if array.dtype.kind in "iu" else array
        for value in array.ravel().tolist() if array.dtype.kind in "iuO" else ():
            if isinstance(value, Integral) and int(float(value)) != int(value):
                raise RangeError(
                    f"{name} holds whole numbers beyond 2**53, such as {value}, that float64 cannot tell from their"
                    " neighbours; subtract a constant, or leave the column out if it identifies rows."
                )


def layer_widths(value: object) -> tuple[int, ...]:
    """Return the widths of the hidden layers; raise if they are invalid."""
    widths = tuple(value) if isinstance(value, Sequence | np.ndarray) and not isinstance(value, str) else (value,)
    if any(isinstance(width, bool) or not isinstance(width, Integral) or int(width) < 1 for width in widths):
        raise RangeError(
            f"hidden_layer_sizes must hold whole numbers of at least 1, such as (50,), or be () for a linear model; got"
            f" {value!r}."
        )
    return tuple(int(width) for width in widths)


def check_settings(estimator: Any) -> None:
    """Raise an error for the first invalid setting of an estimator, and for those that guide="auto" decides."""
    # A grid of parameters may hold numpy's True and False.
    given = {k: bool(v) if isinstance(v, np.bool_) else v for k, v in estimator.get_params().items()}
    auto, widths = given["guide"] == "auto", layer_widths(given["hidden_layer_sizes"])
    own = {"max_steps": None, "members": None, "tau": "auto"}
    chosen = {name for name, value in own.items() if given.get(name, value) == value}
    check_choice("guide", given["guide"], ("auto", *guide_names()))
    check_choice("activation", given["activation"], ("relu", "tanh"))
    check_choice("compile", given["compile"], ("auto", True, False))
    check_keep("keep", given["keep"])
    check_flag("refit", given["refit"])
    check_level("validation_fraction", given["validation_fraction"])
    for name in sorted({"max_steps", "members", "batch_size", "samples"} - chosen):
        check_count(name, given[name])
    for name in sorted({"learning_rate", "length_scale", "tau"} & given.keys() - chosen):
        check_positive(name, given[name])
    plain = {field.name: field.default for field in fields(estimator)}
    for name in (name for name in _DECIDED if auto and name in given and given[name] != plain[name]):
        raise RangeError(
            f"guide='auto' decides {name} itself; got {name}={given[name]!r}. Leave it out, or name a guide."
        )
    if auto and len(widths) != 1:
        raise RangeError(
            f"guide='auto' has one hidden layer; got hidden_layer_sizes={widths!r}. Give one width,"
            " or name a guide, as in guide='dropout-ensemble'."
        )


def dense_tensor(values: object) -> Tensor:
    """Return a dense copy in float64; arrays from scikit-learn may be read-only."""
    dense = values.toarray() if scipy.sparse.issparse(values) else values  # type: ignore[attr-defined]
    return torch.tensor(np.asarray(dense, dtype=np.float64))
