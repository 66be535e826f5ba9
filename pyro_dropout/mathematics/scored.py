"""Draws with a discrete part whose probabilities are trained: what Pyro's losses are told about them.

A label says nothing about its probability when it is differentiated; only its score does. A loss that has a term for
scores gets it here, and one that has none is refused, because it would leave the probabilities where they started.
"""

import sys
import weakref
from dataclasses import dataclass
from typing import Any

from pyro.distributions.score_parts import ScoreParts
from pyro.ops.provenance import detach_provenance
from torch import Tensor

from pyro_dropout.mathematics.errors import PyroDropoutError
from pyro_dropout.mathematics.no_density import drawn_per_data_point

_WITHOUT_SCORES = {"RenyiELBO", "TraceMeanField_ELBO", "TraceTailAdaptive_ELBO"}
_NEAR = 12  # frames between a loss and the density it asks for


@dataclass(frozen=True)
class Draw:
    """What a sample was made of; in float32 m + σε may round to m, and then only ε still knows its density."""

    value: weakref.ref[Tensor]
    labels: Tensor
    noise: Tensor
    coefficients: Tensor | None


class Scored:
    """The base of distributions that may draw labels; without trained probabilities a draw is a path to everything."""

    @property
    def scored(self) -> bool:
        """Whether labels are drawn whose probabilities are trained, without a path to them."""
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
        """Draw; means and widths always have their path through a draw, whether or not probabilities need a score."""
        drawn: Tensor = self.rsample(sample_shape)  # type: ignore[attr-defined]
        return drawn

    def score_parts(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Tell Pyro's losses of the discrete part: the log probability of its labels is the score function."""
        if not self.scored:
            return super().score_parts(x, *args, **kwargs)  # type: ignore[misc]
        _refuse_losses_without_scores()
        log_prob = self.log_prob(x)  # type: ignore[attr-defined]
        if drawn_per_data_point(x) is not None:
            return ScoreParts(log_prob, log_prob, log_prob)  # not zero, so a loss that reads it refuses
        if not self.drew(detach_provenance(x)):
            return ScoreParts(log_prob, log_prob, 0)  # type: ignore[arg-type] # as Pyro treats every draw that has no path
        return ScoreParts(log_prob, self.label_log_prob(), log_prob)


def _refuse_losses_without_scores() -> None:
    """Raise an error where one of Pyro's losses that has no term for scores asks for them."""
    frame = sys._getframe(2)
    for _ in range(_NEAR):
        owner = frame.f_locals.get("self")
        names = {kind.__name__ for kind in type(owner).__mro__} if frame.f_code.co_name != "score_parts" else set()
        if names & _WITHOUT_SCORES:
            raise PyroDropoutError(
                f"the component probabilities of a mixture are trained by the score of its labels, and"
                f" {type(owner).__name__} has no term for scores. Use pyro_dropout.ELBO or pyro.infer.Trace_ELBO, or"
                " AutoRowMixture(weights='fixed')."
            )
        if frame.f_back is None:
            return
        frame = frame.f_back
