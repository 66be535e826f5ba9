"""The calibration of §5: an uncertainty means little by itself, and more relative to the training set.

A predictive standard deviation of 5 is alarming if training points have 0.2 to 2, and reassuring if they have 10 to 15.
So a simple distribution is fitted to the standard deviations of the training set, and a new one is reported as its
percentile.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from pyro_dropout.mathematics.checks import check_choice, check_finite, check_non_negative, check_positive
from pyro_dropout.mathematics.errors import PyroDropoutError, ShapeError

Kind = Literal["lognormal", "gamma", "empirical"]

_F64 = torch.float64
_SAME = 1e-12  # below this variance of the logarithms, the standard deviations differ only by rounding


class UncertaintyPercentile:
    """How unusual an uncertainty is: its percentile among those of the training set.

    Args:
        std_train: predictive standard deviations at the training points, of any shape; all are pooled, so
            targets in different units each need their own object.
        kind: the distribution fitted by maximum likelihood: "lognormal" or "gamma"; or "empirical", the empirical
            distribution of the training set, which is 100 everywhere above its largest value.

    Example:
        >>> import torch, pyro_dropout as pd
        >>> std = torch.tensor([5.0])
        >>> calm = pd.UncertaintyPercentile(torch.linspace(0.2, 2.0, 100))
        >>> calm.percentile(std).round(decimals=1)  # more uncertain than almost all training points
        tensor([99.7000])
        >>> pd.UncertaintyPercentile(torch.linspace(10.0, 15.0, 100)).percentile(std).round(decimals=1)
        tensor([0.])
    """

    def __init__(self, std_train: Tensor, kind: Kind = "lognormal") -> None:
        check_choice("kind", kind, ("lognormal", "gamma", "empirical"))
        _check_tensor("std_train", std_train, least=1)
        (check_non_negative if kind == "empirical" else check_positive)("std_train", std_train)
        self.kind = kind
        self._seen = std_train.detach().to(_F64).reshape(-1).sort().values
        self._fitted = (math.nan, math.nan) if kind == "empirical" else self._fit()

    def __repr__(self) -> str:
        return f"UncertaintyPercentile({len(self._seen)} training points, {self.kind})"

    def percentile(self, std: Tensor) -> Tensor:
        """Return the percentile of each standard deviation, 0 to 100, in the shape of ``std``."""
        _check_tensor("std", std)
        check_non_negative("std", std)
        value = std.detach().to(self._seen)
        if self.kind == "empirical":
            below = torch.searchsorted(self._seen, value.contiguous(), right=True).to(_F64) / len(self._seen)
        elif self.kind == "lognormal":
            middle, width = self._fitted
            below = torch.special.ndtr((value.log() - middle) / width)
        else:
            shape, scale = self._fitted
            below = torch.special.gammainc(torch.full_like(value, shape), value / scale)
        return (100 * below).to(std)

    def _fit(self) -> tuple[float, float]:
        """Return the maximum-likelihood parameters: those of a log-normal, or shape and scale of a gamma."""
        logs = self._seen.log()
        width = logs.std(correction=0).item()
        if width**2 < _SAME:
            raise PyroDropoutError(
                f"std_train must hold different values to fit a {self.kind}; all {len(self._seen)} are"
                f" {self._seen[0].item():.6g}. Use kind='empirical'."
            )
        if self.kind == "lognormal":
            return logs.mean().item(), width
        from scipy.stats import gamma

        shape, _, scale = gamma.fit(self._seen.cpu().numpy(), floc=0)
        return float(shape), float(scale)


def rescale(std: Tensor, std_train: Tensor) -> Tensor:
    """Rescale uncertainties linearly: 0 at the smallest of the training set, 1 at the largest.

    Points less certain than all training points are above 1, and more certain ones below 0. Nothing is clipped, because
    such points are the interesting ones.

    Args:
        std: the uncertainties, of any shape; so are the results.
        std_train: uncertainties at the training points, of any shape.

    Example:
        >>> import torch, pyro_dropout as pd
        >>> pd.rescale(torch.tensor([0.5, 1.5, 5.0]), std_train=torch.tensor([0.5, 1.0, 2.5])).tolist()
        [0.0, 0.5, 2.25]
    """
    check_finite("std", std)
    _check_tensor("std_train", std_train, least=1)
    check_finite("std_train", std_train)
    low, high = std_train.min(), std_train.max()
    if not bool(low < high):
        raise PyroDropoutError(f"std_train must hold different values to span a scale; all are {low.item():.6g}.")
    return (std - low.to(std)) / (high - low).to(std)


def _check_tensor(name: str, value: object, least: int = 0) -> None:
    if not isinstance(value, Tensor):
        raise ShapeError(f"{name} must be a tensor; got {type(value).__name__} {value!r}.")
    if value.numel() < least:
        raise ShapeError(f"{name} must hold at least one number; got shape {tuple(value.shape)}.")
