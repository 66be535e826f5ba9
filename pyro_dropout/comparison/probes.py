"""Points at which to measure uncertainty: in gaps between the data, and outside them.

A posterior should be less certain where there is no data. Outside the data most approximations are; in gaps between
clusters many are not, and scores on held-back data from the same region do not show it.
"""

import sys

import torch
from torch import Tensor

_PAIRS = 4000
_KEPT = 50
_FAR = 3.0


def between(x: Tensor, *, seed: int = 0) -> Tensor:
    """Return points between data points that lie farthest from all of them, (50, ...).

    Each is a convex combination of two data points, so they lie in the data's convex hull; with one input they fill the
    widest gap.
    """
    flat = x.reshape(len(x), -1).double().cpu()  # the same points on every device
    generator = torch.Generator().manual_seed(seed)
    first, second = (torch.randint(len(x), (_PAIRS,), generator=generator, device="cpu") for _ in range(2))
    share = torch.rand(_PAIRS, 1, generator=generator, dtype=torch.float64, device="cpu")
    points = share * flat[first] + (1 - share) * flat[second]
    unit = _unit(flat)
    nearest = torch.cat([torch.cdist(part / unit, flat / unit).amin(1) for part in points.split(512)])
    found = points[nearest.topk(_KEPT).indices]
    return found.reshape(-1, *x.shape[1:]).to(x)


def outside(x: Tensor) -> Tensor:
    """Return the data points farthest from the centre, moved to three times their distance from it, (50, ...)."""
    flat = x.reshape(len(x), -1).double()
    middle = flat.mean(0)
    farthest = ((flat - middle) / _unit(flat)).norm(dim=1).topk(min(_KEPT, len(x))).indices
    found = middle + _FAR * (flat[farthest] - middle)
    return found.reshape(-1, *x.shape[1:]).to(x)


def over(there: float, here: float, unit: float) -> float:
    """Return a standard deviation over another, 1 if both are less than rounding in the unit of y."""
    rounding = 1e-12 * unit or sys.float_info.min
    return (there + rounding) / (here + rounding)


def _unit(flat: Tensor) -> Tensor:
    """Return the standard deviation of each column, 1 for a constant one."""
    std = flat.std(0)
    return torch.where(std > 0, std, 1.0)
