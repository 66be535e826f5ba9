"""Score-function terms for draws with a discrete part whose probabilities are trained.

A drawn label has no gradient in its probability; only its score has. A loss with a score term gets it here, and a loss
without one raises an error, because it would leave the probabilities where they started.
"""

import sys
import weakref
from dataclasses import dataclass
from typing import Any

from pyro.distributions.score_parts import ScoreParts
from pyro.ops.provenance import detach_provenance
from torch import Tensor

from pyro_dropout.mathematics.errors import PyroDropoutError
from pyro_dropout.mathematics.no_density import is_placeholder

_WITHOUT_SCORES = {"RenyiELBO", "TraceMeanField_ELBO", "TraceTailAdaptive_ELBO"}
_NEAR = 12  # stack frames to search for the loss that called


@dataclass(frozen=True)
class Draw:
    """The parts that a sample was made from: in float32 m + σε may round to m, and then only ε gives its density."""

    value: weakref.ref[Tensor]
    labels: Tensor
    noise: Tensor
    coefficients: Tensor | None


class Scored:
    """Base class of distributions that may draw labels; draws are reparameterised unless probabilities are trained."""

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
    def has_rsample(self) -> bool:
        """Whether gradients with respect to all parameters pass through a draw."""
        return not self.scored

    def __call__(self, sample_shape: Any = (), *args: Any, **kwargs: Any) -> Tensor:
        """Draw a sample; means and widths always have pathwise gradients, whether or not probabilities need a score."""
        drawn: Tensor = self.rsample(sample_shape)  # type: ignore[attr-defined]
        return drawn

    def score_parts(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the score parts for Pyro's losses: the score function is the log probability of the labels."""
        if not self.scored:
            return super().score_parts(x, *args, **kwargs)  # type: ignore[misc]
        _refuse_losses_without_scores()
        log_prob = self.log_prob(x)  # type: ignore[attr-defined]
        if is_placeholder(x):
            return ScoreParts(log_prob, log_prob, log_prob)  # nonzero, so a loss that reads it raises
        if not self.drew(detach_provenance(x)):
            return ScoreParts(log_prob, log_prob, 0)  # type: ignore[arg-type] # as Pyro does for draws without rsample
        return ScoreParts(log_prob, self.label_log_prob(), log_prob)


def _refuse_losses_without_scores() -> None:
    """Raise an error if the caller is one of Pyro's losses that have no score term."""
    frame = sys._getframe(2)
    for _ in range(_NEAR):
        owner = frame.f_locals.get("self")
        names = {kind.__name__ for kind in type(owner).__mro__} if frame.f_code.co_name != "score_parts" else set()
        if names & _WITHOUT_SCORES:
            raise PyroDropoutError(
                f"the component probabilities of a mixture are trained by the score of its labels, but"
                f" {type(owner).__name__} has no score term. Use pyro_dropout.ELBO or pyro.infer.Trace_ELBO, or"
                " AutoRowMixture(weights='fixed')."
            )
        if frame.f_back is None:
            return
        frame = frame.f_back
