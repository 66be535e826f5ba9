"""Ways to put a posterior's weights into a model: a draw for each data point, whole functions, and the mean.

Each has ``begin()``, called before all draws are taken; ``draw(count, x)``, the weights that are held for a while; and
``outputs(weights, x, count)``, the model's outputs (count, N, D) with them. With a draw for each data point nothing is
held: masks are drawn inside the forward pass.
"""

from typing import Any

import torch
from pyro import poutine
from pyro.distributions import Delta
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_dropout.generative.model_call import ModelCall
from pyro_dropout.guides.concrete import ConcreteMixture
from pyro_dropout.mathematics.checks import describe
from pyro_dropout.mathematics.distributions import BernoulliMixture
from pyro_dropout.mathematics.errors import PyroDropoutError, ShapeError
from pyro_dropout.mathematics.per_data_point import drawn_per_data_point
from pyro_dropout.protocols import FunctionPosterior, HasMean, Model, Posterior
from pyro_dropout.training.loss.per_example import per_example

Weights = dict[str, Tensor]

# Draws of one forward pass that flip the signs of one noise tensor share its magnitude; many passes average it out.
_PASSES_WITH_FLIPS = 256
# Numbers in all weights that are held at once: 256 MiB in float32.
_MOST_NUMBERS = 2**26


def latent_draws(posterior: Any, count: int, call: ModelCall) -> Weights:
    """Return ``count`` draws of all latent sites of a posterior, {site: (count, ...)}.

    Args:
        posterior: a guide, or anything with ``sample_weights(n)``.
        count: how many draws.
        call: the arguments that a guide is called with.
    """
    if isinstance(posterior, Posterior):
        weights: Weights = posterior.sample_weights(count)
        return weights
    with _unseen():
        traces = [_random(call.of(poutine.trace(posterior).get_trace)) for _ in range(count)]
    return {name: torch.stack([trace[name]["value"] for trace in traces]) for name in traces[0]}


class PerExample:
    """Separate weights for every pair of a draw and a data point: draws are repeated points of one forward pass."""

    def __init__(self, model: Any, posterior: Any) -> None:
        if not callable(posterior):
            raise PyroDropoutError(
                f"posterior must be a guide, or what nuts, conjugate or gp_posterior give; got {describe(posterior)}."
            )
        self.model, self.posterior = model, posterior
        self._flips = False

    def begin(self) -> None:
        """Do nothing: no preparation is needed."""

    def draw(self, count: int, x: Tensor) -> Weights:
        """Return nothing: these weights are drawn inside the forward pass."""
        return {}

    def outputs(self, weights: Weights, x: Tensor, count: int) -> Tensor:
        """Run the model on ``count`` copies of x."""
        rows = x.repeat(count, *[1] * (x.dim() - 1))
        with _unseen(), per_example():
            with _CoinFlips():
                trace = poutine.trace(self.posterior).get_trace(rows)
            self._check_all_drawn(trace)
            with _NothingFromThePrior():
                f = poutine.replay(self.model, trace=trace)(rows)
        drawn = (drawn_per_data_point(site.get("value")) for site in trace.nodes.values())
        self._flips = self._flips or any(recipe is not None and recipe._noise is not None for recipe in drawn)
        return _checked(f, len(rows)).reshape(count, len(x), -1)

    def most(self, samples: int, like: Tensor) -> int:
        """Return how many draws one forward pass may have."""
        return max(1, samples // _PASSES_WITH_FLIPS) if self._flips else samples

    def _check_all_drawn(self, trace: Any) -> None:
        for name, site in _random(trace).items():
            if not isinstance(site["fn"], Delta) and drawn_per_data_point(site["value"]) is None:
                raise PyroDropoutError(
                    f"site {name!r} of the posterior ({type(site['fn']).__name__}) is drawn once for all data points,"
                    " not for each: only weights with a distribution of this package, real-valued and in no plate, can"
                    " be."
                )


class WholeFunctions:
    """Weights that all data points share, so that one draw is one function."""

    def __init__(self, model: Any, posterior: Any) -> None:
        known = callable(posterior) or isinstance(posterior, (Posterior, FunctionPosterior))
        if not known:
            raise PyroDropoutError(
                f"posterior must be a guide, or what nuts, conjugate or gp_posterior give; got {describe(posterior)}."
            )
        self.model, self.posterior = model, posterior

    def begin(self) -> None:
        """Do nothing: no preparation is needed."""

    def draw(self, count: int, x: Tensor) -> Weights:
        """Return ``count`` draws of all weights."""
        return latent_draws(self.posterior, count, ModelCall(self.model, (x,)))

    def outputs(self, weights: Weights, x: Tensor, count: int) -> Tensor:
        """Run the model once for each draw; networks run all of them at once."""
        if isinstance(self.model, Model) and set(weights) == set(self.model.sites):
            f = self.model.evaluate(weights, x)
            return _checked(f, len(x)).reshape(count, len(x), -1)
        with _unseen(), _NothingFromThePrior():
            each = [poutine.condition(self.model, data={k: w[t] for k, w in weights.items()}) for t in range(count)]
            return torch.stack([_checked(run(x), len(x)) for run in each])

    def most(self, samples: int, like: Tensor) -> int:
        """Return how many draws may be held at once."""
        size = sum(value.numel() for value in self.draw(1, like).values())
        return max(1, min(samples, _MOST_NUMBERS // max(1, size)))


class MeanWeights(WholeFunctions):
    """The one function with the posterior's mean weights: "standard" dropout at test time."""

    def draw(self, count: int, x: Tensor) -> Weights:
        """Return E[w], as one draw."""
        if not isinstance(self.posterior, HasMean):
            raise PyroDropoutError(
                f"method='standard' takes E[w] from posterior.mean(), but {type(self.posterior).__name__} has none; use"
                " method='mc'."
            )
        return {name: value.unsqueeze(0) for name, value in self.posterior.mean().items()}


class KeptDraws(WholeFunctions):
    """The draws of a sampled posterior, each used once before any is repeated, whatever the blocks are."""

    def __init__(self, model: Any, posterior: Any, samples: int) -> None:
        super().__init__(model, posterior)
        self._samples = samples
        self._left: Tensor | None = None

    def begin(self) -> None:
        """Shuffle the draws, for a new pass."""
        self._left = self.posterior.order(self._samples)

    def draw(self, count: int, x: Tensor) -> Weights:
        """Return the next ``count`` draws; before a pass has begun, any."""
        if self._left is None:
            return super().draw(count, x)
        numbers, self._left = self._left[:count], self._left[count:]
        weights: Weights = self.posterior.draws_at(numbers)
        return weights


class FunctionDraws(WholeFunctions):
    """Functions from a posterior without weights, such as a Gaussian process."""

    def draw(self, count: int, x: Tensor) -> Weights:
        """Return nothing: there are no weights."""
        return {}

    def outputs(self, weights: Weights, x: Tensor, count: int) -> Tensor:
        """Return functions at all of x together."""
        f = self.posterior.sample_functions(x, count)
        return _checked(f, len(x)).reshape(count, len(x), -1)


class _CoinFlips(Messenger):
    """Gives concrete dropout its exact coin flips: relaxed ones are for training."""

    def _pyro_sample(self, msg: Any) -> None:
        q = msg["fn"]
        if isinstance(q, ConcreteMixture):
            msg["fn"] = BernoulliMixture(q.loc, q.keep, 0.0, q.row_dim, validate_args=False)


class _NothingFromThePrior(Messenger):
    """Skips the draw of ``y``, which is not needed here, and raises if a weight would come from the prior."""

    def _pyro_sample(self, msg: Any) -> None:
        if msg["is_observed"] or msg["done"] or site_is_subsample(msg):
            return
        if msg["name"] == "y":
            msg["value"], msg["done"] = torch.zeros(msg["fn"].shape()), True
        # Sites in the plate "data" are drawn by the model at new points.
        elif not any(frame.name == "data" for frame in msg["cond_indep_stack"]):
            raise PyroDropoutError(
                f"the posterior has no site {msg['name']!r}, which the model samples: is it for this model?"
            )


def _unseen() -> Any:
    """Hide draws from outer handlers; parameters stay visible to them."""
    return poutine.block(expose_types=["param"])


def _random(trace: Any) -> dict[str, Any]:
    """Return the latent sites of a guide's trace."""
    return {
        name: site
        for name, site in trace.nodes.items()
        if site["type"] == "sample" and not site["is_observed"] and not site_is_subsample(site)
    }


def _checked(f: Any, count: int) -> Tensor:
    """Return the outputs if they have one row for each data point."""
    if not isinstance(f, Tensor):
        raise ShapeError(f"model must return its outputs f, a tensor (N, D); it returned {type(f).__name__}.")
    if f.dim() < 2 or f.shape[-2] != count:
        raise ShapeError(f"model must return its outputs f, (N, D) with N = {count}; got shape {tuple(f.shape)}.")
    return f
