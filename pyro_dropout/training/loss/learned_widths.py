"""Prior widths that are learned (``Prior(learn=...)``): the best one for the guide, in closed form at every step.

The KL to a prior N(0, σ²) depends on σ only through n log σ + Σ E_q[w²]/(2σ²), for any q and any form of the KL, so the
best width is σ² = Σ E_q[w²]/n. At its minimum a KL has no slope in σ: the width is a constant of each step, and the
gradient is still that of the minimised KL.

In a network with more weights than data, T = min(1, N/2P) weighs the KL down, and the data no longer say how wide the
prior is: a hyper-prior takes over with the weight 1 - T. It counts as (1 - T)·n numbers of the width σ₀ that the
``Prior`` gives, so that σ² = (Σ E_q[w²] + (1 - T) n σ₀²)/((2 - T) n).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

import torch
from pyro import poutine
from pyro.distributions import Delta, Normal
from torch import Tensor

from pyro_dropout.generative.model_call import ModelCall
from pyro_dropout.generative.networks import BayesianNet
from pyro_dropout.generative.priors import LearnedNormal
from pyro_dropout.generative.random_state import forked
from pyro_dropout.generative.trial_run import modules_of
from pyro_dropout.mathematics.errors import PyroDropoutError
from pyro_dropout.mathematics.shapes import base_distribution
from pyro_dropout.protocols import Distribution, Message, PyroModel
from pyro_dropout.training.history import DivergedError
from pyro_dropout.training.loss.temperature import is_point, numbers_of, share_of_data

_PURE: ContextVar[bool] = ContextVar("whether losses leave the model's widths as they are", default=False)


@contextmanager
def widths_kept() -> Iterator[None]:
    """Within this context a loss computes with the best widths, and leaves those of the model as they are."""
    before = _PURE.get()
    try:  # Ctrl-C may come as soon as the variable is set
        _PURE.set(True)
        yield
    finally:
        _PURE.set(before)


def best_width(name: str, q: Distribution, start: Tensor, temperature: float) -> Tensor:
    """Return the width of the prior N(0, σ²) that is nearest to q: σ² = E[w²], averaged over the numbers of a site.

    At a temperature below one, a hyper-prior pulls it to ``start``.

    Widths of a shape that broadcasts to the site, such as one per column, are each averaged over their own numbers.
    """
    mean = None
    if not isinstance(q, Delta) and not getattr(q, "singular", False):
        try:
            mean, variance = q.mean.detach(), q.variance.detach()
        except NotImplementedError:
            mean = None
    if mean is None:
        raise PyroDropoutError(
            f"the prior width of {name!r} cannot be learned: the guide has a point there, or no moments that are known."
            " The best prior of a point is a spike at it, whatever the data. Give the guide a width there (scale > 0,"
            " bias='gaussian'), or leave the site out: Prior(learn='*.weight') learns the widths of weights alone. For"
            " points, maximise_evidence finds widths by a Laplace approximation."
        )
    squares = mean.square() + variance
    own = squares.sum_to_size(start.shape) * (start.numel() / squares.numel())
    pull = 1 - temperature
    width: Tensor = ((own + pull * start.square()) / (1 + pull)).sqrt()
    return width


def with_best_width(q_site: Message, p_site: Message, temperature: float) -> Message:
    """Return a site of the model whose width is learned, with the best prior for the guide's.

    A loss that trains writes the width to the model.
    """
    p, trains = p_site["fn"], torch.is_grad_enabled()
    prior: LearnedNormal = base_distribution(p)
    with torch.no_grad():
        width = best_width(p_site["name"], q_site["fn"], prior.start, temperature)
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
        count: Any = (kwargs or {}).get("num_data", args[2] if len(args) > 2 else None)
        for module in modules_of(model):
            if isinstance(module, BayesianNet):
                found = {name: drawn.nodes[name]["fn"] for name in module.learned}
                every = [site["fn"] for name, site in drawn.nodes.items() if name in module.sites]
                numbers = numbers_of(q for q in every if not is_point(q))
                widths = {}
                for name, q in found.items():
                    how, start = module.tempered(name, count), module.prior_start(name)
                    heat = 1.0 if how is None else share_of_data(how, numbers)
                    widths[name] = best_width(name, q, start, heat)
                bad = next((name for name, width in widths.items() if not bool(width.isfinite().all())), None)
                if bad is not None:
                    raise DivergedError(
                        f"the learned prior width of {bad} is not finite after the last step. Lower the learning rate,"
                        " or clip gradients (clip_norm=...)."
                    )
                module.set_prior_scales(widths)
