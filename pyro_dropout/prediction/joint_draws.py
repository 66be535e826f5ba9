"""Draws of all latent sites with the quantities that diagnostics need: log p(y | w), log p(w), and log q(w) if known.

One draw is one function: all data points share its weights, so log p(y, w) is a sum over points and sites. The data
and their likelihood come from the model's trace; for networks of this package, from the likelihood at the outputs.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.generative.inputs import check_inputs, check_pairs
from pyro_dropout.generative.model_call import ModelCall, is_network
from pyro_dropout.generative.observed_sites import (
    are_ours,
    check_latent,
    deterministic_values,
    full_distribution,
    log_density,
    observed_sites,
    point_counts,
    point_log_likelihood,
    sample_sites,
    speaks_by_likelihood,
    trace_at,
    value_of,
)
from pyro_dropout.generative.process_state import one_at_a_time, seeded
from pyro_dropout.generative.trial_run import evaluating
from pyro_dropout.guides.ensemble import Ensemble
from pyro_dropout.mathematics.checks import check_count, check_seed
from pyro_dropout.prediction.blocks import cuts
from pyro_dropout.prediction.weight_draws import WholeFunctions, checked_outputs, draws_with_density, of_members
from pyro_dropout.protocols import Message, Trace, Weights
from pyro_dropout.training.fit import place_of

F64 = torch.float64
SAMPLED = "draws of a sampler come from the posterior itself and have no density q(w)."
_BLOCK = 2**22  # outputs of the model that are held in one forward pass
_PER_DRAW = ("weights", "log_likelihood", "log_data", "log_prior", "replicated", "deterministic")


@dataclass(frozen=True)
class JointDraws:
    """Draws of the latent sites with their densities and data, S = (chains, draws) of them; densities in float64."""

    weights: Weights  # {latent site: (*S, *shape)}
    log_likelihood: Weights  # {observed site: log p(y_n | w), (*S, *points)}
    log_data: Tensor  # log p(y | w) with all scales, S
    log_prior: Tensor  # log p(w), S
    observed: Weights  # {observed site: the data}
    dims: dict[str, tuple[str, ...]]  # {observed site: the names of the dimensions of the data}, points first
    replicated: Weights  # {observed site: data drawn from p(y | w), (*S, ...)}; empty if not requested
    # {observed site: how often each point counts in log_data, (*points)}: its scale, zero if masked; once by default
    counts: Weights = field(default_factory=dict)
    deterministic: Weights = field(default_factory=dict)  # of pyro.deterministic, those with one shape at all draws
    log_q: Tensor | None = None  # log q(w), S; None if it does not exist
    why: str = ""  # why there is no log q

    @property
    def log_joint(self) -> Tensor:
        """Log p(y, w), (chains, draws)."""
        return self.log_data + self.log_prior


def _weigh_traces(call: ModelCall, weights: Weights, replicate: bool) -> JointDraws:
    """Run a model once for each of S draws, {site: (S, *shape)}, and read densities and data from the trace."""
    data = check_latent(call, weights)
    rows: list[_Row] = []
    for t in range(len(next(iter(weights.values())))):
        row = _Row({name: value[t] for name, value in weights.items()}, call, replicate)
        if set(row.each) != set(data):
            raise PyroDropoutError(
                f"the model observes {', '.join(data)} at one draw and {', '.join(row.each) or 'nothing'} at another;"
                " it must always observe the same sites."
            )
        rows.append(row)
    shapes = {
        name: {row.deterministic[name].shape if name in row.deterministic else None for row in rows}
        for name in rows[0].deterministic
    }
    return JointDraws(
        weights=weights,
        log_likelihood={name: torch.stack([row.each[name] for row in rows]) for name in data},
        log_data=torch.stack([row.log_data for row in rows]),
        log_prior=torch.stack([row.log_prior for row in rows]),
        observed={name: value_of(site) for name, site in data.items()},
        dims=_dims(data, {name: value.dim() for name, value in rows[0].each.items()}, {*data, *weights}),
        replicated={name: torch.stack([row.replicated[name] for row in rows]) for name in rows[0].replicated},
        counts=rows[0].counts,
        deterministic={k: torch.stack([row.deterministic[k] for row in rows]) for k in shapes if len(shapes[k]) == 1},
    )


class _Row:
    """One run of the model, at one draw."""

    def __init__(self, draw: Weights, call: ModelCall, replicate: bool) -> None:
        trace = trace_at(call, draw)
        data = observed_sites(trace, draw)
        # What pyro.factor adds belongs to neither; it is counted with the data, as in Pyro's own ELBO.
        terms = [log_density(site) for name, site in sample_sites(trace).items() if name not in draw]
        self.log_prior, self.log_data = _log_prior(trace, draw), torch.stack(terms).sum()
        self.each = {name: point_log_likelihood(site) for name, site in data.items()}
        self.deterministic = {name: value for name, value in deterministic_values(trace).items() if name not in draw}
        self.counts = {name: point_counts(data[name], each) for name, each in self.each.items()}
        self.replicated: Weights = {}
        for name, site in data.items() if replicate else ():
            try:
                self.replicated[name] = full_distribution(site).sample()
            except NotImplementedError:  # a distribution that has only a density
                continue


def _dims(data: dict[str, Message], points: dict[str, int], taken: set[str]) -> dict[str, tuple[str, ...]]:
    """Name the dimensions of each site's data after its plates, or number them; names in ``taken`` are avoided."""
    sizes: dict[str, int] = {}
    found = {}
    for name, site in data.items():
        shape = value_of(site).shape
        plates = {frame.dim + points[name]: frame.name for frame in site["cond_indep_stack"] if frame.vectorized}
        own = []
        for k, size in enumerate(shape):
            plate = plates.get(k)
            # A plate with two sizes, such as a subsample, gives its name to the first.
            if plate is None or plate in taken or sizes.setdefault(plate, size) != size:
                plate = f"{name}_dim_{k}"
            own.append(plate)
        found[name] = tuple(own)
    return found


def _weigh_network(call: ModelCall, weights: Weights, replicate: bool) -> JointDraws:
    """Run a network with (x, y) at S draws of its weights; ``replicate`` asks for targets drawn from each as well."""
    model, (x, y) = call.model, call.args
    likelihood, way, count = model.likelihood, WholeFunctions(model, None), len(next(iter(weights.values())))
    trace = trace_at(call, {name: value[0] for name, value in weights.items()})  # compares sites and their shapes
    first = checked_outputs(trace.nodes["_RETURN"]["value"], len(x))
    target = likelihood.checked(first, y)
    likelihood.check_values(first, target)
    outputs, logs = [], []
    for some in cuts(count, max(1, _BLOCK // max(1, first.numel()))):
        f = way.outputs({name: value[some] for name, value in weights.items()}, x, some.stop - some.start)
        logs.append(likelihood.distribution(f).log_prob(target).to(F64))
        outputs.append(f)
    each = torch.cat(logs)
    drawn = {"y": likelihood.distribution(torch.cat(outputs)).sample()} if replicate else {}
    observed = {"y": target}
    if likelihood.distribution(first).event_shape == (1,):  # ArviZ's plots expect no dimension for a single output
        observed, drawn = ({name: value.squeeze(-1) for name, value in part.items()} for part in (observed, drawn))
    size = observed["y"].dim()
    names = ("point", "output")[:size] if size <= 2 else ("point", *(f"y_dim_{k}" for k in range(1, size)))
    found = JointDraws(weights, {"y": each}, each.sum(-1), each.new_zeros(()), observed, {"y": names}, drawn)
    known = are_ours(model, "forward", "sample_sites") and hasattr(model, "prior_of")
    if known and set(weights) == set(model.sites):
        priors = [model.prior_of(name).log_prob(w).to(F64) for name, w in weights.items()]
        return replace(found, log_prior=torch.stack(priors).sum(0))
    # What samples its sites by itself may have other priors, factors and scales.
    rows = [_Row({name: value[t] for name, value in weights.items()}, call, False) for t in range(count)]
    log_prior, log_data = (torch.stack([getattr(row, key) for row in rows]) for key in ("log_prior", "log_data"))
    return replace(found, log_prior=log_prior, log_data=log_data, counts=rows[0].counts)


def _log_prior(trace: Trace, draw: Weights) -> Tensor:
    """Return log p(w) of a draw, from the model's trace there."""
    latent = [log_density(site) for name, site in sample_sites(trace).items() if name in draw]
    if not latent:
        raise PyroDropoutError(f"the model samples none of the posterior's sites, {', '.join(draw)}.")
    return torch.stack(latent).sum()


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
        call: a model and its arguments, data included.
        posterior: a guide; or anything with ``weights`` of shape (chains, draws, ...), which is thinned evenly if it
            has more than ``samples`` per chain.
        samples: draws of each chain.
        seed: makes the draws reproducible.
        replicate: whether to draw data from each draw as well.
        by_member: whether each member of an ensemble is a chain; they then share the draws equally.
    """
    check_count("samples", samples)
    check_seed(seed)
    call = checked_call(call)
    device = place_of([call.model, posterior], call)
    call = call.to(device)
    with evaluating(call.model, posterior):
        with seeded(seed, device):
            weights, log_q, why = _drawn(call, posterior, samples, by_member)
        shape = next(iter(weights.values())).shape[:2]
        # Draws of y use separate random numbers, so that the weights are the same with and without them.
        with seeded(None if seed is None else seed + 1, device):
            weigh = _weigh_network if speaks_by_likelihood(call) else _weigh_traces
            found = weigh(call, {name: value.flatten(0, 1) for name, value in weights.items()}, replicate)

    def by_chain(value: Any) -> Any:
        return {k: by_chain(v) for k, v in value.items()} if isinstance(value, dict) else value.unflatten(0, shape)

    return replace(found, **{name: by_chain(getattr(found, name)) for name in _PER_DRAW}, log_q=log_q, why=why)


def checked_call(call: ModelCall) -> ModelCall:
    """Return a call of a model with its data; raise if the call is not valid."""
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
        draws = next(iter(kept.values())).shape[1]
        rows = torch.linspace(0, draws - 1, min(samples, draws), dtype=F64).round().long()
        return {name: value[:, rows.to(value.device)].to(place) for name, value in kept.items()}, None, SAMPLED
    shape = (1, -1)
    if by_member and isinstance(posterior, Ensemble):
        shape = (posterior.members, 1 if posterior.points else -(-samples // posterior.members))
        numbers = torch.arange(posterior.members).repeat_interleave(shape[1])
        drawn, density, why = of_members(posterior, numbers)
    else:
        drawn, density, why = draws_with_density(call, posterior, samples)
    weights = {name: value.to(place).unflatten(0, shape) for name, value in drawn.items()}
    return weights, None if density is None else density.to(place, F64).unflatten(0, shape), why
