"""Predictions of any Pyro model: the sites that the posterior does not have, at each draw of those that it has."""

from collections.abc import Iterator

import torch
from pyro.distributions import Delta
from torch import Tensor
from tqdm.auto import tqdm

from pyro_dropout.generative.model_call import ModelCall
from pyro_dropout.generative.observed_sites import (
    full_distribution,
    holds_data,
    no_sites,
    sample_sites,
    trace_of,
)
from pyro_dropout.generative.random_state import seeded
from pyro_dropout.generative.trial_run import evaluating
from pyro_dropout.mathematics.checks import describe
from pyro_dropout.mathematics.errors import PyroDropoutError
from pyro_dropout.prediction.draws.weight_draws import MOST_NUMBERS, MeanWeights, latent_draws
from pyro_dropout.prediction.moments import Running, Sums, moments_of
from pyro_dropout.prediction.predict_network import Request
from pyro_dropout.prediction.site_prediction import SitePrediction
from pyro_dropout.protocols import Distribution, HasDraws, Message, Weights
from pyro_dropout.training.fit import place_of

_DRAWS = 64  # of a site at each draw, where its distribution has no moments in closed form


def predict_sites(call: ModelCall, posterior: object, asked: Request) -> SitePrediction | dict[str, SitePrediction]:
    """Return predictions of the sites that the posterior does not have: one, or several by name.

    A single site that is random has those of ``pyro.deterministic`` beside it, as ``answer["name"]``.

    Args:
        call: the model and its arguments; if they include data, the sites that hold the data are predicted.
        posterior: a guide, or draws.
        asked: the options. What may be kept is each draw's distribution and a sample of it.
    """
    samples = asked.samples
    if not callable(call.model):
        raise PyroDropoutError(f"model must be a Pyro model, a function or a module; got {describe(call.model)}.")
    device = place_of([call.model, posterior], call)
    call = call.with_num_data(only_if_needed=True).to(device)
    call.check_bound()
    found: dict[str, _Tally] = {}
    bar = tqdm(total=samples, disable=not asked.progress, unit="draw", desc="predict")
    with seeded(asked.seed, device), evaluating(call.model, posterior), bar:
        for t, drawn in enumerate(_draws(call, posterior, asked)):
            sites = _asked(call, {name: value.to(device) for name, value in drawn.items()})
            if t == 0:
                keeps = asked.keeps(samples * sum(site["value"].numel() for site in sites.values()))
                found = {name: _Tally(name, keeps) for name in sites}
            if set(sites) != set(found):
                raise PyroDropoutError(
                    f"the model samples different sites at different draws: {', '.join(found)} at first, and then"
                    f" {', '.join(sites)}. It must always sample the same ones."
                )
            for name, site in sites.items():
                found[name].add(t, site)
            bar.update()
    answers = {name: tally.prediction(samples) for name, tally in found.items()}
    random = [name for name, tally in found.items() if not tally.fixed]
    if len(random) != 1:
        return answers if len(answers) > 1 else next(iter(answers.values()))
    only = answers.pop(random[0])
    only.deterministic = answers
    return only


def _draws(call: ModelCall, posterior: object, asked: Request) -> Iterator[Weights]:
    """Yield draws of the latent sites, one at a time; they are made in batches."""
    if asked.method == "standard":
        yield from _one_by_one(MeanWeights(call.model, posterior).draw(1, torch.zeros(())))
    elif isinstance(posterior, HasDraws):  # each used once before any is repeated
        numbers = posterior.order(asked.samples)
        size = sum(value.numel() for value in posterior.draws_at(numbers[:1]).values())
        for some in numbers.split(max(1, MOST_NUMBERS // max(1, size))):
            yield from _one_by_one(posterior.draws_at(some))
    else:
        left, together = asked.samples, 1
        while left:
            weights = latent_draws(posterior, min(together, left), call)
            left -= min(together, left)
            together = max(1, MOST_NUMBERS // max(1, sum(value[0].numel() for value in weights.values())))
            yield from _one_by_one(weights)


def _one_by_one(weights: Weights) -> Iterator[Weights]:
    for t in range(len(next(iter(weights.values())))):
        yield {name: value[t] for name, value in weights.items()}


def _asked(call: ModelCall, draw: Weights) -> dict[str, Message]:
    """Run the model at a draw, and return its sites that the posterior does not have."""
    sites = sample_sites(trace_of(call, draw))
    if not sites:
        raise PyroDropoutError(no_sites(call.model))
    known = [name for name in sites if name in draw]
    if not known:
        raise PyroDropoutError(
            f"the model samples none of the posterior's sites, {', '.join(draw)}; is it the posterior of this model?"
        )
    asked = {
        name: site
        for name, site in sites.items()
        if name not in draw and (holds_data(site) or site["infer"].get("_deterministic"))
    }
    if not asked:
        raise PyroDropoutError(
            f"the posterior has all sites of the model, {', '.join(known)}, so there is nothing to predict: a guide"
            " must be called with the data, so that it does not sample them."
        )
    return asked


class _Tally:
    """The prediction of one site from the draws so far."""

    def __init__(self, name: str, keep: bool) -> None:
        self.name, self.keep = name, keep
        self.kind: Distribution = None
        self.estimated = self.fixed = False
        self.running = Running(0)
        self.parts: list[Distribution] = []
        self.values: list[Tensor] = []

    def add(self, t: int, site: Message) -> None:
        """Add the site's distribution at draw ``t``."""
        self.fixed = bool(site["infer"].get("_deterministic"))
        p = Delta(site["value"], event_dim=site["fn"].event_dim) if self.fixed else full_distribution(site)
        if t == 0:
            self.kind = p
        self.running.add(t, 1, ..., self._moments(p))
        if self.keep:
            self.parts.append(p)
            # Later sites of this draw were made from the drawn value.
            self.values.append(p.sample() if site["is_observed"] else site["value"])

    def _moments(self, p: Distribution) -> Sums:
        if not self.estimated:
            try:
                found = moments_of(p)
                return {**found, "spread": torch.zeros_like(found["mean"])}
            except (NotImplementedError, AttributeError):
                self.estimated = True
        drawn = p.sample((_DRAWS,)).double()
        mean, noise = drawn.mean(0), drawn.var(0)
        # The spread of such means includes some of the noise, which is subtracted.
        return {"mean": mean, "noise": noise, "spread": -noise / _DRAWS}

    def prediction(self, samples: int) -> SitePrediction:
        """Return the prediction of all draws."""
        sums = self.running.sums
        sums["spread"] = sums["spread"].clamp_min(0)
        parts, values = (self.parts, torch.stack(self.values)) if self.keep else (None, None)
        return SitePrediction(self.name, self.kind, sums, samples, parts, values)
