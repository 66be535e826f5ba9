"""Numbers that may stand for a missing value, such as -999, 9999 or 0: repeated, at one end, and far from the others.

They are used as the numbers that they are, because they may be; a remark names them.
"""

import numpy as np
from numpy.typing import NDArray

_LEAST, _SHARE = 3, 0.01  # rows that have such a number, and the share of them
_DIFFERENT = 10  # other numbers that a measured quantity has
_CODES = {-1.0, 0.0, *(sign * (10.0**k - 1) for k in range(2, 10) for sign in (-1, 1))}
_FAR, _NEAR = 2.0, 0.5  # spreads between a number and the next one: of any number, and of one that is often a code


def stand_in(numbers: NDArray[np.float64]) -> tuple[float, int] | None:
    """Return a number that may stand for a missing value, and in how many rows it is; None if there is none.

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
