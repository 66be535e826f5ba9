"""Prior widths that are learned (``Prior(learn=...)``): the best one for the guide, in closed form at every step.

The KL to a prior N(0, σ²) depends on σ only through n log σ + Σ E_q[w²]/(2σ²), for any q and any form of the KL, so the
best width is σ² = Σ E_q[w²]/n. At its minimum a KL has no slope in σ: the width is a constant of each step, and the
gradient is still that of the minimised KL.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar

import torch
from pyro import poutine
from pyro.distributions import Delta, Normal
from torch import Tensor

from pyro_dropout.errors import DivergedError, PyroDropoutError
from pyro_dropout.generative.model_call import ModelCall
from pyro_dropout.generative.networks import BayesianNet
from pyro_dropout.generative.priors import LearnedNormal
from pyro_dropout.generative.process_state import bound, forked
from pyro_dropout.generative.trial_run import modules_of
from pyro_dropout.mathematics.shapes import base_distribution
from pyro_dropout.protocols import Distribution, Message, PyroModel

_PURE: ContextVar[bool] = ContextVar("whether losses leave the model's widths as they are", default=False)


def widths_kept() -> AbstractContextManager[None]:
    """Within this context a loss computes with the best widths, and leaves those of the model as they are."""
    return bound(_PURE, True)


def best_width(name: str, q: Distribution, like: Tensor) -> Tensor:
    """Return the width of the prior N(0, σ²) that is nearest to q: σ² = E[w²], averaged over the numbers of a site.

    Widths of the shape of ``like``, such as one per column, are each averaged over their own numbers.
    """
    squares = None
    with suppress(NotImplementedError):
        if not isinstance(q, Delta) and not getattr(q, "singular", False):
            squares = q.mean.detach().square() + q.variance.detach()
    if squares is None:
        raise PyroDropoutError(
            f"the prior width of {name!r} cannot be learned: the guide has a point there, or no moments that are known."
            " The best prior of a point is a spike at it, whatever the data. Give the guide a width there (scale > 0,"
            " bias='gaussian'), or leave the site out: Prior(learn='*.weight') learns the widths of weights alone. For"
            " points, maximise_evidence finds widths by a Laplace approximation."
        )
    width: Tensor = (squares.sum_to_size(like.shape) * (like.numel() / squares.numel())).sqrt()
    return width


def with_best_width(q_site: Message, p_site: Message) -> Message:
    """Return a site of the model whose width is learned, with the best prior for the guide's.

    A loss that trains writes the width to the model.
    """
    p, trains = p_site["fn"], torch.is_grad_enabled()
    prior: LearnedNormal = base_distribution(p)
    with torch.no_grad():
        width = best_width(p_site["name"], q_site["fn"], prior.place)
        if trains and not _PURE.get():
            prior.place.copy_(width.reshape(prior.place.shape))
    best = Normal(torch.zeros_like(width), width, validate_args=False).expand(p.shape()).to_event(p.event_dim)
    return {**p_site, "fn": best}


def learned_sites(model: object) -> list[str]:
    """Return the sites of a model whose prior width is learned."""
    return [name for module in modules_of(model) if isinstance(module, BayesianNet) for name in module.learned]


@contextmanager
def best_widths_after(model: PyroModel, guide: PyroModel, call: ModelCall) -> Iterator[None]:
    """Set the learned widths of a model on leaving the context, also by an error or an interruption."""
    try:
        yield
    except BaseException:
        with suppress(Exception):  # the error that ended the training is the one to see
            set_best_widths(model, guide, call.args, call.kwargs)
        raise
    set_best_widths(model, guide, call.args, call.kwargs)


def set_best_widths(
    model: object, guide: PyroModel, args: Sequence[object], kwargs: Mapping[str, object] | None = None
) -> None:
    """Set the learned widths of a model to the best ones for its guide, as it is now; a draw is made and not used."""
    if not learned_sites(model):
        return
    with torch.no_grad(), forked(), poutine.block():
        drawn = poutine.trace(guide).get_trace(*args, **(kwargs or {}))
        for module in modules_of(model):
            if isinstance(module, BayesianNet):
                found = {name: drawn.nodes[name]["fn"] for name in module.learned}
                widths = {name: best_width(name, q, module.prior_scale(name)) for name, q in found.items()}
                bad = next((name for name, width in widths.items() if not bool(width.isfinite().all())), None)
                if bad is not None:
                    raise DivergedError(
                        f"the learned prior width of {bad} is not finite after the last step. Lower the learning rate,"
                        " or clip gradients (clip_norm=...)."
                    )
                module.set_prior_scales(widths)
