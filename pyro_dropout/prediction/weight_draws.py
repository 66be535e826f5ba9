"""Ways to put a posterior's weights into a model: a draw for each data point, whole functions, and the mean.

With a draw for each data point no weights are held: masks are drawn inside the forward pass.
"""

from typing import cast

import pyro
import torch
from pyro import poutine
from pyro.distributions import Delta
from pyro.poutine.messenger import Messenger
from torch import Tensor

from pyro_dropout.errors import PyroDropoutError, ShapeError, SingularError
from pyro_dropout.generative.inputs import AnyInputs, copies
from pyro_dropout.generative.model_call import ModelCall, check_programs
from pyro_dropout.generative.observed_sites import sample_sites
from pyro_dropout.generative.own_forward import NothingFromThePrior
from pyro_dropout.generative.own_noise import silent
from pyro_dropout.guides.base import SiteGuide
from pyro_dropout.guides.concrete import as_flips
from pyro_dropout.guides.ensemble import Ensemble
from pyro_dropout.mathematics.checks import describe
from pyro_dropout.mathematics.per_data_point import drawn_per_data_point
from pyro_dropout.mathematics.row_mixture_distribution import RowMixture
from pyro_dropout.protocols import (
    FunctionPosterior,
    HasDensity,
    HasDraws,
    HasMean,
    Message,
    Model,
    Posterior,
    Predictor,
    PyroModel,
    Weights,
)
from pyro_dropout.training.loss.per_example import per_example

# Draws of one forward pass that flip the signs of one noise tensor share its magnitude; many passes average it out.
_PASSES_WITH_FLIPS = 256
# Numbers in all weights that are held at once: 256 MiB in float32.
MOST_NUMBERS = 2**26


def latent_sites(trace: poutine.Trace) -> dict[str, Message]:
    """Return the latent sites of a guide's trace."""
    return {name: site for name, site in sample_sites(trace).items() if not site["is_observed"]}


def latent_draws(posterior: object, count: int, call: ModelCall) -> Weights:
    """Return ``count`` draws of all latent sites, {site: (count, ...)}; a guide is called as the model is."""
    if isinstance(posterior, Posterior):
        return posterior.sample_weights(count)
    assert callable(posterior)
    with poutine.block(expose_types=["param"]):
        traces = [latent_sites(call.of(poutine.trace(posterior).get_trace)) for _ in range(count)]
    return {name: torch.stack([trace[name]["value"] for trace in traces]) for name in traces[0]}


def checked_outputs(f: object, count: int) -> Tensor:
    """Return the outputs of a model if they have one row for each data point."""
    if not isinstance(f, Tensor) or f.dim() < 2 or f.shape[-2] != count:
        given = f"shape {tuple(f.shape)}" if isinstance(f, Tensor) else type(f).__name__
        raise ShapeError(f"model must return its outputs f, a tensor (N, D) with N = {count}; got {given}.")
    return f


class WholeFunctions:
    """Weights that all data points share, so that one draw is one function; the other ways are subclasses of it."""

    def __init__(self, model: Predictor, posterior: object) -> None:
        self.model, self.posterior = model, posterior

    def begin(self) -> None:
        """Prepare for a new pass over all draws."""

    def draw(self, count: int, call: ModelCall) -> Weights:
        """Return ``count`` draws of the weights that are held while some passes use them; a guide gets ``call``."""
        return latent_draws(self.posterior, count, call)

    def outputs(self, weights: Weights, x: AnyInputs, count: int) -> Tensor:
        """Return the model's outputs with these weights, (count, N, D); networks run all draws at once."""
        model: object = self.model
        if isinstance(model, Model) and set(weights) == set(model.sites):
            return checked_outputs(model.evaluate(weights, x), len(x)).reshape(count, len(x), -1)
        with poutine.block(expose_types=["param"]), NothingFromThePrior():
            each = [poutine.condition(self.model, data={k: w[t] for k, w in weights.items()}) for t in range(count)]
            return torch.stack([checked_outputs(run(x), len(x)) for run in each])

    def most(self, samples: int, like: AnyInputs) -> int:
        """Return how many draws may be held at once, or run in one forward pass."""
        size = sum(value.numel() for value in self.draw(1, ModelCall(self.model, (like,))).values())
        return max(1, min(samples, MOST_NUMBERS // max(1, size)))

    def one(self, x: AnyInputs) -> Tensor:
        """Return the outputs of one draw, (1, N, D)."""
        return self.outputs(self.draw(1, ModelCall(self.model, (x,))), x, 1)

    def differentiable_loss(self, model: object, guide: object, x: AnyInputs) -> Tensor:
        """Run one draw, by which ``Parameters`` finds the parameters in use."""
        return self.one(x)


class PerExample(WholeFunctions):
    """Separate weights for every pair of a draw and a data point: draws are repeated points of one forward pass."""

    _flips = False

    def draw(self, count: int, call: ModelCall) -> Weights:
        """Return nothing: these weights are drawn inside the forward pass."""
        return {}

    def outputs(self, weights: Weights, x: AnyInputs, count: int) -> Tensor:
        """Run the model on ``count`` copies of x."""
        assert callable(self.posterior)
        rows = copies(x, count)
        with poutine.block(expose_types=["param"]), per_example():
            with _CoinFlips():
                trace = poutine.trace(self.posterior).get_trace(rows)
            for name, site in latent_sites(trace).items():
                if not isinstance(site["fn"], Delta) and drawn_per_data_point(site["value"]) is None:
                    raise PyroDropoutError(
                        f"site {name!r} of the posterior ({type(site['fn']).__name__}) is drawn once for all data"
                        " points, not for each; predict(model, guide, ..., shared=True) draws all of them so, also for"
                        " each pair of a fleet."
                    )
            with NothingFromThePrior():
                f = cast(PyroModel, poutine.replay(self.model, trace=trace))(rows)
        drawn = (drawn_per_data_point(site.get("value")) for site in trace.nodes.values())
        self._flips = self._flips or any(recipe is not None and recipe._noise is not None for recipe in drawn)
        return checked_outputs(f, len(rows)).reshape(count, len(x), -1)

    def most(self, samples: int, like: AnyInputs) -> int:
        """Return how many draws one forward pass may have."""
        return max(1, samples // _PASSES_WITH_FLIPS) if self._flips else samples


class MeanWeights(WholeFunctions):
    """The one function with the posterior's mean weights: "standard" dropout at test time."""

    def draw(self, count: int, call: ModelCall) -> Weights:
        """Return E[w], as one draw."""
        if not isinstance(self.posterior, HasMean):
            name = type(self.posterior).__name__
            raise PyroDropoutError(f"method='standard' takes E[w] from posterior.mean(); {name} has none.")
        return {name: value.unsqueeze(0) for name, value in self.posterior.mean().items()}

    def outputs(self, weights: Weights, x: AnyInputs, count: int) -> Tensor:
        """Run the model without noise of its own."""
        with silent():
            return super().outputs(weights, x, count)


class KeptDraws(WholeFunctions):
    """The draws of a sampled posterior, each used once before any is repeated, whatever the blocks are."""

    posterior: HasDraws

    def __init__(self, model: Predictor, posterior: HasDraws, samples: int) -> None:
        super().__init__(model, posterior)
        self._samples = samples
        self._left: Tensor | None = None

    def begin(self) -> None:
        """Shuffle the draws, for a new pass."""
        self._left = self.posterior.order(self._samples)

    def draw(self, count: int, call: ModelCall) -> Weights:
        """Return the next ``count`` draws; before a pass has begun, any."""
        if self._left is None:
            return super().draw(count, call)
        numbers, self._left = self._left[:count], self._left[count:]
        return self.posterior.draws_at(numbers)


class FunctionDraws(WholeFunctions):
    """Functions from a posterior without weights, such as a Gaussian process."""

    posterior: FunctionPosterior

    def draw(self, count: int, call: ModelCall) -> Weights:
        """Return nothing: there are no weights."""
        return {}

    def outputs(self, weights: Weights, x: AnyInputs, count: int) -> Tensor:
        """Return functions at all of x together."""
        assert isinstance(x, Tensor)
        return checked_outputs(self.posterior.sample_functions(x, count), len(x)).reshape(count, len(x), -1)


def whole_functions(model: Predictor, posterior: object, method: str, samples: int) -> WholeFunctions:
    """Return the way in which all points share each draw of this posterior."""
    if method == "standard":
        return MeanWeights(model, posterior)
    if isinstance(posterior, FunctionPosterior):
        return FunctionDraws(model, posterior)
    return KeptDraws(model, posterior, samples) if isinstance(posterior, HasDraws) else WholeFunctions(model, posterior)


class _CoinFlips(Messenger):
    """Gives concrete dropout its exact coin flips: relaxed ones are for training."""

    def _pyro_sample(self, msg: Message) -> None:
        msg["fn"] = as_flips(msg["fn"])


Drawn = tuple[Weights, Tensor | None, str]  # draws, their log density, and why there is none


def of_members(ensemble: Ensemble, numbers: Tensor) -> Drawn:
    """Return a draw of each of these members, with the density of the mixture or why there is none."""
    weights = ensemble.draws_at(numbers)
    try:
        return weights, ensemble.log_prob(weights), ""
    except SingularError as cause:
        return weights, None, str(cause)


def draws_with_density(call: ModelCall, posterior: object, samples: int) -> Drawn:
    """Return ``samples`` draws of a guide, called as the model is, with their log density or why there is none."""
    check_programs(call.model, posterior, "posterior")
    if isinstance(posterior, Ensemble):
        # Points that are repeated would pass for independent draws.
        return of_members(posterior, posterior.order(min(samples, posterior.members) if posterior.points else samples))
    if not callable(posterior):
        if not isinstance(posterior, Posterior):
            raise PyroDropoutError(f"posterior must be a guide, a fleet or what nuts gives; got {describe(posterior)}.")
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
                weights, density = _traced(posterior, call, samples, probes[0])
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
    sites = latent_sites(probes[0])
    mapped = any(site["infer"].get("is_auxiliary") for site in sites.values())
    for name, site in sites.items():
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


def _traced(guide: PyroModel, call: ModelCall, samples: int, probe: poutine.Trace) -> tuple[Weights, Tensor]:
    """Trace a guide: all draws at once, as particles, if no site is in a plate or represents another; or one by one."""
    plain = len(latent_sites(probe)) == len(_proper(probe))
    if isinstance(guide, SiteGuide) and plain and not any(s["cond_indep_stack"] for s in _proper(probe).values()):
        with pyro.plate("_draws", samples, dim=-1):
            sites = latent_sites(call.of(poutine.trace(guide).get_trace))
        density = torch.stack([site["fn"].log_prob(site["value"]).double() for site in sites.values()]).sum(0)
        return {name: site["value"] for name, site in sites.items()}, density
    rows, densities = [], []
    for _ in range(samples):
        trace = call.of(poutine.trace(guide).get_trace)
        logs = [site["fn"].log_prob(site["value"]).double().sum() for site in latent_sites(trace).values()]
        densities.append(torch.stack(logs).sum())
        rows.append({name: site["value"] for name, site in _proper(trace).items()})
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}, torch.stack(densities)
