"""Numbers of a column in single precision, without losing the differences between them; and odd ones among them.

A clock that counts seconds since 1970 needs ten digits, and float32 has seven. Such a column is centred first, in
float64, and only then rounded.
"""

import numpy as np
import torch

from pyro_dropout.errors import RangeError
from pyro_dropout.tables.table import Floats

_ROUNDING = torch.finfo(torch.float32).eps / 2
_FINE = 1e-4  # of a standard deviation: errors of rounding that are not worth centring for
_FEW = 0.01  # of the values may become equal to another by rounding
_LEAST, _SHARE, _DIFFERENT = 3, 0.01, 10  # rows that stand for missing values, their share, and other numbers
_CODES = {-1.0, 0.0, *(sign * (10.0**k - 1) for k in range(2, 10) for sign in (-1, 1))}
_FAR, _NEAR = 2.0, 0.5  # spreads between a number and the next one: of any number, and of one that is often a code


def centre_of(values: Floats, where: str = "the column") -> float:
    """Return the number to subtract from a column before rounding: its median if that is needed, else 0.

    Raise if rounding makes most of the different values of the column equal to another even then.
    """
    if not len(values):
        return 0.0
    ordered = np.sort(values)
    different, middle = ordered[np.append(True, ordered[1:] != ordered[:-1])], float(ordered[len(values) // 2])
    lost, left = _merged(different), _merged(different - middle)
    spread = float(values.std()) or 1.0  # a constant is not scaled
    whole = bool((np.trunc(different) == different).all())  # identifiers and clocks: all of them stay apart
    coarse = _ROUNDING * float(np.abs(different[[0, -1]]).max()) > _FINE * spread
    centred = coarse or left < lost > (0 if whole else _FEW * len(different))
    if 2 * (left if centred else lost) > len(different):
        raise RangeError(
            f"{where}: single precision cannot tell most of its values from their neighbours, or from zero; change the"
            " unit, take logarithms, or drop the column."
        )
    return middle if centred else 0.0


def _merged(different: Floats) -> int:
    """Return how many of different, ordered numbers single precision takes for another one, or for zero."""
    short = different.astype(np.float32)
    return int((short[1:] == short[:-1]).sum()) + int(((short == 0) & (different != 0)).sum())


def stand_in(numbers: Floats) -> tuple[float, int] | None:
    """Return a number that may stand for a missing value, and in how many rows it is; None if there is none.

    It is repeated, at one end, and far from the others, as -999, 9999 or 0 may be.
    """
    for value in (numbers.min(), numbers.max()) if len(numbers) else ():
        others = numbers[numbers != value]
        count = len(numbers) - len(others)
        if count < max(_LEAST, _SHARE * len(numbers)) or len(np.unique(others)) < _DIFFERENT:
            continue
        low, high = np.quantile(others, (0.1, 0.9))
        limit = _NEAR if value in _CODES else _FAR
        limit = 0.0 if value in _CODES and value < 0 <= others.min() else limit  # a quantity that is never negative
        if np.abs(others - value).min() > limit * max(high - low, others.std()):
            return float(value), count
    return None
