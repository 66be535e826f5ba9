"""One member's problem: the model with its priors moved to the member's anchors, and its data perturbed.

A Gaussian prior is moved so that its mean is a draw of it. Any other prior is moved in unconstrained space, by the
distance of a draw from its median: exact for priors that are Gaussian there (LogNormal), and a heuristic elsewhere.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from numbers import Real
from typing import TYPE_CHECKING

import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.distributions.util import sum_rightmost
from pyro.poutine.indep_messenger import CondIndepStackFrame
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.distributions import MultivariateNormal, Normal, biject_to, constraints
from torch.distributions.transforms import AffineTransform

from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.generative.model_call import ModelCall
from pyro_dropout.generative.observed_sites import observed_sites
from pyro_dropout.generative.priors import Tempered
from pyro_dropout.generative.random_state import seeded
from pyro_dropout.generative.trial_run import quietly
from pyro_dropout.guides.points import Anchors, anchor_seed
from pyro_dropout.mathematics.row_mixture_distribution import LOG_2PI
from pyro_dropout.mathematics.shapes import base_distribution
from pyro_dropout.protocols import Distribution, Message, Trace
from pyro_dropout.training.loss.temperature import Marks, numbers_of, share_of_data

if TYPE_CHECKING:
    from pyro_dropout.guides.base import SiteGuide
    from pyro_dropout.guides.ensemble import Ensemble

# What makes the members' problems differ; every tensor has the members as its first dimension.
#   anchors: by latent site, how far the anchor is from the prior's centre, in unconstrained space.
#   noise: by observed Gaussian site, standard normal numbers, one for each of all data.
#   weights: by plate (or site, outside all plates), the weight of each of all its elements.
#   widths: by observed Gaussian site whose width is latent, the weight of each target in the width's likelihood.
Problem = dict[str, dict[str, Tensor]]


class Anchoring(Messenger):
    """Moves each prior to an anchor, adds noise to Gaussian targets, and weights all other data.

    The numbers are those of one member in a ``Problem``; a mini-batch has ``rows`` of all data. The density of ``free``
    sites, which are constrained and points, is that of unconstrained space, where their anchors are.
    """

    def __init__(
        self,
        anchors: Mapping[str, Tensor],
        noise: Mapping[str, Tensor],
        weights: Mapping[str, Tensor],
        widths: Mapping[str, Tensor],
        rows: Tensor | None,
        free: Collection[str] = (),
        heat: float = 1.0,
    ) -> None:
        super().__init__()
        self._anchors, self._noise, self._weights, self._widths = anchors, noise, weights, widths
        self._rows, self._free, self._heat = rows, free, heat
        self._shown: dict[str, Tensor] = {}

    def _pyro_post_sample(self, msg: Trace) -> None:
        if site_is_subsample(msg):
            self._shown[msg["name"]] = msg["value"]

    def _pyro_sample(self, msg: Trace) -> None:
        if site_is_subsample(msg) or (msg["infer"] or {}).get("_deterministic"):
            return
        name, fn = msg["name"], msg["fn"]
        if not msg["is_observed"]:
            if name in self._anchors:
                prior = moved(fn, self._here(self._anchors[name], msg, fn.event_dim, rows=False))
                msg["fn"] = FreeDensity(prior, fn.support) if name in self._free else prior
                how = msg["infer"].get("tempered")  # members are draws of the posterior, and points elsewhere its mode
                msg["infer"] = {**msg["infer"], "tempered": how and Tempered(self._heat, how.anchored)}
        elif name in self._noise:
            own = self._widths.get(name)
            weight = None if own is None else self._here(own, msg, fn.event_dim)
            noise, base = self._here(self._noise[name], msg, fn.event_dim), base_distribution(fn)
            msg["fn"] = _to_event(PerturbedNormal(base.loc, base.scale, noise, weight), fn)
        else:
            plate = next((frame for frame in plates_of(msg) if frame.name in self._weights), None)
            if plate is not None:  # a factor outside all plates of data is part of the prior
                weights = self._weights[plate.name].reshape(-1, *[1] * (-(plate.dim or -1) - 1))
                msg["scale"] = msg["scale"] * self._here(weights, msg, 0)

    def _here(self, values: Tensor, msg: Message, event_dim: int, rows: bool = True) -> Tensor:
        """Return the part of the numbers that belongs to the elements that the plates show now."""
        for frame in plates_of(msg):
            dim = (frame.dim or -1) - event_dim
            if -dim > values.dim() or values.shape[dim] == 1:
                continue
            if (frame.full_size or frame.size) != frame.size:  # a plate that draws its own subsample
                values = values.index_select(dim, self._shown[frame.name].to(values.device))
            elif rows and self._rows is not None and frame.size == len(self._rows):
                values = values.index_select(dim, self._rows)
        if rows and self._rows is not None and not plates_of(msg) and values.shape != msg["fn"].shape():
            values = values[self._rows]  # a site in no plate whose first dimension is the data points
        return values


def plates_of(msg: Message) -> list[CondIndepStackFrame]:
    """Return the plates of a site that are dimensions of its batch, the outermost first."""
    return [frame for frame in msg["cond_indep_stack"] if frame.vectorized]


def moved(p: Distribution, anchor: Tensor) -> Distribution:
    """Return a prior moved to an anchor."""
    base = base_distribution(p)
    if isinstance(base, MultivariateNormal):
        made = dist.MultivariateNormal(base.loc + anchor, scale_tril=base.scale_tril, validate_args=False)
    elif isinstance(base, Normal):
        made = dist.Normal(base.loc + anchor, base.scale, validate_args=False)
    else:
        map_to = biject_to(p.support)
        free = AffineTransform(anchor, 1.0, event_dim=map_to.domain.event_dim)
        return dist.TransformedDistribution(p, [map_to.inv, free, map_to], validate_args=False)
    return _to_event(made, p)


def _to_event(made: Distribution, p: Distribution) -> Distribution:
    """Return a distribution with the event dimensions of another."""
    return made.to_event(p.event_dim - made.event_dim) if p.event_dim > made.event_dim else made


class FreeDensity(dist.TorchDistribution):
    """A distribution whose density is that of its value's image in unconstrained space."""

    arg_constraints: dict[str, constraints.Constraint] = {}  # noqa: RUF012 - torch reads a class attribute

    def __init__(self, p: Distribution, support: constraints.Constraint) -> None:
        super().__init__(p.batch_shape, p.event_shape, validate_args=False)
        self.p, self._support = p, support

    @constraints.dependent_property(is_discrete=False)
    def support(self) -> constraints.Constraint:
        """That of the prior: a distribution that is moved in unconstrained space may not know it."""
        return self._support

    def log_prob(self, value: Tensor) -> Tensor:
        """Return log p(T(u)) + log |dT/du| at u = T⁻¹(value)."""
        map_to = biject_to(self._support)
        volume = map_to.log_abs_det_jacobian(map_to.inv(value), value)
        found: Tensor = self.p.log_prob(value) + sum_rightmost(volume, volume.dim() - len(self.batch_shape))
        return found


class PerturbedNormal(dist.Normal):
    """A Gaussian of a target plus noise of its own width: the mean is trained on the sum, the width on the target.

    A width that is trained on the sum would find its own noise in it and grow without end. Where the width is latent,
    ``weight`` has a random weight of each target in its likelihood (the Bayesian bootstrap), so that members differ in
    it as the posterior does.
    """

    def __init__(self, loc: Tensor, scale: Tensor, noise: Tensor, weight: Tensor | None = None) -> None:
        super().__init__(loc, scale, validate_args=False)
        self.noise, self.weight = noise, weight

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density of value + width · noise; its gradient in the width is that at the value itself."""
        width = self.scale.detach()
        miss = (value + width * self.noise - self.loc) / width
        found: Tensor = -0.5 * miss.square() - width.log() - 0.5 * LOG_2PI
        if self.scale.requires_grad:
            own = -self.scale.log() - 0.5 * ((value - self.loc.detach()) / self.scale).square()
            own = own if self.weight is None else self.weight * own
            found = found + own - own.detach()
        return found


def free_points(ensemble: "Ensemble") -> frozenset[str]:
    """Return the constrained sites that a member has as points."""
    guide = ensemble.template
    with torch.no_grad():
        return frozenset(
            site.name
            for site in guide._sites.values()
            if site.transform is not None and isinstance(guide.posterior(site.name), dist.Delta)
        )


# --- drawing it -------------------------------------------------------------------------------------------------------


def temperature_of(loss: object, template: "SiteGuide", call: ModelCall, batch: int) -> float:
    """Return T of the posterior that the members of an anchored ensemble are draws of.

    That is the factor on the KL in their loss, which the prior may ask for. Under a schedule it is 1.
    """
    asked = getattr(loss, "temperature", 1.0)
    if asked != "auto":
        return float(asked) if isinstance(asked, Real) else 1.0
    marks, call = Marks(), call.at(slice(0, batch)) if batch < (call.count or 1) else call
    with quietly(call.model, template), poutine.block(), torch.no_grad():
        drawn = call.of(poutine.trace(template).get_trace)
        call.of(poutine.trace(poutine.replay(marks(call.model), trace=drawn)).get_trace)
    numbers = numbers_of(drawn.nodes[name]["fn"] for name in marks.of)
    return min([1.0, *(share_of_data(Tempered(1.0, how.anchored), numbers) for how in marks.of.values())])


def perturbation(
    template: "SiteGuide", seeds: Iterable[int], call: ModelCall, batch: int, heat: float = 1.0
) -> Problem:
    """Draw the anchors and the perturbed data of all members, each from its own seed.

    A posterior at the temperature T is that of data with a noise of √T times the width: what is drawn around the data
    has that width, and what is drawn from the prior is as wide as ever.
    """
    count = call.count or 1
    some = call.at(slice(0, batch)) if batch < count else call
    with quietly(call.model, template), poutine.block():
        with torch.no_grad():
            guide_trace = some.of(poutine.trace(template).get_trace)
            anchors = Anchors(template)
        latent = [node for _, node in guide_trace.iter_stochastic_nodes() if node["value"].is_floating_point()]
        for node in latent:
            node["value"] = node["value"].detach().requires_grad_()
        with torch.enable_grad():
            trace = some.of(poutine.trace(poutine.replay(call.model, trace=guide_trace)).get_trace)
        observed = observed_sites(trace)
        # Here: gradients need the buffers of the run, which are restored in place.
        wide = [name for name, site in observed.items() if _depends(site["fn"], [node["value"] for node in latent])]
    if not observed:
        raise PyroDropoutError("the model observes nothing with these arguments, so there is nothing to train on.")
    for name, site in observed.items():
        _check_plates(name, site, batch, count)
    noisy = {name: site for name, site in observed.items() if isinstance(base_distribution(site["fn"]), Normal)}
    shapes = {name: _whole(site, batch, count) for name, site in noisy.items()}
    sizes = dict(_elements(name, site, batch, count) for name, site in observed.items() if name not in noisy)
    rows = []
    device = next(template.parameters()).device
    for seed in seeds:
        with seeded(anchor_seed(seed), device):
            own = anchors.drawn()
            kinds = {name: observed[name]["value"].dtype for name in shapes}
            noise = {name: math.sqrt(heat) * torch.randn(shape, dtype=kinds[name]) for name, shape in shapes.items()}
            weights = {key: _weights(torch.Size([size]), heat).to(call.dtype) for key, size in sizes.items()}
            widths = {name: _weights(shape, heat).to(call.dtype) for name, shape in shapes.items() if name in wide}
        rows.append({"anchors": own, "noise": noise, "weights": weights, "widths": widths})
    return {
        part: {name: torch.stack([row[part][name] for row in rows]).to(device) for name in own}
        for part, own in rows[0].items()
    }


def _weights(shape: torch.Size, heat: float) -> Tensor:
    """Draw weights of the Bayesian bootstrap, whose mean is one, and their variance times ``heat``."""
    drawn = torch.empty(shape, dtype=torch.float64).exponential_()
    return 1 + math.sqrt(heat) * (drawn / drawn.mean() - 1)


def _depends(p: Distribution, latent: list[Tensor]) -> bool:
    """Whether this is a Gaussian whose width depends on latent values."""
    base = base_distribution(p)
    if not isinstance(base, Normal) or not base.scale.requires_grad:
        return False
    slopes = torch.autograd.grad(base.scale.sum(), latent, allow_unused=True, retain_graph=True)
    return any(slope is not None and bool((slope != 0).any()) for slope in slopes)


def _whole(site: Message, batch: int, count: int) -> torch.Size:
    """Return the shape of an observed value in all data."""
    shape = list(site["fn"].shape())
    frames = plates_of(site)
    for frame in frames:
        shape[(frame.dim or -1) - site["fn"].event_dim] = _size(frame, batch, count)
    if not frames and batch < count and shape and shape[0] == batch:
        shape[0] = count
    return torch.Size(shape)


def _size(frame: CondIndepStackFrame, batch: int, count: int) -> int:
    whole = frame.full_size or frame.size
    return int(count if batch < count and whole == batch else whole)


def _elements(name: str, site: Message, batch: int, count: int) -> tuple[str, int]:
    """Return the plate whose elements are the data points of a site that is not Gaussian, and how many there are.

    It is the plate as long as the data; if none is, or several are, the outermost.
    """
    sizes = {plate.name: _size(plate, batch, count) for plate in plates_of(site)}
    if not sizes:
        raise PyroDropoutError(
            f"site {name!r} is no Normal and in no plate, so the data points of an anchored ensemble cannot be told"
            ' apart. Put it in pyro.plate("data", N), or use Ensemble(..., anchored=False).'
        )
    as_long = [plate for plate, size in sizes.items() if size == count]
    plate = as_long[0] if len(as_long) == 1 else next(iter(sizes))
    return plate, sizes[plate]


def _check_plates(name: str, site: Message, batch: int, count: int) -> None:
    """Raise unless it is clear which plate a mini-batch is of: others of its size would lose their own numbers."""
    same = [plate.name for plate in plates_of(site) if plate.size == batch]
    if batch < count and len(same) > 1:
        raise PyroDropoutError(
            f"site {name!r} is in several plates of the size of a mini-batch, {batch} ({', '.join(same)}), so the data"
            " points of an anchored ensemble cannot be told apart. Give another batch_size."
        )
