"""How many draws T a prediction needs: the error of the mean and the standard deviation of a few draws."""

from typing import NamedTuple

from torch import Tensor

from experiments.distances import rms
from pyro_dropout.mathematics.checks import check_count
from pyro_dropout.mathematics.errors import RangeError, ShapeError
from pyro_dropout.mathematics.shapes import Float


class FewDraws(NamedTuple):
    """The errors of a few draws; returned by ``few_draws``.

    Attributes:
        mean: root mean square error of their mean, in units of the standard deviation of all draws.
        std: relative root mean square error of their standard deviation.

    Example:
        >>> import torch
        >>> from experiments.few_draws import few_draws
        >>> few_draws(torch.tensor([[0.0], [2.0], [0.0], [2.0]]), 2).mean  # each pair has both sides of a coin
        0.0
    """

    mean: float
    std: float


def few_draws(f: Float[Tensor, "T N"], count: int = 10) -> FewDraws:
    """Return how far the mean and the standard deviation of ``count`` draws are from those of all of them.

    The draws are split into groups of ``count``, and errors are averaged over groups and points. For normal draws the
    mean of T is off by 1/√T standard deviations, and their standard deviation by about 1/√(2T) of itself.

    Args:
        f: a function in every draw, (T, N); many more draws than ``count``.
        count: draws of a prediction, 2 or more.

    Returns:
        Both errors.

    Example:
        >>> import torch
        >>> from experiments.few_draws import few_draws
        >>> found = few_draws(3 + 2 * torch.randn(4000, 100, generator=torch.Generator().manual_seed(0)), 10)
        >>> round(found.mean, 2), round(found.std, 2)
        (0.32, 0.23)
    """
    check_count("count", count)
    if count < 2:
        raise RangeError(f"count must be 2 or more, for a standard deviation; got {count!r}.")
    if f.dim() != 2 or len(f) < 2 * count:
        raise ShapeError(f"f must have shape (T, N) with T = {2 * count} draws or more; got {tuple(f.shape)}.")
    groups = f[: len(f) // count * count].reshape(-1, count, f.shape[1])
    return FewDraws(rms((groups.mean(1) - f.mean(0)) / f.std(0)), rms(groups.std(1) / f.std(0) - 1))
