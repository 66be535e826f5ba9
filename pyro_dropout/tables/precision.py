"""Numbers of a column in single precision, without losing the differences between them.

A clock that counts seconds since 1970 needs ten digits, and float32 has seven. Such a column is centred first, in
float64, and only then rounded.
"""

import numpy as np
import torch
from torch import Tensor

from pyro_dropout.errors import RangeError
from pyro_dropout.tables.cells import Floats

_ROUNDING = torch.finfo(torch.float32).eps / 2
_FINE = 1e-4  # of a standard deviation: errors of rounding that are not worth centring for
_FEW = 0.01  # of the values may become equal to another by rounding


def known_numbers(values: Floats) -> Floats:
    """Return the numbers that are not missing."""
    return values[~np.isnan(values)]


def some_different(values: Floats) -> int:
    """Return how many different numbers there are: 0, 1, or 2 for more than one."""
    found = known_numbers(values)
    return 0 if not len(found) else 1 + bool(found.min() < found.max())


def centre_of(values: Floats, where: str = "the column") -> float:
    """Return the number to subtract from a column before rounding: its median if that is needed, else 0.

    Raise if rounding makes most of the different values of the column equal to another even then.

    Example:
        >>> centre_of(np.array([1.5, 2.5, 4.0])), centre_of(1_700_000_000.0 + np.arange(100))
        (0, 1700000050.0)
    """
    if not len(values):
        return 0
    ordered = np.sort(values)
    middle = float(ordered[len(ordered) // 2])
    plain, centred = _centred(ordered, 0), _centred(ordered, middle)
    spread = float(centred.std(correction=0)) or 1.0  # a constant is not scaled
    distinct, rounds = _distinct(centred), _distinct(plain.float())
    merged, still = distinct - rounds, distinct - _distinct(centred.float())
    whole = merged and bool((plain == plain.round()).all())  # identifiers and clocks: all of them stay apart
    coarse = _ROUNDING * float(plain[[0, -1]].abs().max()) > _FINE * spread
    centre = middle if coarse or still < merged > (0 if whole else _FEW * distinct) else 0
    exact, left = (centred, distinct - still) if centre else (plain, rounds)
    if 0 < float(exact[[0, -1]].abs().max()) < torch.finfo(torch.float32).tiny:
        raise RangeError(f"{where}: its values are too small for single precision; change the unit.")
    if 2 * left < (distinct if centre else _distinct(plain)):
        raise RangeError(
            f"{where}: its values lie so far apart that single precision cannot tell most of them from their"
            " neighbours; take logarithms, or change or drop the column."
        )
    return centre


def rounded(values: Floats, centre: float) -> Tensor:
    """Return numbers minus the centre, (N,), in float32; NaN for missing values."""
    return _centred(values, centre).float()


def _centred(values: Floats, centre: float) -> Tensor:
    """Return numbers minus the centre, in float64."""
    return torch.from_numpy(values - centre)


def _distinct(values: Tensor) -> int:
    """Return how many of the numbers, which are in order, are different."""
    return 1 + int(np.count_nonzero(values.numpy()[1:] != values.numpy()[:-1]))


# --- numbers that may stand for missing values -----------------------------------------------------------------------

_LEAST, _SHARE = 3, 0.01  # rows that have such a number, and the share of them
_DIFFERENT = 10  # other numbers that a measured quantity has
_CODES = {-1.0, 0.0, *(sign * (10.0**k - 1) for k in range(2, 10) for sign in (-1, 1))}
_FAR, _NEAR = 2.0, 0.5  # spreads between a number and the next one: of any number, and of one that is often a code


def stand_in(numbers: Floats) -> tuple[float, int] | None:
    """Return a number that may stand for a missing value, and in how many rows it is; None if there is none.

    It is repeated, at one end, and far from the others, as -999, 9999 or 0 may be.

    Example:
        >>> ages = np.arange(20.0, 80.0)
        >>> stand_in(ages), stand_in(np.append(ages, [-999.0] * 5)), stand_in(np.append(ages, [19.0] * 5))
        (None, (-999.0, 5), None)
    """
    for value in (numbers.min(), numbers.max()) if len(numbers) else ():
        same = numbers == value
        count, others = int(same.sum()), numbers[~same]
        if count < max(_LEAST, _SHARE * len(numbers)) or len(np.unique(others)) < _DIFFERENT:
            continue
        low, high = np.quantile(others, (0.1, 0.9))
        gap = float(np.abs(others - value).min())
        signed = value < 0 <= others.min()  # a quantity that is never negative
        limit = 0.0 if value in _CODES and signed else _NEAR if value in _CODES else _FAR
        if gap > limit * max(high - low, others.std()):
            return float(value), count
    return None
