"""Quantiles of single weights: each is a one-dimensional mixture, and its distribution function is inverted."""

import torch
from torch import Tensor

from pyro_dropout.mathematics.errors import RangeError
from pyro_dropout.mathematics.row_mixture import RowMixture


def marginal_quantile(q: RowMixture, level: float) -> Tensor:
    """Return the ``level`` quantile of each weight separately, in the event's shape."""
    if not 0 < level < 1:
        raise RangeError(f"level must lie strictly between 0 and 1; got {level!r}.")
    spread = q.scale.square()
    added = q.factor_variance()
    if added is not None:
        spread = spread + q.from_rows(added)
    spread = spread.sqrt().expand(q.locs.shape)
    probs = q.per_row(q.probs.mT)
    reach = 12 * spread.amax(0) + torch.finfo(spread.dtype).tiny
    low, high = q.locs.amin(0) - reach, q.locs.amax(0) + reach
    for _ in range(80):
        middle = (low + high) / 2
        # a component without width is a step at its mean
        step = (middle >= q.locs).to(spread)
        smooth = torch.special.ndtr((middle - q.locs) / torch.where(spread > 0, spread, 1.0))
        below = (probs * torch.where(spread > 0, smooth, step)).sum(0) < level
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return high
