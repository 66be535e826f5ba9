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
_WHOLE = 2**53  # from here on, float64 skips whole numbers
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
    plain, centred = _centred(values, 0), _centred(values, middle)
    spread = float(centred.std(correction=0)) or 1.0  # a constant is not scaled
    if _ROUNDING * float(plain.abs().max()) > _FINE * spread:
        return middle
    distinct = _distinct(centred)
    merged, still = distinct - _distinct(plain.float()), distinct - _distinct(centred.float())
    whole = bool((plain == plain.round()).all())  # identifiers and clocks: all of them stay apart
    return middle if still < merged > (0 if whole else _FEW * distinct) else 0


def rounded(values: Sequence[Number | None], centre: Number) -> Tensor:
    """Return numbers minus the centre, (N,), in float32; NaN for missing values."""
    return _centred(values, centre).float()


def check_kept(values: Sequence[Number], centre: Number, where: str) -> None:
    """Raise if rounding makes most of the different values of a column equal to another."""
    exact = _centred(values, centre)
    if values and 0 < float(exact.abs().max()) < torch.finfo(torch.float32).tiny:
        raise RangeError(f"{where}: its values are too small for single precision; change the unit.")
    if 2 * _distinct(exact.float()) < _distinct(exact):
        raise RangeError(
            f"{where}: its values lie so far apart that single precision cannot tell most of them from their"
            " neighbours; take logarithms, or change or drop the column."
        )


def _centred(values: Sequence[Number | None], centre: Number) -> Tensor:
    """Return numbers minus the centre, in float64; whole numbers that float64 cannot hold are subtracted exactly."""
    found = torch.tensor([math.nan if value is None else float(value) for value in values], dtype=torch.float64)
    if abs(centre) < _WHOLE and not bool((found.abs() >= _WHOLE).any()):
        return found - float(centre)
    differences = (math.nan if value is None else float(_exact(value) - centre) for value in values)
    return torch.tensor(list(differences), dtype=torch.float64)


def _exact(value: Number) -> Number:
    """Return a whole number as an integer, so that its difference from another is exact."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _distinct(values: Tensor) -> int:
    return len(values.unique())
