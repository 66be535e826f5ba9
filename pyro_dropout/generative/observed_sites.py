"""What a Pyro model observes: the sites that hold data, and log p(y | w) at each of their points.

The likelihood of a Pyro model is given by its observed sites. It is read from a trace: a site's distribution at the
site's value, with its mask. The scale of a site (``poutine.scale``, a subsampled plate) applies to its term of
log p(y, w), and not to the log-likelihood of a point.
"""

import math
from collections.abc import Collection, Iterable, Iterator
from itertools import zip_longest
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.distributions import MaskedDistribution, Unit
from pyro.distributions.hmm import HiddenMarkovModel
from pyro.distributions.torch_distribution import ExpandedDistribution
from pyro.distributions.util import scale_and_mask
from pyro.poutine.condition_messenger import ConditionMessenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor, nn
from torch.distributions import ComposeTransform, Independent, Transform, TransformedDistribution, constraints

from pyro_dropout.errors import PyroDropoutError, ShapeError
from pyro_dropout.generative.model_call import ModelCall, is_network, name_of, signature_of
from pyro_dropout.generative.process_state import one_at_a_time
from pyro_dropout.generative.trial_run import quietly
from pyro_dropout.mathematics.shapes import base_distribution, broadcast_shape
from pyro_dropout.protocols import Distribution, Message, Trace, Weights

F64 = torch.float64
Site = Message


def sample_sites(trace: Trace) -> dict[str, Site]:
    """Return the sites of a trace that ``pyro.sample`` made, without those that draw a subsample."""
    return {
        name: site for name, site in trace.nodes.items() if site["type"] == "sample" and not site_is_subsample(site)
    }


def holds_data(site: Site) -> bool:
    """Whether a site can be data or a prediction: neither ``pyro.factor`` nor ``pyro.deterministic``."""
    return not site["infer"].get("_deterministic") and not isinstance(site["fn"], Unit)


def deterministic_values(trace: Trace) -> Weights:
    """Return the values of the sites that ``pyro.deterministic`` made, by name."""
    sites = sample_sites(trace).items()
    return {name: site["value"] for name, site in sites if site["infer"].get("_deterministic")}


def observed_sites(trace: Trace, latent: Collection[str] = ()) -> dict[str, Site]:
    """Return the sites that hold data, by name; ``latent`` are those that are observed only because a draw is given."""
    return {
        name: site
        for name, site in sample_sites(trace).items()
        if site["is_observed"] and name not in latent and holds_data(site)
    }


def point_log_likelihood(site: Site, scale: float | Tensor = 1.0) -> Tensor:
    """Return log p(y_n | w) of each point of an observed site, (*batch), in float64; zero where it is masked."""
    each: Tensor = scale_and_mask(site["fn"].log_prob(site["value"]).to(F64), scale, site["mask"])
    return each


def log_density(site: Site) -> Tensor:
    """Return a site's term of log p(y, w), with its scale and mask, in float64."""
    return point_log_likelihood(site, site["scale"]).sum()


def point_counts(site: Site, each: Tensor) -> Tensor:
    """Return how often each point of an observed site counts in log p(y, w): its scale, or zero where it is masked."""
    found: Tensor = scale_and_mask(torch.ones_like(each), site["scale"], site["mask"])
    return found * _shown(site["fn"])


def _shown(fn: Distribution) -> Tensor | bool:
    """Return which points a distribution does not mask itself; of a vector, one number that is shown is enough."""
    if isinstance(fn, MaskedDistribution):
        mask: Tensor | bool = fn._mask & _shown(fn.base_dist)
        return mask
    if isinstance(fn, ExpandedDistribution):
        return _shown(fn.base_dist)
    if isinstance(fn, Independent):
        inside = torch.as_tensor(_shown(fn.base_dist)).expand(fn.base_dist.batch_shape)
        return inside.reshape((*fn.batch_shape, -1)).any(-1)
    return True


def full_distribution(site: Site) -> Distribution:
    """Return a site's distribution in the batch shape of its log-likelihoods: the data may have more batch elements."""
    fn, shape = site["fn"], site["value"].shape
    batch = broadcast_shape(fn.batch_shape, shape[: len(shape) - fn.event_dim])
    return fn if batch == fn.batch_shape else fn.expand(batch)


def value_of(site: Site) -> Tensor:
    """Return the data of a site, one value for each point: a single value is repeated for all of them."""
    value: Tensor = site["value"]
    return value.expand(full_distribution(site).shape())


def check_observed(sites: Iterable[Site]) -> None:
    """Raise if data and their distribution would be broadcast against each other.

    Targets (N,) and outputs (N, 1) would compare every target with the prediction at every point. Allowed are one value
    for all points, data that a plate repeats, and, outside plates, data that are many draws of one distribution.
    """
    for site in sites:
        fn, data = site["fn"], tuple(getattr(site["value"], "shape", ()))
        if not site["is_observed"] or not holds_data(site) or not hasattr(fn, "event_shape") or math.prod(data) == 1:
            continue
        event, shape = len(fn.event_shape), (*fn.batch_shape, *fn.event_shape)
        plates = {frame.dim - event for frame in site["cond_indep_stack"] if frame.vectorized}
        # A hidden Markov model that is the same at all times has data of any length.
        fixed = plates if isinstance(fn, HiddenMarkovModel) else plates | set(range(-event, 0))
        pairs = {-k: pair for k, pair in enumerate(zip_longest(data[::-1], shape[::-1], fillvalue=1), start=1)}
        repeated = {dim for dim, (own, theirs) in pairs.items() if own == 1 < theirs}
        several = {dim for dim, (own, theirs) in pairs.items() if theirs == 1 < own}
        unequal = {dim for dim, (own, theirs) in pairs.items() if own != theirs} - repeated - several
        if unequal or repeated - plates or several & fixed or (repeated and several):
            raise ShapeError(
                f"site {site['name']!r}: the data have shape {data}, but their distribution has shape {shape}."
                " Broadcasting would compare values with predictions of other points. Give both the same shape; for"
                " (N,) and (N, 1), write y.unsqueeze(-1), or squeeze(-1) in the model."
            )


class _AtDraw(ConditionMessenger):
    """Sets latent sites to the values of a draw, whose shapes must be those in the model."""

    def _pyro_sample(self, msg: Any) -> None:
        super()._pyro_sample(msg)
        name = msg["name"]
        if name in self.data and tuple(msg["value"].shape) != tuple(msg["fn"].shape()):
            raise ShapeError(
                f"site {name!r} has shape {tuple(msg['value'].shape)} in the posterior, but {tuple(msg['fn'].shape())}"
                " in the model with these arguments. A site with a value for each data point is known only at the"
                " training points."
            )


@one_at_a_time
def trace_of(call: ModelCall, draw: Weights | None = None) -> Trace:
    """Return the model's trace at a draw of its latent sites; outer handlers see its parameters."""
    model = call.model if draw is None else _AtDraw(draw)(call.model)
    with poutine.block(expose_types=["param"]):
        trace = poutine.trace(model).get_trace(*call.args, **call.kwargs)
    check_observed(sample_sites(trace).values())
    return trace


def trace_at(call: ModelCall, draw: Weights) -> Trace:
    """Return the model's trace at a draw that has all of its latent sites; raise an error if one is missing."""
    trace = trace_of(call, draw)
    for name, site in sample_sites(trace).items():
        if name not in draw and not site["is_observed"]:
            discrete = " It is discrete: sum it out in the model." if site["fn"].has_enumerate_support else ""
            raise PyroDropoutError(f"the posterior has no site {name!r}, which the model samples.{discrete}")
    return trace


def check_whole(trace: Trace) -> None:
    """Raise if a plate draws a random subsample, which would differ in every run of the model."""
    for name, site in trace.nodes.items():
        if site["type"] == "sample" and site_is_subsample(site) and len(site["value"]) < site["fn"].size:
            raise PyroDropoutError(
                f"plate {name!r} draws {len(site['value'])} of {site['fn'].size} points; here all of them are needed."
                " Call the model without its subsample_size."
            )


def check_latent(call: ModelCall, names: Collection[str]) -> dict[str, Site]:
    """Return the sites that a model observes; raise if there are none, or if the posterior's ``names`` has one."""
    trace = _some_sites(call)
    check_whole(trace)
    data = observed_sites(trace)
    both = [name for name in names if name in data]
    if both:
        raise PyroDropoutError(
            f"site {both[0]!r} is observed here, but is latent in the posterior: the guide was first called without the"
            " data. Make a new guide and call it with the data."
        )
    if not data:
        raise PyroDropoutError(nothing_observed(trace, "to_arviz(model, posterior, x, y)"))
    return data


def nothing_observed(trace: Trace, example: str) -> str:
    """Return the error message for a model that was called without its data."""
    return (
        f"the model observes nothing with these arguments; give it its data too, as {example}. It samples"
        f" {', '.join(sample_sites(trace))}."
    )


_RUNS = 20  # before a model is refused that may observe something at other values of its latent sites


def check_evidence(call: ModelCall, trace: Trace, example: str) -> None:
    """Raise if the posterior of a model would be its prior: if it has no data here, and no ``pyro.factor``.

    A model without parameters can be a density to approximate: no data of it can have been forgotten.
    """
    known = signature_of(call.model)
    if known is not None and not known.parameters:
        return
    for _ in range(_RUNS):
        sites = sample_sites(trace).values()
        if any(site["is_observed"] and not site["infer"].get("_deterministic") for site in sites):
            return
        trace = trace_of(call)
    raise PyroDropoutError(nothing_observed(trace, example))


def check_samples(call: ModelCall) -> None:
    """Raise unless the model can be trained with its data; random states and parameters are left unchanged."""
    with torch.no_grad(), quietly(call.model), pyro.get_param_store().scope(), poutine.block():
        check_evidence(call, _some_sites(call), "fit(model, guide, x, y)")


def check_first_step(call: ModelCall) -> None:
    """Raise if a model observes nothing in its first step; what else may be wrong with it, the step itself meets."""
    with torch.no_grad(), quietly(call.model), pyro.get_param_store().scope(), poutine.block():
        try:
            trace = poutine.trace(call.model).get_trace(*call.args, **call.kwargs)
        except Exception:
            return
        check_evidence(call, trace, "svi.step(x, y)")


def _some_sites(call: ModelCall) -> Trace:
    trace = trace_of(call)
    if not sample_sites(trace):
        raise PyroDropoutError(no_sites(call.model))
    return trace


def no_sites(model: object) -> str:
    """Return the error message for a program that is not a Pyro model."""
    return (
        f"model must be a Pyro model; {name_of(model)} has no sample site. Write BayesianNet(net, likelihood=...) for a"
        " network."
    )


def are_ours(model: Any, *methods: str) -> bool:
    """Whether these methods of a module, and of the models inside it, are those of this package."""
    while isinstance(model, nn.Module):
        own = [getattr(type(model), name) for name in methods if hasattr(type(model), name)]
        if not all(method.__module__.startswith("pyro_dropout.") for method in own):
            return False
        model = getattr(model, "model", None)
    return True


def speaks_by_likelihood(call: ModelCall) -> bool:
    """Whether p(y | w) of a model is its likelihood at the outputs that it returns: the fast path for networks.

    True for the models of this package. Any other module with a likelihood is run once to see whether it uses it.
    """
    if not is_network(call.model):
        return False
    if are_ours(call.model, "forward"):
        return True
    with torch.no_grad(), quietly(call.model):
        try:
            trace = trace_of(call)
            site, f = trace.nodes["y"], trace.nodes["_RETURN"]["value"]
            theirs = call.model.likelihood.distribution(f).log_prob(site["value"])
            return bool(torch.allclose(theirs, site["fn"].log_prob(site["value"])))
        except Exception:  # a later run of the model raises the same error
            return False


def check_supports(call: ModelCall, sites: dict[str, Message], trained: bool) -> None:
    """Raise an error if the support of a latent site depends on others, by a run in which these have gradients.

    ``sites`` are those of a trace, and ``trained`` says whether the model's parameters move too.
    """
    sites = {name: site for name, site in sites.items() if site["type"] == "sample" and not site["is_observed"]}
    for name, site in sites.items():
        _check_declared(name, site["fn"])
    bounded = {name: site for name, site in sites.items() if list(_numbers(site["fn"].support))}
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
    """Raise an error if torch may declare another support than a transformed distribution has.

    It declares what the last transform can give: AffineTransform(0, w) any number, of a Beta distribution too.
    """
    inner = base_distribution(fn, dist.MaskedDistribution, dist.ExpandedDistribution)
    if not isinstance(inner, TransformedDistribution) or type(inner).support not in _DECLARED:
        return
    parts = _parts(inner.transforms)
    before = [inner.base_dist.support, *(part.codomain for part in parts[:-1])]
    for given, part in zip(before, parts, strict=False):
        if _ends(given) != _ends(part.domain):
            raise PyroDropoutError(
                f"site {name!r} is a TransformedDistribution whose support is not known: {type(part).__name__} maps"
                f" {part.domain}, and is given {given}. Sample what it is made of, and transform that in the model:"
                f" pyro.deterministic({name!r}, low + width * pyro.sample({name + '_unit'!r}, dist.Beta(a, b)))."
            )


def _parts(transforms: list[Transform]) -> list[Transform]:
    return [part for t in transforms for part in (_parts(t.parts) if isinstance(t, ComposeTransform) else [t])]


_DECLARED = (TransformedDistribution.support, dist.TransformedDistribution.support)


def _ends(support: Any) -> list[str]:
    """Return the ends of an interval, open or closed; for other sets, what they are called."""
    if isinstance(support, constraints.independent):
        return _ends(support.base_constraint)
    ends = [getattr(support, end, None) for end in ("lower_bound", "upper_bound")]
    known = [f"{name} {torch.as_tensor(end, dtype=F64).unique()}" for name, end in enumerate(ends) if end is not None]
    return known or [str(support)]


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
