"""Inputs of an estimator: checks of its settings, the choice of held-back rows, and of a recipe with guide="auto"."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields
from numbers import Integral
from typing import Any

import numpy as np
import scipy.sparse
import torch
from torch import Tensor

from pyro_dropout.errors import IgnoredInputsWarning, RangeError
from pyro_dropout.mathematics.checks import (
    check_choice,
    check_count,
    check_flag,
    check_keep,
    check_level,
    check_positive,
)
from pyro_dropout.registry import guide_names
from pyro_dropout.sklearn.network import ACTIVATIONS
from pyro_dropout.tabular.choice import Choice, choose_recipe
from pyro_dropout.tabular.recipe import natural_scale
from pyro_dropout.tabular.settings import Training, Wanted

# What the choice decides, or has values of its own for.
_DECIDED = ("activation", "keep", "length_scale", "tau", "learning_rate", "batch_size")
_EXACT = 2**53  # from here on, float64 skips whole numbers


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


def check_whole_numbers(name: str, values: Any) -> None:
    """Raise if float64, in which estimators compute, would merge whole numbers; ``values`` as the user gave them."""
    values = values.tocsr().data if scipy.sparse.issparse(values) else values
    parts = [values[column] for column in values.columns] if hasattr(values, "columns") else [values]
    for array in map(np.asarray, parts):
        if array.dtype.kind not in "iuO":
            continue
        for value in array.ravel().tolist() if array.dtype.kind == "O" else array[abs(array.astype(float)) >= _EXACT]:
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


def one_width(value: object) -> int:
    """Return the width of the only hidden layer; raise if there is another number of layers."""
    widths = layer_widths(value)
    if len(widths) != 1:
        raise RangeError(
            f"guide='auto' has one hidden layer; got hidden_layer_sizes={value!r}. Give one width, or name a guide, as"
            " in guide='dropout-ensemble'."
        )
    return widths[0]


def kept_rows(value: object, layers: int) -> float | tuple[float, ...]:
    """Return the probability of keeping a row: a number, or one for each of the weight layers."""
    if not isinstance(value, Sequence | np.ndarray) or isinstance(value, str):
        check_keep("keep", value)
        return float(value)  # type: ignore[arg-type]
    for number, each in enumerate(value):
        check_keep(f"keep[{number}]", each)
    if len(value) != layers:
        raise RangeError(
            f"keep must be a number, or one for each of the {layers} weight layers, that of the inputs first; got"
            f" {len(value)} numbers."
        )
    return tuple(float(each) for each in value)


def check_settings(estimator: Any) -> None:
    """Raise an error for the first invalid setting of an estimator, and for those that guide="auto" decides."""
    # A grid of parameters may hold numpy's True and False.
    given = {k: bool(v) if isinstance(v, np.bool_) else v for k, v in estimator.get_params().items()}
    check_choice("guide", given["guide"], ("auto", *guide_names()))
    check_choice("activation", given["activation"], ACTIVATIONS)
    for name in ("max_steps", "members", "batch_size", "samples"):
        if given[name] is not None or name in ("batch_size", "samples"):
            check_count(name, given[name])
    for name in ("learning_rate", "length_scale"):
        check_positive(name, given[name])
    if isinstance(given.get("tau", "auto"), str):
        check_choice(
            "tau", given.get("tau", "auto"), ("auto",), "a positive number, 1/noise variance in the units of y"
        )
    else:
        check_positive("tau", given["tau"])
    check_flag("refit", given["refit"])
    check_level("validation_fraction", given["validation_fraction"])
    check_choice("compile", given["compile"], ("auto", True, False))
    plain = {field.name: field.default for field in fields(estimator)}
    for name in _DECIDED if given["guide"] == "auto" else ():
        if name in given and given[name] != plain[name]:
            raise RangeError(
                f"guide='auto' decides {name} itself; got {name}={given[name]!r}. Leave it out, or name a guide."
            )


def choose(
    x: Tensor,
    y: Tensor,
    held: Tensor,
    classes: tuple[str, ...],
    wanted: Wanted,
    training: Training,
    device: torch.device,
) -> tuple[Choice, Callable[[Tensor], Tensor]]:
    """Choose a recipe for rows x, (N, Q), and y, in float64, of which some are ``held`` back, (N,).

    Also return what puts targets on the scale of the choice: single precision could not hold large offsets.
    """

    def standard(values: Tensor, like: Tensor) -> Tensor:
        return ((values - like.mean(0)) / torch.where(like.std(0) > 0, like.std(0), 1.0)).float()

    plain = not classes and natural_scale(y) == "plain"

    def scale(targets: Tensor) -> Tensor:
        return targets if classes else standard(targets, y) if plain else targets.float()

    train, test = ((standard(x[rows], x), scale(y[rows])) for rows in (~held, held))
    with warnings.catch_warnings(action="ignore", category=IgnoredInputsWarning):  # the final training says it
        return choose_recipe(train, test, classes, wanted, training, device=device), scale


def dense_tensor(values: object) -> Tensor:
    """Return a dense copy in float64; arrays from scikit-learn may be read-only."""
    dense = values.toarray() if scipy.sparse.issparse(values) else values  # type: ignore[attr-defined]
    return torch.tensor(np.asarray(dense, dtype=np.float64))
