"""Learning curves: running means of scores, and when they first reach a level."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyro_dropout.mathematics.checks import check_count
from pyro_dropout.mathematics.errors import ShapeError


def running_mean(scores: Any, window: int) -> NDArray[np.float64]:
    """Return the mean of the last ``window`` scores at every time, or of all scores so far if there are fewer.

    Args:
        scores: (times, ...), in time order.
        window: number of scores to average.

    Returns:
        The means, of the same shape.

    Example:
        >>> from experiments.learning_curves import running_mean
        >>> running_mean([0.0, 1.0, 2.0, 6.0], 2).tolist()
        [0.0, 0.5, 1.5, 4.0]
    """
    check_count("window", window)
    found = _checked(scores)
    return np.stack([found[max(0, k + 1 - window) : k + 1].mean(0) for k in range(len(found))])


def first_reach(scores: Any, level: float) -> NDArray[np.float64]:
    """Return the first time at which a score is at least ``level``; infinity if it never is.

    Args:
        scores: (times, ...), in time order.
        level: the level to reach.

    Returns:
        Times counted from 1, without the time dimension.

    Example:
        >>> from experiments.learning_curves import first_reach
        >>> first_reach([[0.0, 0.0], [2.0, 0.5], [1.0, 0.9]], 1.0).tolist()
        [2.0, inf]
    """
    there = _checked(scores) >= level
    return np.where(there.any(0), there.argmax(0) + 1.0, np.inf)


def _checked(scores: Any) -> NDArray[np.float64]:
    found = np.asarray(scores, dtype=np.float64)
    if found.ndim == 0 or len(found) == 0:
        raise ShapeError(f"scores must have shape (times, ...), with at least one time; got {found.shape}.")
    return found
