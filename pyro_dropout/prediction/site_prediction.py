"""A prediction of one site of a Pyro model: the mixture of the site's distributions over draws.

A Pyro model that is not a network gives a site's distribution at each draw of its latent sites, and these are kept.
Results have the shape of the site: its points, as its plates lay them out, and then the numbers of one point.
"""

import functools
import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from pyro_dropout.errors import NotAvailableError, PyroDropoutError, RangeError, ShapeError
from pyro_dropout.generative.likelihoods.moments import (
    F64,
    Points,
    Running,
    Sums,
    base_of,
    is_class,
    is_normal,
    moments_of,
)
from pyro_dropout.generative.model_call import ModelCall
from pyro_dropout.generative.observed_sites import (
    check_whole,
    full_distribution,
    holds_data,
    no_sites,
    sample_sites,
    trace_of,
)
from pyro_dropout.generative.process_state import seeded
from pyro_dropout.generative.trial_run import evaluating
from pyro_dropout.mathematics.checks import check_dense, check_level, describe
from pyro_dropout.prediction.predict_network import Request, keeps
from pyro_dropout.prediction.prediction import Prediction
from pyro_dropout.prediction.tails import Tails, is_whole, log_tails, mixed
from pyro_dropout.prediction.weight_draws import MOST_NUMBERS, whole_functions
from pyro_dropout.protocols import Distribution, Message, Weights
from pyro_dropout.training.fit import place_of


class SitePrediction(Prediction):
    """The prediction of a Pyro model and its posterior for one site; made by ``predict``, with all of ``Prediction``.

    Args:
        site: the site's name.
        kind: its distribution at some draw.
        sums: over all draws, for each element of the site.
        count: how many draws.
        parts: the site's distribution at each draw, if kept.
        samples: a value of the site drawn with each draw, (T, ...), if kept.

    Attributes:
        site: the site's name.

    Example:
        >>> import pyro, torch, pyro.distributions as dist, pyro_dropout as pdrop
        >>> def model(x, y=None):
        ...     slope, sigma = pyro.sample("slope", dist.Normal(0.0, 1.0)), pyro.sample("sigma", dist.HalfNormal(1.0))
        ...     with pyro.plate("data", len(x)):
        ...         pyro.sample("obs", dist.Normal(slope * x, sigma), obs=y)
        >>> x = torch.linspace(-1, 1, 5)
        >>> guide = pyro.infer.autoguide.AutoNormal(model)
        >>> _ = pdrop.fit(model, guide, x, 2 * x, steps=10, compile=False, progress=False)
        >>> answer = pdrop.predict(model, guide, x, samples=100, seed=0)
        >>> answer
        SitePrediction('obs', shape (5,), 100 draws, Normal, samples kept)
        >>> answer.mean.shape, answer.log_prob(2 * x).shape, answer.interval(0.9)[0].shape
        (torch.Size([5]), torch.Size([5]), torch.Size([5]))
    """

    likelihood: Distribution

    def __init__(
        self,
        site: str,
        kind: Distribution,
        sums: Sums,
        count: int,
        parts: list[Distribution] | None,
        samples: Tensor | None,
    ) -> None:
        tensors = [value for value in vars(base_of(kind)).values() if isinstance(value, Tensor)]
        like = next((value for value in tensors if value.is_floating_point()), torch.zeros(())).new_zeros(())
        super().__init__(kind, sums, count, like, samples)
        self.site, self._each = site, parts

    def __repr__(self) -> str:
        kept = "samples kept" if self._samples is not None else "samples not kept"
        shape = tuple(self.likelihood.shape())
        return f"SitePrediction({self.site!r}, shape {shape}, {self._count} draws, {self.family}, {kept})"

    @property
    def family(self) -> str:
        """The name of the site's distribution, for messages."""
        return type(self.target_distribution).__name__

    @property
    def target_distribution(self) -> Distribution:
        """p(y | w), without the dimensions of its event."""
        return base_of(self.likelihood)

    @property
    def parts(self) -> list[Distribution]:
        """The site's distribution at each draw, T of them."""
        if self._each is None:
            raise NotAvailableError("the draws were not kept; call predict(..., keep_samples=True).")
        return self._each

    def _covariance(self) -> Tensor:
        """Raise: numbers of a site may depend on each other in ways of their own."""
        raise NotAvailableError("covariance is for networks; of a site take torch.cov of answer.samples at each point.")

    def log_prob(self, y: Tensor) -> Tensor:
        """Return log p(y) ≈ logsumexp_t log p(y | w_t) - log T of each point of the site."""
        y = self.checked_targets(y)
        found: Tensor = functools.reduce(torch.logaddexp, (p.log_prob(y).to(F64) for p in self.parts))
        return (found - math.log(self._count)).to(self.like)

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Return the ends of the central interval that holds each element of the site with probability ``level``.

        With normal noise they are quantiles of the mixture of normals, and otherwise those of the samples.
        """
        if is_normal(self.target_distribution):
            return super().interval(level)
        check_level("level", level)
        self.check_kind("interval()", "numbers")
        ends = np.quantile(self.samples.double().cpu().numpy(), [(1 - level) / 2, (1 + level) / 2], axis=0)
        low, high = torch.from_numpy(ends).to(self.like)
        return low, high

    def _has_moments(self) -> bool:
        """Whether its kind is one that has a mean and a variance, whatever its parameters."""
        kind = self.target_distribution
        return is_normal(kind) or is_class(kind) or is_whole(kind)

    # --- the draws, all points in one piece ---------------------------------------------------------------------------

    def distribution_at(self, points: Points) -> Distribution | None:
        """Return the distributions of all draws as one, (T, ...), if they are normal; others are not stacked."""
        if not is_normal(self.target_distribution):
            return None
        bases = [base_of(p) for p in self.parts]
        loc, scale = (torch.stack([getattr(p, name) for p in bases]) for name in ("loc", "scale"))
        return torch.distributions.Normal(loc, scale, validate_args=False)

    def tails_at(self, points: Points, y: Tensor) -> Tails:
        """Return log P(Y ≤ y) and log P(Y ≥ y) under the mixture of the draws."""
        below, above = zip(*(log_tails(p, y) for p in self.parts), strict=True)
        return mixed(torch.stack(below)), mixed(torch.stack(above))

    def draw_targets(self, points: Points) -> Tensor:
        """Return a y drawn with each draw; all points are one piece."""
        return self.samples

    def pieces(self) -> Iterator[Points]:
        """Yield all points in one piece."""
        yield ...

    def per_point(self, each: Tensor) -> Tensor:
        """Return values of single numbers, added up for each point."""
        return each.sum(list(range(-self.likelihood.event_dim, 0))) if self.likelihood.event_dim else each

    def checked_targets(self, y: Tensor) -> Tensor:
        """Return ``y`` as the site's distribution expects it; raise if it is not valid."""
        check_dense("y", y)
        wanted = tuple(self.likelihood.shape())
        if not isinstance(y, Tensor) or tuple(y.shape) != wanted:
            given = tuple(y.shape) if isinstance(y, Tensor) else f"{type(y).__name__} {y!r}"
            raise ShapeError(f"y must be a tensor of the shape of site {self.site!r}, {wanted}; got {given}.")
        y = y.to(self.like.device)
        y = y.long() if self.one_of_several else y.to(self.like.dtype)
        try:
            inside = self.likelihood.support.check(y)
        except NotImplementedError:  # a distribution without a support
            inside = torch.isfinite(y)
        if not bool(inside.all()):
            raise RangeError(f"y must lie in the support of site {self.site!r}, {self.family}; got {describe(y)}.")
        return y


_DRAWS = 64  # of a site at each draw, where its distribution has no moments in closed form


def predict_sites(call: ModelCall, posterior: object, asked: Request) -> SitePrediction | dict[str, SitePrediction]:
    """Return predictions of the random sites that the posterior does not have: one, or several by name."""
    samples = asked.samples
    device = place_of([call.model, posterior], call)
    call = call.with_num_data(only_if_needed=True).to(device)
    call.check_bound()
    found: dict[str, _Tally] = {}
    bar = tqdm(total=samples, disable=not asked.progress, unit="draw", desc="predict")
    with seeded(asked.seed, device), evaluating(call.model, posterior), bar:
        for t, drawn in enumerate(_draws(call, posterior, asked)):
            sites = _asked(call, {name: value.to(device) for name, value in drawn.items()})
            if t == 0:
                kept = keeps(asked.keep_samples, samples * sum(site["value"].numel() for site in sites.values()))
                found = {name: _Tally(name, kept) for name in sites}
            if set(sites) != set(found):
                raise PyroDropoutError(
                    f"the model samples {', '.join(found)} at one draw and {', '.join(sites)} at another; these must"
                    " be the same sites."
                )
            for name, site in sites.items():
                found[name].add(t, site)
            bar.update()
    answers = {name: tally.prediction(samples) for name, tally in found.items()}
    return answers if len(answers) > 1 else next(iter(answers.values()))


def _draws(call: ModelCall, posterior: object, asked: Request) -> Iterator[Weights]:
    """Yield draws of the latent sites, one at a time; they are made in batches."""
    way = whole_functions(call.model, posterior, asked.method, asked.samples)
    way.begin()
    left, together = asked.samples, 1
    while left:
        weights = way.draw(min(together, left), call)
        count = min(together, left)
        left -= count
        together = max(1, MOST_NUMBERS // max(1, sum(value[0].numel() for value in weights.values())))
        yield from ({name: value[t] for name, value in weights.items()} for t in range(count))


def _asked(call: ModelCall, draw: Weights) -> dict[str, Message]:
    """Run the model at a draw, and return its sites that the posterior does not have."""
    trace = trace_of(call, draw)
    check_whole(trace)  # otherwise the same place would be another point at every draw
    sites = sample_sites(trace)
    if not sites:
        raise PyroDropoutError(no_sites(call.model))
    known = [name for name in sites if name in draw]
    if not known:
        raise PyroDropoutError(f"the model samples none of the posterior's sites, {', '.join(draw)}.")
    asked = {name: site for name, site in sites.items() if name not in draw and holds_data(site)}
    if not asked:
        raise PyroDropoutError(
            f"the posterior has all sites of the model, {', '.join(known)}, so none is left to predict: call the guide"
            " with the data once, so that it does not sample them."
        )
    return asked


class _Tally:
    """The prediction of one site from the draws so far."""

    def __init__(self, name: str, keep: bool) -> None:
        self.name, self.keep = name, keep
        self.kind: Distribution = None
        self.estimated = False
        self.running = Running(0)
        self.parts: list[Distribution] = []
        self.values: list[Tensor] = []

    def add(self, t: int, site: Message) -> None:
        """Add the site's distribution at draw ``t``."""
        p = full_distribution(site)
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
