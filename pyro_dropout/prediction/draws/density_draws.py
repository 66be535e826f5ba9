"""Draws of a guide with their log density, or with the reason why there is none.

The density of a draw is most accurate from the noise that made it, and a network-wide guide has no other way, so
draws and densities come from one trace. At σ = 0, and where a site is a point, q has no density.
"""

from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.distributions import Delta
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_dropout.generative.model_call import ModelCall
from pyro_dropout.guides.base import SiteGuide
from pyro_dropout.mathematics.errors import PyroDropoutError, SingularError
from pyro_dropout.mathematics.row_mixture_distribution import RowMixture
from pyro_dropout.prediction.draws.weight_draws import Weights, latent_draws
from pyro_dropout.protocols import HasDensity, Posterior

F64 = torch.float64


def draws_with_density(call: ModelCall, posterior: Any, samples: int) -> tuple[Weights, Tensor | None, str]:
    """Return ``samples`` draws, (samples, ...), with their log density or the reason why there is none.

    Args:
        call: the model and its arguments, which a guide is called with too.
        posterior: a guide, or anything with ``sample_weights(n)``.
        samples: how many draws.
    """
    if not callable(posterior):
        if not isinstance(posterior, Posterior):
            raise PyroDropoutError(
                "posterior must be a guide, a Fleet, or have sample_weights(n) or weights; got"
                f" {type(posterior).__name__}."
            )
        weights: Weights = posterior.sample_weights(samples)
        density = posterior.log_prob(weights) if isinstance(posterior, HasDensity) else None
        why = "" if density is not None else f"{type(posterior).__name__} has no log_prob(weights)."
        return weights, density, why
    with poutine.block(expose_types=["param"]):
        probes = [call.of(poutine.trace(posterior).get_trace) for _ in range(2)]
        why = singularity(probes)
        if why:
            return _latent_of(latent_draws(posterior, samples, call), probes[0]), None, why
        try:
            traced = _at_once if isinstance(posterior, SiteGuide) and _plain(probes[0]) else _one_by_one
            weights, density = traced(posterior, call, samples)
        except SingularError as cause:
            return _latent_of(latent_draws(posterior, samples, call), probes[0]), None, str(cause)
    if not bool(torch.isfinite(density).all()):
        return weights, None, "log q(w) is not finite: a standard deviation of the guide is zero, or too small."
    return weights, density, ""


def singularity(probes: list[Any]) -> str:
    """Return why a guide has no density, from two of its traces; empty if it has one."""
    for name, site in _sampled(probes[0]).items():
        q = site["fn"]
        if isinstance(q, RowMixture) and q.singular:
            return (
                f"the guide has no density at site {name!r}: its standard deviation (scale) is 0, so that draws lie on"
                " a set of volume zero."
            )
        # A mapped draw is a Delta too, but changes from one trace to the next.
        if isinstance(q, Delta) and torch.equal(site["value"], probes[1].nodes[name]["value"]):
            return f"the guide has no density at site {name!r}: it is a point, not a distribution."
    return ""


def _sampled(trace: Any) -> dict[str, Any]:
    return {
        name: site
        for name, site in trace.nodes.items()
        if site["type"] == "sample" and not site["is_observed"] and not site_is_subsample(site)
    }


def _latent(trace: Any) -> dict[str, Any]:
    return {name: site for name, site in _sampled(trace).items() if not site["infer"].get("is_auxiliary")}


def _latent_of(weights: Weights, trace: Any) -> Weights:
    return {name: weights[name] for name in _latent(trace) if name in weights}


def _plain(trace: Any) -> bool:
    """Whether no site is in a plate or represents another site."""
    sites = _sampled(trace)
    return len(sites) == len(_latent(trace)) and not any(site["cond_indep_stack"] for site in sites.values())


def _at_once(guide: Any, call: ModelCall, samples: int) -> tuple[Weights, Tensor]:
    """Trace all draws at once, as particles."""
    with pyro.plate("_draws", samples, dim=-1):
        trace = call.of(poutine.trace(guide).get_trace)
    sites = _sampled(trace)
    density = torch.stack([site["fn"].log_prob(site["value"]).to(F64) for site in sites.values()]).sum(0)
    return {name: site["value"] for name, site in sites.items()}, density


def _one_by_one(guide: Any, call: ModelCall, samples: int) -> tuple[Weights, Tensor]:
    rows, densities = [], []
    for _ in range(samples):
        trace = call.of(poutine.trace(guide).get_trace)
        densities.append(sum(site["fn"].log_prob(site["value"]).to(F64).sum() for site in _sampled(trace).values()))
        rows.append({name: site["value"] for name, site in _latent(trace).items()})
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}, torch.stack(densities)
