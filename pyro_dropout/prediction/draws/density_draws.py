"""Draws of a guide with their log density, or with the reason why there is none.

The density of a draw is most accurate from the noise that made it, and a network-wide guide has no other way, so
draws and densities come from one trace. At σ = 0, and where a site is a point, q has no density.
"""

import pyro
import torch
from pyro import poutine
from pyro.distributions import Delta
from torch import Tensor

from pyro_dropout.generative.model_call import ModelCall
from pyro_dropout.guides.base import SiteGuide
from pyro_dropout.guides.ensemble import Ensemble
from pyro_dropout.mathematics.checks import describe
from pyro_dropout.mathematics.errors import PyroDropoutError, SingularError
from pyro_dropout.mathematics.row_mixture_distribution import RowMixture
from pyro_dropout.prediction.draws.weight_draws import latent_draws, latent_sites
from pyro_dropout.protocols import HasDensity, Message, Posterior, PyroModel, Weights

F64 = torch.float64


def of_members(ensemble: Ensemble, numbers: Tensor) -> tuple[Weights, Tensor | None, str]:
    """Return a draw of each of these members, with the density of the mixture or why there is none."""
    weights = ensemble.draws_at(numbers)
    try:
        return weights, ensemble.log_prob(weights), ""
    except SingularError as cause:
        return weights, None, str(cause)


def draws_with_density(call: ModelCall, posterior: object, samples: int) -> tuple[Weights, Tensor | None, str]:
    """Return ``samples`` draws of a guide, called as the model is, with their log density or why there is none."""
    if isinstance(posterior, Ensemble):
        # Points that are repeated would pass for independent draws.
        return of_members(posterior, posterior.order(min(samples, posterior.members) if posterior.points else samples))
    if not callable(posterior):
        if not isinstance(posterior, Posterior):
            raise PyroDropoutError(
                "posterior must be a guide, a fleet or draws with their weights, as nuts gives; got"
                f" {describe(posterior)}."
            )
        weights = posterior.sample_weights(samples)
        if isinstance(posterior, HasDensity):
            return weights, posterior.log_prob(weights), ""
        return weights, None, f"{type(posterior).__name__} has no log_prob(weights)."
    with poutine.block(expose_types=["param"]):
        probes = [call.of(poutine.trace(posterior).get_trace) for _ in range(2)]
        if not latent_sites(probes[0]):
            raise PyroDropoutError("the posterior has no latent site, so there is nothing to draw.")
        why = _singularity(probes)
        if not why:
            try:
                traced = _at_once if isinstance(posterior, SiteGuide) and _plain(probes[0]) else _one_by_one
                weights, density = traced(posterior, call, samples)
            except SingularError as cause:
                why = str(cause)
        if why:
            drawn = latent_draws(posterior, samples, call)
            return {name: drawn[name] for name in _proper(probes[0]) if name in drawn}, None, why
    if not bool(torch.isfinite(density).all()):
        return weights, None, "log q(w) is not finite: a standard deviation of the guide is zero, or too small."
    return weights, density, ""


def _singularity(probes: list[poutine.Trace]) -> str:
    """Return why a guide has no density, from two of its traces; empty if it has one."""
    mapped = any(site["infer"].get("is_auxiliary") for site in latent_sites(probes[0]).values())
    for name, site in latent_sites(probes[0]).items():
        q = site["fn"]
        if isinstance(q, RowMixture) and q.singular:
            return (
                f"the guide has no density at site {name!r}: its standard deviation (scale) is 0, so that draws lie on"
                " a set of volume zero."
            )
        if not isinstance(q, Delta):
            continue
        # A mapped draw is a Delta too, but changes from one trace to the next, and something holds its density.
        fixed = torch.equal(site["value"], latent_sites(probes[1])[name]["value"])
        if fixed or not (mapped or bool(torch.as_tensor(q.log_density != 0).any())):
            return f"the guide has no density at site {name!r}: it is a point, not a distribution."
    return ""


def _proper(trace: poutine.Trace) -> dict[str, Message]:
    """Return the latent sites that are also the model's: auxiliary ones are the guide's alone."""
    return {name: site for name, site in latent_sites(trace).items() if not site["infer"].get("is_auxiliary")}


def _plain(trace: poutine.Trace) -> bool:
    """Whether no site is in a plate or represents another site."""
    sites = latent_sites(trace)
    return len(sites) == len(_proper(trace)) and not any(site["cond_indep_stack"] for site in sites.values())


def _at_once(guide: PyroModel, call: ModelCall, samples: int) -> tuple[Weights, Tensor]:
    """Trace all draws at once, as particles."""
    with pyro.plate("_draws", samples, dim=-1):
        trace = call.of(poutine.trace(guide).get_trace)
    sites = latent_sites(trace)
    density = torch.stack([site["fn"].log_prob(site["value"]).to(F64) for site in sites.values()]).sum(0)
    return {name: site["value"] for name, site in sites.items()}, density


def _one_by_one(guide: PyroModel, call: ModelCall, samples: int) -> tuple[Weights, Tensor]:
    rows, densities = [], []
    for _ in range(samples):
        trace = call.of(poutine.trace(guide).get_trace)
        logs = [site["fn"].log_prob(site["value"]).to(F64).sum() for site in latent_sites(trace).values()]
        densities.append(torch.stack(logs).sum())
        rows.append({name: site["value"] for name, site in _proper(trace).items()})
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}, torch.stack(densities)
