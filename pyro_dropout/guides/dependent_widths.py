"""Priors whose width is itself a latent variable, as in hierarchical models, where points have no maximum to find.

With θ_k ~ N(μ, τ²) for K groups, the joint density has the factor τ^(-K). It grows without bound where τ goes to zero
and all θ_k to μ, whatever the data are, so the most probable point says nothing about the posterior.
"""

import torch
from pyro import poutine
from torch import Tensor
from torch.distributions import biject_to

from pyro_dropout.generative.random_state import forked
from pyro_dropout.protocols import Distribution, PyroModel, Trace

_ROUNDING = 1e-3  # of a slope, for a relative change of the other site; that of a width is about its number of elements


def dependent_width(
    model: PyroModel, prototype: Trace, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[str, str] | None:
    """Return a latent site whose prior's width depends on another latent site, and that one; None if there is none.

    A draw that moves along with its prior keeps its density if only the location changes. Widths are those in
    unconstrained space.

    Args:
        model: the Pyro model.
        prototype: a trace of it.
        args: the model's arguments.
        kwargs: the model's keyword arguments.

    Example:
        >>> import pyro, torch, pyro.distributions as dist
        >>> from pyro_dropout.guides.dependent_widths import dependent_width
        >>> def model():
        ...     mu, tau = pyro.sample("mu", dist.Normal(0.0, 1.0)), pyro.sample("tau", dist.HalfNormal(1.0))
        ...     pyro.sample("shifted", dist.Normal(mu, 1.0))
        ...     pyro.sample("widened", dist.Normal(mu, tau))
        >>> dependent_width(model, pyro.poutine.trace(model).get_trace(), (), {})
        ('widened', 'tau')
    """
    sites = {name: site for name, site in prototype.iter_stochastic_nodes() if site["value"].is_floating_point()}
    values = {name: site["value"].detach().clone().requires_grad_() for name, site in sites.items()}
    with forked(), torch.enable_grad(), poutine.block():
        trace = poutine.trace(poutine.condition(model, data=values)).get_trace(*args, **kwargs)
        for name in values:
            fn: Distribution = trace.nodes[name]["fn"]
            if not fn.has_rsample:
                continue
            value, to = fn.rsample(), biject_to(fn.support)
            density: Tensor = fn.log_prob(value).sum() + to.log_abs_det_jacobian(to.inv(value), value).sum()
            others = {other: value for other, value in values.items() if other != name}
            if not density.requires_grad or not others:
                continue
            slopes = torch.autograd.grad(density, list(others.values()), allow_unused=True, retain_graph=True)
            for other, slope in zip(others, slopes, strict=True):
                if slope is not None and bool((slope * others[other].abs().clamp(min=1.0)).abs().max() > _ROUNDING):
                    return name, other
    return None
