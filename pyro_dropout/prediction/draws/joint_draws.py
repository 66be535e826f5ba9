"""Draws of all latent sites with the quantities that diagnostics need: log p(y | w), log p(w), and log q(w) if known.

One draw is one function: all data points share its weights, so log p(y, w) is a sum over points and sites. The data
and their likelihood come from the model's trace; for networks of this package, from the likelihood at the outputs.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyro_dropout.generative.inputs import check_inputs, check_pairs
from pyro_dropout.generative.model_call import ModelCall, is_network
from pyro_dropout.generative.observed_sites import speaks_by_likelihood
from pyro_dropout.generative.process_lock import one_at_a_time
from pyro_dropout.generative.random_state import seeded
from pyro_dropout.generative.trial_run import evaluating
from pyro_dropout.guides.ensemble import Ensemble
from pyro_dropout.mathematics.checks import check_count, check_seed, describe
from pyro_dropout.mathematics.errors import PyroDropoutError
from pyro_dropout.prediction.draws.density_draws import draws_with_density, of_members
from pyro_dropout.prediction.draws.network_draws import weigh_network
from pyro_dropout.prediction.draws.traced_draws import Weighed, weigh_traces
from pyro_dropout.protocols import Weights
from pyro_dropout.training.fit import place_of
from pyro_dropout.training.fleet.fleet import Fleet

F64 = torch.float64
SAMPLED = "draws of a sampler come from the posterior itself and have no density q(w)."


@dataclass(frozen=True)
class JointDraws(Weighed):
    """Draws of the latent sites, chain by chain, each with its densities: (chains, draws) in place of (S,).

    Attributes:
        weights: {latent site: (chains, draws, *shape)}.
        log_q: log q(w), (chains, draws), in float64; None if it does not exist.
        why: why there is no log q; empty if there is one.
    """

    weights: Weights
    log_q: Tensor | None
    why: str

    @property
    def log_joint(self) -> Tensor:
        """Log p(y, w), (chains, draws)."""
        return self.log_data + self.log_prior


@one_at_a_time
def joint_draws(
    call: ModelCall,
    posterior: object,
    samples: int,
    seed: int | None,
    *,
    replicate: bool = False,
    by_member: bool = False,
) -> JointDraws:
    """Draw whole functions from a posterior and compute the densities of each.

    Args:
        call: a model and its arguments, data included; the model may be None for a fleet.
        posterior: a guide; a fleet, whose replicas are chains; or anything with ``weights`` of shape (chains, draws,
            ...), which is thinned evenly if it has more than ``samples`` per chain.
        samples: draws of each chain.
        seed: makes the draws reproducible, and leaves torch's random state as it was.
        replicate: whether to draw data from each draw as well.
        by_member: whether each member of an ensemble is a chain; they then share the draws equally.
    """
    check_count("samples", samples)
    check_seed(seed)
    pairs = list(posterior) if isinstance(posterior, Fleet) else [(call.model, posterior)]
    calls = [checked_call(ModelCall(model, call.args, call.kwargs)) for model, _ in pairs]
    parts = [part for pair in pairs for part in pair]
    device = place_of(parts, call)
    with evaluating(*parts):
        with seeded(seed, device):
            drawn = [_drawn(each.to(device), q, samples, by_member) for each, (_, q) in zip(calls, pairs, strict=True)]
        # Draws of y use separate random numbers, so that the weights are the same with and without them.
        with seeded(None if seed is None else seed + 1, device):
            chains = [_weighed(each.to(device), *own, replicate) for each, own in zip(calls, drawn, strict=True)]
    return chains[0] if len(chains) == 1 else _joined(chains)


def checked_call(call: ModelCall) -> ModelCall:
    """Return a call of a model with its data; raise if the call is not valid."""
    if not callable(call.model):
        raise PyroDropoutError(f"model must be a Pyro model, a function or a module; got {describe(call.model)}.")
    if is_network(call.model):
        call = call.as_pair()
        check_pairs("x and y", *call.args)
        check_inputs(call.args[0])
        return call
    call = call.with_num_data(only_if_needed=True)
    call.check_bound()
    return call


def _drawn(call: ModelCall, posterior: object, samples: int, by_member: bool) -> tuple[Weights, Tensor | None, str]:
    """Return {site: (chains, draws, ...)}, log q or None, and why there is none."""
    kept = getattr(posterior, "weights", None)
    place = next(call.leaves(), torch.zeros(())).device
    if isinstance(kept, dict) and kept:
        return _thinned(kept, samples, place), None, SAMPLED
    if by_member and isinstance(posterior, Ensemble):
        each = 1 if posterior.points else -(-samples // posterior.members)
        numbers = torch.arange(posterior.members).repeat_interleave(each)
        drawn, density, why = of_members(posterior, numbers)
        shape = (posterior.members, each)
        weights = {name: value.to(place).unflatten(0, shape) for name, value in drawn.items()}
        return weights, None if density is None else density.to(place, F64).unflatten(0, shape), why
    drawn, density, why = draws_with_density(call, posterior, samples)
    weights = {name: value.to(place).unsqueeze(0) for name, value in drawn.items()}
    return weights, None if density is None else density.to(place, F64).unsqueeze(0), why


def _weighed(call: ModelCall, weights: Weights, log_q: Tensor | None, why: str, replicate: bool) -> JointDraws:
    """Return the chains of one model and one posterior: one, or as many as a sampler has."""
    shape = next(iter(weights.values())).shape[:2]
    flat = {name: value.flatten(0, 1) for name, value in weights.items()}
    weigh = weigh_network if speaks_by_likelihood(call) else weigh_traces
    found = weigh(call, flat, replicate)

    def by_chain(parts: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: value.unflatten(0, shape) for name, value in parts.items()}

    return JointDraws(
        log_likelihood=by_chain(found.log_likelihood),
        log_data=found.log_data.unflatten(0, shape),
        log_prior=found.log_prior.unflatten(0, shape),
        observed=found.observed,
        dims=found.dims,
        replicated=by_chain(found.replicated),
        counts=found.counts,
        deterministic=by_chain(found.deterministic),
        weights=weights,
        log_q=log_q,
        why=why,
    )


def _thinned(kept: Weights, samples: int, place: torch.device) -> Weights:
    draws = next(iter(kept.values())).shape[1]
    rows = torch.linspace(0, draws - 1, min(samples, draws), dtype=F64).round().long()
    return {name: value[:, rows.to(value.device)].to(place) for name, value in kept.items()}


def _joined(chains: list[JointDraws]) -> JointDraws:
    """Return the chains of several models, one after another."""
    first = chains[0]
    densities = [chain.log_q for chain in chains if chain.log_q is not None]

    def each(part: str) -> dict[str, Tensor]:
        return {name: torch.cat([getattr(chain, part)[name] for chain in chains]) for name in getattr(first, part)}

    return replace(
        first,
        log_likelihood=each("log_likelihood"),
        log_data=torch.cat([chain.log_data for chain in chains]),
        log_prior=torch.cat([chain.log_prior for chain in chains]),
        replicated=each("replicated"),
        deterministic=each("deterministic"),
        weights=each("weights"),
        log_q=torch.cat(densities) if len(densities) == len(chains) else None,
        why=next((chain.why for chain in chains if chain.why), ""),
    )
