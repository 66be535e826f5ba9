"""Latent sites whose support moves with other sites, as u ~ Uniform(0, θ): a map to the real line would move with it.

Guides and samplers map each site from the real line by one transform, which they make once. Where the support of a site
depends on another latent site, or on a trained parameter, draws would lie outside of it.
"""

import math
from collections.abc import Iterator
from typing import Any

import pyro.distributions as dist
import torch
from pyro import poutine
from torch import Tensor
from torch.distributions import ComposeTransform, Transform, TransformedDistribution, constraints

from pyro_dropout.generative.model_call import ModelCall
from pyro_dropout.generative.trial_run import quietly
from pyro_dropout.mathematics.base_distribution import base_distribution
from pyro_dropout.mathematics.errors import PyroDropoutError
from pyro_dropout.protocols import Distribution, Message, Weights


def check_supports(call: ModelCall, sites: dict[str, Message], trained: bool) -> None:
    """Raise an error if the support of a latent site depends on others, by a run in which these have gradients.

    Args:
        call: the model and its arguments.
        sites: the latent sites of a trace of it.
        trained: whether the model's parameters move too; those of a sampler do not.

    Example:
        >>> import pyro, torch, pyro.distributions as dist
        >>> from pyro_dropout.generative.fixed_supports import check_supports
        >>> from pyro_dropout.generative.model_call import ModelCall
        >>> def model():
        ...     theta = pyro.sample("theta", dist.Gamma(2.0, 1.0))
        ...     pyro.sample("u", dist.Uniform(0.0, theta))
        >>> try:
        ...     check_supports(ModelCall(model, ()), dict(pyro.poutine.trace(model).get_trace().nodes), True)
        ... except ValueError as error:
        ...     print(str(error)[:46])
        the support of site 'u' depends on another lat
    """
    sites = {name: site for name, site in sites.items() if site["type"] == "sample" and not site["is_observed"]}
    for name, site in sites.items():
        _check_declared(name, site["fn"])
    bounded = {name: site for name, site in sites.items() if any(True for _ in _numbers(site["fn"].support))}
    if not bounded:
        return
    for name, site in bounded.items():
        part = any((frame.full_size or frame.size) != frame.size for frame in site["cond_indep_stack"])
        if part and any(each.numel() > 1 for each in _numbers(site["fn"].support)):
            raise PyroDropoutError(
                f"site {name!r} has bounds of its own for each element of a subsampled plate, and another batch has"
                f" others. {_advice(name)}"
            )
    values: Weights = {
        name: site["value"].detach().clone().requires_grad_()
        for name, site in sites.items()
        if site["value"].is_floating_point()
    }
    with quietly(call.model), torch.enable_grad(), poutine.block():
        trace = poutine.trace(poutine.condition(call.model, data=values)).get_trace(*call.args, **call.kwargs)
        # Here: gradients need the buffers of the run, which are restored in place.
        for name in (name for name in bounded if name in trace.nodes):
            fn: Distribution = trace.nodes[name]["fn"]
            moving = [each for each in _numbers(fn.support) if each.requires_grad]
            if not trained and moving:
                total = torch.stack([each.sum() for each in moving]).sum()
                slopes = torch.autograd.grad(total, list(values.values()), allow_unused=True, retain_graph=True)
                moving = [slope for slope in slopes if slope is not None]
            if moving:
                raise PyroDropoutError(
                    f"the support of site {name!r} depends on another latent site or on a trained parameter, and so"
                    f" does the map from the real line, which is made once. {_advice(name)}"
                )


def _check_declared(name: str, fn: Distribution) -> None:
    """Raise an error if torch declares another support than a transformed distribution has.

    It declares what the last transform can give: AffineTransform(0, w) any number, of a Beta distribution too.
    """
    inner = base_distribution(fn, dist.MaskedDistribution, dist.ExpandedDistribution)
    if not isinstance(inner, TransformedDistribution) or type(inner).support not in _DECLARED or not inner.transforms:
        return
    now = inner.base_dist.support
    for transform in _parts(inner.transforms):
        if _ends(now) != _ends(transform.domain):
            raise PyroDropoutError(
                f"site {name!r} is a TransformedDistribution whose support is not known: {type(transform).__name__}"
                f" maps {transform.domain}, but is given {now}. Sample what it is made of, and transform that in the"
                f" model: pyro.deterministic({name!r}, low + width * pyro.sample({name + '_unit'!r}, dist.Beta(a, b)))."
            )
        now = transform.codomain


def _parts(transforms: list[Transform]) -> Iterator[Transform]:
    for each in transforms:
        yield from _parts(each.parts) if isinstance(each, ComposeTransform) else [each]


_DECLARED = (TransformedDistribution.support, dist.TransformedDistribution.support)


def _ends(support: Any) -> tuple[object, ...]:
    """Return the ends of an interval, open or closed; for other sets, what they are called."""
    if isinstance(support, constraints.independent):
        return _ends(support.base_constraint)
    if support is constraints.real:
        return [-math.inf], [math.inf]
    ends = [getattr(support, end, None) for end in ("lower_bound", "upper_bound")]
    if ends == [None, None]:
        return (str(support),)
    return tuple(
        torch.as_tensor(end).unique().tolist() if end is not None else [far]
        for end, far in zip(ends, (-math.inf, math.inf), strict=True)
    )


def _advice(name: str) -> str:
    return (
        f"Sample it on a fixed support and transform it in the model: for Uniform(low, high), write"
        f" pyro.deterministic({name!r}, low + (high - low) * pyro.sample({name + '_unit'!r}, dist.Uniform(0, 1)))."
    )


def _numbers(support: object) -> Iterator[Tensor]:
    """Yield the tensors that a support is made of: its bounds."""
    for value in vars(support).values() if isinstance(support, constraints.Constraint) else ():
        for each in value if isinstance(value, list | tuple) else (value,):
            if isinstance(each, Tensor):
                yield each
            else:
                yield from _numbers(each)
