"""Score-function terms for draws with a discrete part whose probabilities are trained.

A drawn label has no gradient in its probability; only its score has. A loss with a score term gets it here. One without
would leave the probabilities where they started: Pyro's losses of this kind refuse what is not fully reparameterised.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from pyro.distributions import TorchDistribution
from pyro.distributions.score_parts import ScoreParts
from pyro.ops.provenance import detach_provenance
from torch import Size, Tensor
from torch.distributions import constraints

from pyro_dropout.mathematics.broadcasting import broadcast_shape
from pyro_dropout.mathematics.no_density import is_placeholder, no_density


@dataclass(frozen=True)
class Draw:
    """The parts that a sample was made from: in float32 m + σε may round to m, and then only ε gives its density."""

    value: weakref.ref[Tensor]
    labels: Tensor
    noise: Tensor
    coefficients: Tensor | None


class Scored(TorchDistribution):
    """Base class of distributions over weight tensors, which may draw labels.

    Draws are reparameterised unless the probabilities of labels are trained.
    """

    arg_constraints: dict[str, constraints.Constraint] = {}  # noqa: RUF012 - torch reads a class attribute
    # In a guide, a missing density is an error when a loss uses it, not when a trace computes it.
    lenient = False
    site = ""  # for that error: the site that is drawn

    @property
    def scored(self) -> bool:
        """Whether labels are drawn with trained probabilities, which have no pathwise gradient."""
        raise NotImplementedError

    def drew(self, value: object) -> bool:
        """Whether ``value`` is the last draw."""
        raise NotImplementedError

    def label_log_prob(self) -> Tensor:
        """Return log p(z) of the labels of the last draw, (*sample_shape, *batch_shape)."""
        raise NotImplementedError

    @property
    def has_rsample(self) -> bool:  # type: ignore[override]
        """Whether gradients with respect to all parameters pass through a draw."""
        return not self.scored

    def __call__(self, sample_shape: Sequence[int] = (), *args: object, **kwargs: object) -> Tensor:
        """Draw a sample; means and widths always have pathwise gradients, whether or not probabilities need a score."""
        return self.rsample(Size(sample_shape))

    def score_parts(self, x: Tensor, *args: object, **kwargs: object) -> ScoreParts:
        """Return the score parts for Pyro's losses: the score function is the log probability of the labels."""
        if not self.scored:
            parts: ScoreParts = super().score_parts(x, *args, **kwargs)  # type: ignore[no-untyped-call]
            return parts
        log_prob = self.log_prob(x)
        if is_placeholder(x):
            return ScoreParts(log_prob, log_prob, log_prob)  # nonzero, so a loss that reads it raises
        if not self.drew(detach_provenance(x)):
            return ScoreParts(log_prob, log_prob, 0)  # type: ignore[arg-type] # as Pyro does for draws without rsample
        return ScoreParts(log_prob, self.label_log_prob(), log_prob)

    def _no_density(self, value: Tensor) -> Tensor:
        """Return a placeholder for the log density of ``value``."""
        lead = value.shape[: value.dim() - len(self.event_shape)]
        return no_density(value, broadcast_shape(lead, self.batch_shape), self.site)

    @constraints.dependent_property(is_discrete=False)
    def support(self) -> constraints.Constraint:
        """Every real tensor of the event's shape."""
        return constraints.independent(constraints.real, len(self.event_shape))

    def expand(self, batch_shape: Sequence[int], _instance: Self | None = None) -> Self:
        """Return the same distribution with a larger batch; the parameters are shared, not copied."""
        new = type(self).__new__(type(self)) if _instance is None else _instance
        new.__dict__.update(self.__dict__)
        new._batch_shape = Size(batch_shape)
        return new
