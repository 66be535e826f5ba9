"""Normal distributions that do not draw in place, so that draws can be mapped over replicas and members."""

from collections.abc import Sequence

import torch
from pyro import distributions as dist
from torch import Size, Tensor


class Normal(dist.Normal):
    """A normal distribution whose draws are new tensors; torch fills an empty one, which ``vmap`` cannot do for each.

    Example:
        >>> import torch
        >>> from torch.func import vmap
        >>> from pyro_dropout.mathematics.functional_normal import Normal
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
