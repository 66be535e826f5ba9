"""The score-function estimate of gradients, for draws that are not differentiable.

A label, a coin flip or a count has no pathwise gradient in its probability, but the loss that it led to gives one:
∇E[loss] = E[loss · ∇log q(z)] + E[∇loss]. What is returned here has the value zero and the first part as its gradient.
"""

from collections.abc import Sequence

import torch
from pyro.distributions import Delta
from pyro.infer.util import MultiFrameTensor
from pyro.poutine.indep_messenger import CondIndepStackFrame
from torch import Tensor

from pyro_dropout.mathematics.per_data_point import drawn_per_data_point
from pyro_dropout.protocols import Message, Trace
from pyro_dropout.training.loss.site_terms import Term


def score(terms: Sequence[Term], guide_trace: Trace) -> float | Tensor:
    """Return a term of value zero whose gradient is the score-function estimate for all draws that need one.

    Args:
        terms: the summands of the loss.
        guide_trace: the draws.
    """
    zero: float | Tensor = 0.0
    if not torch.is_grad_enabled():
        return zero
    for name, site in guide_trace.nodes.items():
        if site["type"] != "sample":
            continue
        if drawn_per_data_point(site["value"]) is None:
            log_q = _log_chance(site)
            if log_q is not None:
                touched = [term for term in terms if term.sampled or term.site != name]
                cost = _summed_to(touched, site["cond_indep_stack"])
                zero = zero + (cost * (log_q - log_q.detach())).sum()
    return zero


def _log_chance(site: Message) -> Tensor | None:
    """Return log q of the part of a shared draw that is not differentiable, (*batch); None if all of it is."""
    q = site["fn"]
    if isinstance(q, Delta) or getattr(q, "has_rsample", False):
        return None
    log_q: Tensor = q.log_prob(site["value"])
    return log_q if log_q.requires_grad else None


def _summed_to(terms: Sequence[Term], frames: tuple[CondIndepStackFrame, ...]) -> float | Tensor:
    """Return the sum of all terms for each element of the plates ``frames``, without gradients."""
    total = MultiFrameTensor()
    for term in terms:
        value = term.value.detach()
        fits = all(-value.dim() <= frame.dim for frame in term.frames if frame.dim is not None)
        total.add((term.frames, value) if fits else ((), value.sum()))
    # Dimensions without a plate do not belong to an element of one.
    for known, value in total.items():
        dims = {frame.dim for frame in known}
        loose = [d for d in range(-value.dim(), 0) if d not in dims]
        total[known] = value.sum(loose, keepdim=True) if loose else value
    found: float | Tensor = total.sum_to(frames)
    return found
