"""The normal distribution that models and guides use, and what has a normal logarithm or normal log-odds."""

import math
from collections.abc import Sequence

import pyro.distributions as dist
import torch
from torch import Size, Tensor

_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


class Normal(dist.Normal):
    """Pyro's Normal, for units of any size and for draws that are mapped over replicas.

    The log density squares (y - μ)/σ, a number of size one, and not σ: in float32 the square of σ = 1e-27 is zero, and
    that of 1e22 is infinite. Draws are new tensors: torch fills an empty one, which ``vmap`` cannot do for each.

    Example:
        >>> import torch
        >>> from torch.func import vmap
        >>> from pyro_dropout.mathematics.normal import Normal
        >>> Normal(0.0, 1e-27).log_prob(torch.tensor(0.0))  # 27 log 10 - ½ log 2π
        tensor(61.2508)
        >>> draw = lambda scale: Normal(torch.zeros(2), scale).rsample()
        >>> vmap(draw, randomness="different")(torch.ones(3)).unique().numel()
        6
    """

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Draw with gradients; the same numbers as torch's, for the same seed."""
        shape = self._extended_shape(Size(sample_shape))
        noise = torch.randn(shape, dtype=self.loc.dtype, device=self.loc.device)
        found: Tensor = self.loc + noise * self.scale
        return found

    def log_prob(self, value: Tensor) -> Tensor:
        """Return log p(value), in the shape that value and parameters broadcast to."""
        if self._validate_args:
            self._validate_sample(value)
        z: Tensor = (value - self.loc) / self.scale
        return -0.5 * z.square() - self.scale.log() - _HALF_LOG_2PI
