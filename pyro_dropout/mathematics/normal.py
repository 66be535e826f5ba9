"""The normal distribution, with a log density that holds in units of any size."""

import math

import pyro.distributions as dist
from torch import Tensor

_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


class Normal(dist.Normal):
    """Pyro's Normal, whose log density squares (y - μ)/σ, a number of size one, and not σ.

    In float32 the square of σ = 1e-27 is zero, and that of 1e22 is infinite.

    Example:
        >>> import torch
        >>> from pyro_dropout.mathematics.normal import Normal
        >>> Normal(0.0, 1e-27).log_prob(torch.tensor(0.0))  # 27 log 10 - ½ log 2π
        tensor(61.2508)
    """

    def log_prob(self, value: Tensor) -> Tensor:
        """Return log p(value), in the shape that value and parameters broadcast to."""
        if self._validate_args:
            self._validate_sample(value)
        z: Tensor = (value - self.loc) / self.scale
        return -0.5 * z.square() - self.scale.log() - _HALF_LOG_2PI
