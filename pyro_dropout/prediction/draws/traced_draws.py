"""Draws of any Pyro model's latent sites with log densities from its traces: one run of the model for each draw."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_dropout.generative.model_call import ModelCall
from pyro_dropout.generative.observed_sites import (
    check_latent,
    deterministic_values,
    full_distribution,
    log_density,
    observed_sites,
    point_counts,
    point_log_likelihood,
    sample_sites,
    trace_at,
    value_of,
)
from pyro_dropout.mathematics.errors import PyroDropoutError
from pyro_dropout.protocols import Message, Weights


@dataclass(frozen=True)
class Weighed:
    """The densities and data of S draws.

    Attributes:
        log_likelihood: {observed site: log p(y_n | w), (S, *points)}, in float64.
        log_data: log p(y | w) with all scales, (S,), in float64.
        log_prior: log p(w), (S,), in float64.
        observed: {observed site: the data}.
        dims: {observed site: the names of the dimensions of the data}, points first.
        replicated: {observed site: data drawn from p(y | w), (S, ...)}; empty if not requested.
        counts: {observed site: how often each point counts in ``log_data``, (*points)}: its scale, zero if it is
            masked. Sites that are left out count each point once.
        deterministic: {site of ``pyro.deterministic``: (S, *shape)}, of those with one shape at all draws.
    """

    log_likelihood: dict[str, Tensor]
    log_data: Tensor
    log_prior: Tensor
    observed: dict[str, Tensor]
    dims: dict[str, tuple[str, ...]]
    replicated: dict[str, Tensor]
    counts: dict[str, Tensor]
    deterministic: dict[str, Tensor]


def weigh_traces(call: ModelCall, weights: Weights, replicate: bool) -> Weighed:
    """Run a model once for each of S draws, and read its log densities and data from the trace.

    Args:
        call: the model and its arguments, data included.
        weights: {latent site: (S, *shape)}.
        replicate: whether to draw data from each draw as well.
    """
    data = check_latent(call, weights)
    rows: list[_Row] = []
    for t in range(len(next(iter(weights.values())))):
        row = _Row({name: value[t] for name, value in weights.items()}, call, replicate)
        if set(row.each) != set(data):
            raise PyroDropoutError(
                f"the model observes different sites at different draws: {', '.join(data)} at first, and then"
                f" {', '.join(row.each) or 'none'}. It must always observe the same ones."
            )
        rows.append(row)
    points = {name: value.dim() for name, value in rows[0].each.items()}
    return Weighed(
        log_likelihood={name: torch.stack([row.each[name] for row in rows]) for name in data},
        log_data=torch.stack([row.log_data for row in rows]),
        log_prior=torch.stack([row.log_prior for row in rows]),
        observed={name: value_of(site) for name, site in data.items()},
        dims=_dims(data, points, {*data, *weights}),
        replicated={name: torch.stack([row.replicated[name] for row in rows]) for name in rows[0].replicated},
        counts=rows[0].counts,
        deterministic=_stacked([row.deterministic for row in rows]),
    )


def _stacked(rows: list[Weights]) -> Weights:
    """Stack the values that all rows have in one shape."""
    shapes = {name: {row[name].shape if name in row else None for row in rows} for name in rows[0]}
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0] if len(shapes[name]) == 1}


class _Row:
    """One run of the model, at one draw."""

    def __init__(self, draw: Weights, call: ModelCall, replicate: bool) -> None:
        trace = trace_at(call, draw)
        sites, data = sample_sites(trace), observed_sites(trace, draw)
        latent = [log_density(site) for name, site in sites.items() if name in draw]
        if not latent:
            raise PyroDropoutError(f"the model samples none of the posterior's sites, {', '.join(draw)}.")
        # What pyro.factor adds belongs to neither; it is counted with the data, as in Pyro's own ELBO.
        terms = [log_density(site) for name, site in sites.items() if name not in draw]
        self.log_prior, self.log_data = torch.stack(latent).sum(), torch.stack(terms).sum()
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
