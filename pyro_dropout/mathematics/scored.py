"""Distributions of weights that may draw labels, and stand-ins for densities that do not exist.

A drawn label has no gradient in its probability; only its score has. A loss with a score term gets it here, and a loss
without one raises an error, because it would leave the probabilities where they started: Pyro checks this only while
its validation is on.
"""

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from pyro.distributions import TorchDistribution
from pyro.distributions.score_parts import ScoreParts
from pyro.ops.provenance import detach_provenance
from torch import Size, Tensor
from torch.distributions import constraints

from pyro_dropout.errors import PyroDropoutError, SingularError
from pyro_dropout.mathematics.shapes import broadcast_shape

Kwargs = Mapping[str, object] | None
MARK = "_pyro_dropout_per_data_point"
_WITHOUT_SCORES = {"RenyiELBO", "TraceMeanField_ELBO", "TraceTailAdaptive_ELBO"}
_NEAR = 12  # stack frames to search for the loss that called
# Operations that Pyro applies to every log density of a trace, whether or not the loss reads it.
_IN_PASSING = {"sum", "mul", "__mul__", "__rmul__", "expand", "reshape", "detach", "clone", "dim", "size", "numel"}
_QUESTIONS = {"isnan", "isinf", "isfinite", "any", "all", "eq", "__eq__", "__bool__", "is_floating_point"}


def is_placeholder(value: object) -> bool:
    """Whether ``value`` stands for weights that are drawn for every data point."""
    return getattr(value, MARK, None) is not None


class NoDensity(Tensor):
    """A log density that must not be read: a trace may carry it, but using its value raises an error."""

    site: str

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., object], types: object, args: Sequence[object] = (), kwargs: Kwargs = None
    ) -> object:
        name = getattr(func, "__name__", "")
        if name in _QUESTIONS or name == "__get__":
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        site = next((found for each in args if (found := getattr(each, "site", ""))), "")
        if name in _IN_PASSING:
            passed = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
            if isinstance(passed, NoDensity):
                passed.site = site
            return passed
        of = f" of site {site!r}" if site else ""
        raise SingularError(
            f"log q(w) does not exist for these draws{of}: at scale=0 they lie on a set of volume zero, and a draw for"
            " each data point has no joint density. Use pyro_dropout.ELBO, which needs none;"
            " pyro.infer.TraceMeanField_ELBO, which needs none for real-valued sites; or scale > 0 with shared draws."
        )


def no_density(like: Tensor, shape: torch.Size, site: str = "") -> Tensor:
    """Return a placeholder for the log density of a draw of ``site``, of shape ``shape``."""
    found = torch.zeros((), dtype=like.dtype, device=like.device).expand(shape).as_subclass(NoDensity)
    found.site = site
    return found


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
        _refuse_losses_without_scores()
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
