"""Numbers of a column in single precision, without losing the differences between them.

A clock that counts seconds since 1970 needs ten digits, and float32 has seven. Such a column is centred first, in exact
arithmetic, and only then rounded.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pyro_dropout.mathematics.errors import RangeError
from pyro_dropout.tables.cells import Number

_ROUNDING = torch.finfo(torch.float32).eps / 2
_FINE = 1e-4  # of a standard deviation: errors of rounding that are not worth centring for
_FEW = 0.01  # of the values may become equal to another by rounding


def centre_of(values: Sequence[Number]) -> Number:
    """Return the number to subtract from a column before rounding: its median if that is needed, else 0.

    Example:
        >>> centre_of([1.5, 2.5, 4.0]), centre_of([1_700_000_000 + second for second in range(100)])
        (0, 1700000050)
    """
    if not values:
        return 0
    middle = sorted(values)[len(values) // 2]
    spread = float(_centred(values, middle).std(correction=0)) or 1.0  # a constant is not scaled
    if _ROUNDING * max(abs(float(value)) for value in values) > _FINE * spread:
        return middle
    distinct, merged = len(set(values)), len(set(values)) - _distinct(rounded(values, 0))
    most = 0 if all(float(value).is_integer() for value in values) else _FEW * distinct
    return middle if merged > most and distinct - _distinct(rounded(values, middle)) < merged else 0


def rounded(values: Sequence[Number | None], centre: Number) -> Tensor:
    """Return numbers minus the centre, (N,), in float32; NaN for missing values."""
    return _centred(values, centre).float()


def check_kept(values: Sequence[Number], centre: Number, where: str) -> None:
    """Raise if rounding makes most of the different values of a column equal to another."""
    if 2 * _distinct(rounded(values, centre)) < len(set(values)):
        raise RangeError(
            f"{where}: its values lie so far apart that single precision cannot tell most of them from their"
            " neighbours; take logarithms, or change or drop the column."
        )


def _centred(values: Sequence[Number | None], centre: Number) -> Tensor:
    found = [math.nan if value is None else float(_exact(value) - centre) for value in values]
    return torch.tensor(found, dtype=torch.float64)


def _exact(value: Number) -> Number:
    """Return a whole number as an integer, so that its difference from another is exact."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _distinct(values: Tensor) -> int:
    return len(values.unique())
