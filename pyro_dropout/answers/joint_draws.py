"""Whole draws of all weights with what a diagnostic asks of each: f, log p(y | w), log p(w), and log q(w) if it exists.

One draw is one function: all data points share its weights, so that log p(y, w) is a sum over points and sites.
"""

from dataclasses import dataclass
from typing import Any

import torch
from pyro import poutine
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_dropout.answers.density_draws import draws_with_density
from pyro_dropout.answers.snapshot import evaluating, seeded
from pyro_dropout.answers.weight_draws import Weights
from pyro_dropout.generative.likelihoods import Likelihood, likelihood_of
from pyro_dropout.inference.fleet import Fleet
from pyro_dropout.inference.training import move_to
from pyro_dropout.mathematics.errors import (
    PyroDropoutError,
    ShapeError,
    check_count,
    check_finite,
    check_pairs,
    check_seed,
    describe,
)

F64 = torch.float64
SAMPLED = "draws of a sampler come from the posterior itself and have no density q(w)."
_BLOCK = 2**22  # outputs of the model that are held in one forward pass


@dataclass(frozen=True)
class JointDraws:
    """Draws of the weights, chain by chain, each with its densities.

    Attributes:
        weights: {site: (chains, draws, *shape)}.
        outputs: f, (chains, draws, N, outputs).
        log_likelihood: log p(y_i | w) of each point, (chains, draws, N), in float64.
        log_prior: log p(w), (chains, draws), in float64.
        log_q: log q(w), (chains, draws), in float64; None where it does not exist.
        why: why there is no log q; empty where there is one.
        likelihood: p(y | f); of each chain, where they differ.
        y: the targets, as the likelihood wants them.
    """

    weights: Weights
    outputs: Tensor
    log_likelihood: Tensor
    log_prior: Tensor
    log_q: Tensor | None
    why: str
    likelihood: list[Likelihood]
    y: Tensor

    @property
    def log_joint(self) -> Tensor:
        """Log p(y, w), (chains, draws)."""
        return self.log_likelihood.sum(-1) + self.log_prior

    def predictive(self, seed: int | None = None) -> Tensor:
        """Draw targets from p(y | f) of each draw, (chains, draws, N, D), or (chains, draws, N) for classes."""
        with torch.no_grad(), seeded(None if seed is None else seed + 1, self.outputs.device):
            drawn = [one.distribution(f).sample() for one, f in zip(self.likelihood, self.outputs, strict=True)]
        return torch.stack(drawn)


def joint_draws(model: Any, posterior: Any, x: Tensor, y: Tensor, samples: int, seed: int | None) -> JointDraws:
    """Draw whole functions from a posterior and weigh each of them.

    Args:
        model: ``model(x, y)`` with a ``likelihood``; None for a fleet.
        posterior: a guide; a fleet, whose replicas are chains; or anything with ``weights`` of shape (chains, draws,
            ...), which is thinned evenly where it has more than ``samples`` a chain.
        x: inputs, (N, ...).
        y: targets.
        samples: draws of each chain.
        seed: makes the draws repeat, and leaves torch's random state as it was.
    """
    check_count("samples", samples)
    check_seed(seed)
    check_pairs("x and y", x, y)
    pairs = list(posterior) if isinstance(posterior, Fleet) else [(model, posterior)]
    for each, q in pairs:
        likelihood_of(each)
        if not (callable(q) or hasattr(q, "weights") or hasattr(q, "sample_weights")):
            raise PyroDropoutError(
                f"posterior must be a guide, a fleet or draws with their weights, as nuts gives; got {describe(q)}."
            )
    if x.is_floating_point():
        check_finite("x", x)
    device = torch.device(move_to(None, (part for pair in pairs for part in pair)))
    x, y = x.to(device), y.to(device)
    with seeded(seed, device), evaluating(*(part for pair in pairs for part in pair)):
        chains = [_chains(each, q, x, y, samples) for each, q in pairs]
    if len(chains) == 1:
        return chains[0]
    first = chains[0]
    densities = [chain.log_q for chain in chains if chain.log_q is not None]
    return JointDraws(
        weights={name: torch.cat([chain.weights[name] for chain in chains]) for name in first.weights},
        outputs=torch.cat([chain.outputs for chain in chains]),
        log_likelihood=torch.cat([chain.log_likelihood for chain in chains]),
        log_prior=torch.cat([chain.log_prior for chain in chains]),
        log_q=torch.cat(densities) if len(densities) == len(chains) else None,
        why=next((chain.why for chain in chains if chain.why), ""),
        likelihood=[one for chain in chains for one in chain.likelihood],
        y=first.y,
    )


def _chains(model: Any, posterior: Any, x: Tensor, y: Tensor, samples: int) -> JointDraws:
    """Return the chains of one model and one posterior: one, or as many as a sampler has."""
    kept = getattr(posterior, "weights", None)
    if isinstance(kept, dict) and kept:
        weights, log_q, why = _thinned(kept, samples, x), None, SAMPLED
    else:
        drawn, density, why = draws_with_density(model, posterior, x, y, samples)
        weights = {name: value.to(x.device).unsqueeze(0) for name, value in drawn.items()}
        log_q = None if density is None else density.to(x.device, F64).unsqueeze(0)
    chains, draws = next(iter(weights.values())).shape[:2]
    flat = {name: value.flatten(0, 1) for name, value in weights.items()}
    f, log_prior = _weighed(model, flat, x, y)
    target = model.likelihood.checked(f[0], y)
    each = [model.likelihood.distribution(part).log_prob(target).to(F64) for part in f.split(_most(x, f))]
    return JointDraws(
        weights=weights,
        outputs=f.unflatten(0, (chains, draws)),
        log_likelihood=torch.cat(each).unflatten(0, (chains, draws)),
        log_prior=log_prior.unflatten(0, (chains, draws)),
        log_q=log_q,
        why=why,
        likelihood=[model.likelihood] * chains,
        y=target,
    )


def _thinned(kept: Weights, samples: int, x: Tensor) -> Weights:
    draws = next(iter(kept.values())).shape[1]
    rows = torch.linspace(0, draws - 1, min(samples, draws), dtype=F64).round().long()
    return {name: value[:, rows.to(value.device)].to(x.device) for name, value in kept.items()}


# --- the model at each draw -------------------------------------------------------------------------------------------


def _most(x: Tensor, f: Tensor) -> int:
    return max(1, _BLOCK // max(1, len(x) * f.shape[-1]))


def _weighed(model: Any, weights: Weights, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return f, (S, N, outputs), and log p(w), (S,), of all draws."""
    count = len(next(iter(weights.values())))
    priors, f, first = _visit(model, weights, 0, x, y)
    if hasattr(model, "evaluate") and set(weights) == set(model.sites) == set(priors):
        logs = [priors[name].log_prob(weights[name]).to(F64) for name in weights]
        _, _, last = _visit(model, weights, count - 1, x, y)
        # A prior that depends on another site would have been taken for that of the first draw.
        if all(log.shape == (count,) for log in logs) and _same(torch.stack(logs)[:, -1], last):
            size = _most(x, f)
            blocks = range(0, count, size)
            outputs = [model.evaluate({k: w[b : b + size] for k, w in weights.items()}, x) for b in blocks]
            return torch.cat([out.reshape(-1, *f.shape) for out in outputs]), torch.stack(logs).sum(0)
    rest = [_visit(model, weights, t, x, y)[1:] for t in range(1, count)]
    return torch.stack([f, *(out for out, _ in rest)]), torch.stack([first, *(log for _, log in rest)])


def _same(parts: Tensor, whole: Tensor) -> bool:
    """Whether numbers add up to another one, as nearly as sums of float32 do."""
    return bool((parts.sum() - whole).abs() <= 1e-5 * parts.abs().sum() + 1e-6)


def _visit(model: Any, weights: Weights, t: int, x: Tensor, y: Tensor) -> tuple[dict[str, Any], Tensor, Tensor]:
    """Run the model with one draw; return the priors it gave each site, f, and log p(w)."""
    own = {name: value[t] for name, value in weights.items()}
    with poutine.block(expose_types=["param"]):
        trace = poutine.trace(poutine.condition(model, data=own)).get_trace(x, y)
    f: Any = trace.nodes["_RETURN"]["value"]
    if not isinstance(f, Tensor) or f.dim() < 2 or f.shape[-2] != len(x):
        got = tuple(f.shape) if isinstance(f, Tensor) else type(f).__name__
        raise ShapeError(f"model must return its outputs f, (N, D) with N = {len(x)}; got {got}.")
    if t == 0:
        model.likelihood.check_values(f, y)
    priors: dict[str, Any] = {}
    for name, site in trace.nodes.items():
        if site["type"] != "sample" or site_is_subsample(site):
            continue
        if name in own:
            priors[name] = site["fn"]
        elif not site["is_observed"]:
            raise PyroDropoutError(f"the posterior has no site {name!r}, which the model samples.")
    if not priors:
        raise PyroDropoutError(f"the model samples none of the posterior's sites, {', '.join(own)}.")
    logs = [prior.log_prob(own[name]).to(F64).sum() for name, prior in priors.items()]
    return priors, f, torch.stack(logs).sum()
