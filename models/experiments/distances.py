"""How far predictions are from the truth, and from each other."""

from types import SimpleNamespace

from torch import Tensor


def rms(values: Tensor) -> float:
    """Return the root of the mean square.

    Example:
        >>> import torch
        >>> from experiments.distances import rms
        >>> rms(torch.tensor([1.0, -7.0]))
        5.0
    """
    return values.square().mean().sqrt().item()


def apart(one: SimpleNamespace, other: SimpleNamespace, where: Tensor) -> tuple[float, float]:
    """Return the distance of two predictions: of means in units of their spread, and of spreads as a factor.

    Args:
        one: a prediction with ``mean`` and ``spread``, (N,).
        other: another at the same points.
        where: the points that count.

    Example:
        >>> import torch
        >>> from types import SimpleNamespace
        >>> from experiments.distances import apart
        >>> one, other = (SimpleNamespace(mean=m * torch.ones(3), spread=torch.ones(3)) for m in (0.0, 2.0))
        >>> apart(one, other, torch.arange(3))
        (2.0, 1.0)
    """
    pooled = ((one.spread**2 + other.spread**2) / 2).sqrt()
    return rms(((one.mean - other.mean) / pooled)[where]), 2 ** rms((one.spread / other.spread)[where].log2())
