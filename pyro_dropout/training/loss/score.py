"""The score-function estimate of gradients, for draws that are not differentiable.

A label, a coin flip or a count has no pathwise gradient in its probability, but the loss that it led to gives one:
∇E[loss] = E[loss · ∇log q(z)] + E[∇loss]. What is returned here has the value zero and the first part as its gradient.
"""

from collections.abc import Mapping, Sequence

import torch
from pyro.distributions import Delta
from pyro.infer.util import MultiFrameTensor
from pyro.poutine.indep_messenger import CondIndepStackFrame
from torch import Tensor

from pyro_dropout.mathematics.per_data_point import PerDataPoint, drawn_per_data_point
from pyro_dropout.mathematics.scored import Scored
from pyro_dropout.protocols import Distribution, Message, Trace
from pyro_dropout.training.loss.row_tracking import Order
from pyro_dropout.training.loss.site_terms import Term


def score(terms: Sequence[Term], guide_trace: Trace, orders: Mapping[str, Mapping[str, Order]]) -> float | Tensor:
    """Return a term of value zero whose gradient is the score-function estimate for all draws that need one.

    Args:
        terms: the summands of the loss.
        guide_trace: the draws.
        orders: for each site of the model, which of its rows belong to which draws.
    """
    zero: float | Tensor = 0.0
    if not torch.is_grad_enabled():
        return zero
    for name, site in guide_trace.nodes.items():
        if site["type"] != "sample":
            continue
        recipe = drawn_per_data_point(site["value"])
        if recipe is None:
            log_q = _log_chance(site)
            if log_q is not None:
                cost = _summed_to(_touched(terms, name, site["fn"]), site["cond_indep_stack"])
                zero = zero + (cost * (log_q - log_q.detach())).sum()
        elif isinstance(site["fn"], Scored) and site["fn"].scored:
            zero = zero + _of_points(terms, recipe, orders)
    return zero


def _log_chance(site: Message) -> Tensor | None:
    """Return log q of the part of a shared draw that is not differentiable, (*batch); None if all of it is."""
    q = site["fn"]
    if isinstance(q, Scored):
        return q.label_log_prob() if q.scored else None
    if isinstance(q, Delta) or getattr(q, "has_rsample", False):
        return None
    log_q: Tensor = q.log_prob(site["value"])
    return log_q if log_q.requires_grad else None


def _touched(terms: Sequence[Term], name: str, q: Distribution) -> list[Term]:
    """Return the terms that a shared draw may affect: not its own closed-form divergence, which averages over it."""
    ours = getattr(q, "learns_probs", False)  # a guide of this package: sites are independent
    others = [term for term in terms if term.sampled or term.site != name]
    return [term for term in others if term.sampled or term.moved] if ours else others


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


def _of_points(terms: Sequence[Term], recipe: PerDataPoint, orders: Mapping[str, Mapping[str, Order]]) -> Tensor:
    """Return the term of labels that are drawn for each data point.

    The labels of one point affect only its own terms, and the other points' average is a baseline that does not
    depend on them. Terms with rows in another order, or summed over points, are the cost of all labels.
    """
    log_label = recipe.label_log_prob()
    count, own, common = len(log_label), [], []
    for term in terms:
        order = orders.get(term.site, {}).get(recipe.site)
        if order is None:
            continue
        value = term.value.detach()
        if order == (count, ()) and value.numel() == count:
            own.append(value.reshape(count))
        elif order == (count, ()) and list(value.shape).count(count) == 1:
            own.append(value.sum([d for d in range(value.dim()) if value.shape[d] != count]))
        else:
            common.append(value.sum())
    zero = log_label - log_label.detach()
    cost = torch.stack(own).sum(0) if own else torch.zeros_like(log_label)
    if count > 1:
        cost = cost - (cost.sum() - cost) / (count - 1)
    if common:
        cost = cost + torch.stack(common).sum()
    return (cost * zero).sum()
