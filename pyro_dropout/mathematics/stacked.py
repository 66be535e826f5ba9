"""Independent distributions, one for each element of a plate, as one batched distribution."""

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Size, Tensor

from pyro_dropout.mathematics.broadcasting import broadcast_shape
from pyro_dropout.mathematics.scored import Scored
from pyro_dropout.protocols import Distribution


class Stacked(Scored):
    """Independent distributions of the same event shape, as one batched distribution.

    Args:
        parts: the distributions, each without a batch, in the order of the elements of ``batch_shape``.
        batch_shape: how they are laid out.
    """

    def __init__(self, parts: Sequence[Distribution], batch_shape: Sequence[int]) -> None:
        self.parts = list(parts)
        self.parts_shape = Size(batch_shape)
        self._drawn: weakref.ref[Tensor] | None = None
        super().__init__(self.parts_shape, parts[0].event_shape, validate_args=False)

    @property
    def singular(self) -> bool:
        """Whether a part has no density."""
        return any(getattr(part, "singular", False) for part in self.parts)

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Draw all parts, (*sample_shape, *batch_shape, *event_shape)."""
        lead = (*sample_shape, *self.batch_shape[: len(self.batch_shape) - len(self.parts_shape)])
        drawn = torch.stack([part.rsample(lead) for part in self.parts], len(lead))
        laid_out: Tensor = drawn.unflatten(len(lead), self.parts_shape)
        self._drawn = weakref.ref(laid_out)
        return laid_out

    @property
    def scored(self) -> bool:
        """Whether a part draws labels with trained probabilities, which have no pathwise gradient."""
        return any(getattr(part, "scored", False) for part in self.parts)

    def drew(self, value: object) -> bool:
        """Whether ``value`` is the last draw."""
        return self._drawn is not None and self._drawn() is value

    def label_log_prob(self) -> Tensor:
        """Return log p(z) of the labels of each part in the last draw, (*sample_shape, *batch_shape)."""
        zero = self.parts[0].like.new_zeros(())
        each = [part.label_log_prob() if part.scored else zero for part in self.parts]
        labels: Tensor = torch.stack(torch.broadcast_tensors(*each), -1).unflatten(-1, self.parts_shape)
        return labels

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density of each part, (*sample_shape, *batch_shape)."""
        if self.lenient and self.singular:
            return self._no_density(value)
        lead = value.dim() - len(self.event_shape) - len(self.parts_shape)
        each = value.flatten(lead, lead + len(self.parts_shape) - 1).unbind(lead)
        found = torch.stack([part.log_prob(one) for part, one in zip(self.parts, each, strict=True)], -1)
        found = found.reshape(found.shape[:-1] + self.parts_shape)
        return found.expand(broadcast_shape(found.shape, self.batch_shape))

    def each(self, of: Callable[[Distribution], Tensor]) -> Tensor:
        """Return one tensor from every part, stacked in the batch shape."""
        found = torch.stack([of(part) for part in self.parts])
        return found.reshape(self.parts_shape + found.shape[1:]).expand(self.batch_shape + found.shape[1:])

    @property
    def mean(self) -> Tensor:
        """E[w], (*batch_shape, *event_shape)."""
        return self.each(lambda part: part.mean)

    @property
    def variance(self) -> Tensor:
        """Var[w] of each number, (*batch_shape, *event_shape)."""
        return self.each(lambda part: part.variance)
