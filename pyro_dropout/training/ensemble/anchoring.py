"""One member's problem: a network whose priors are moved to the member's anchors, and whose data are perturbed."""

import math
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any

import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.distributions import Normal

from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.generative.model_call import ModelCall
from pyro_dropout.generative.observed_sites import observed_sites
from pyro_dropout.generative.priors import Tempered
from pyro_dropout.generative.process_state import seeded
from pyro_dropout.generative.trial_run import quietly
from pyro_dropout.guides.points import anchor, anchor_seed
from pyro_dropout.mathematics.shapes import base_distribution, keeps_density
from pyro_dropout.mathematics.weight_distribution import LOG_2PI
from pyro_dropout.protocols import Distribution, Trace
from pyro_dropout.training.loss.temperature import Marks, numbers_of, share_of_data

if TYPE_CHECKING:
    from pyro_dropout.guides.base import SiteGuide

# What makes the members' problems differ; every tensor has the members as its first dimension.
#   anchors: by site, how far the anchor is from the prior's mean.
#   data: for Gaussian targets "noise", standard normal numbers, and if their width depends on the weights of the
#   network, "widths", the weight of each target in the width's likelihood; for all others the "weights" of the points.
Problem = dict[str, dict[str, Tensor]]
_TARGETS = "y"  # what a network observes


class Anchoring(Messenger):
    """Moves each prior to an anchor, and adds noise to Gaussian targets, or weights all others.

    The numbers are those of one member in a ``Problem``; a mini-batch has ``rows`` of all data.
    """

    def __init__(
        self, anchors: Mapping[str, Tensor], data: Mapping[str, Tensor], rows: Tensor | None, heat: float = 1.0
    ) -> None:
        super().__init__()
        self._anchors, self._heat = anchors, heat
        self._data = dict(data) if rows is None else {name: value.index_select(0, rows) for name, value in data.items()}

    def _pyro_sample(self, msg: Trace) -> None:
        if site_is_subsample(msg) or (msg["infer"] or {}).get("_deterministic"):
            return
        name, fn = msg["name"], msg["fn"]
        base = base_distribution(fn)
        if name in self._anchors and not msg["is_observed"]:
            prior = dist.Normal(base.loc + self._anchors[name], base.scale, validate_args=False)
            msg["fn"] = prior.to_event(fn.event_dim)
            how = msg["infer"].get("tempered")  # members are draws of the posterior, and points elsewhere its mode
            msg["infer"] = {**msg["infer"], "tempered": how and Tempered(self._heat, how.anchored)}
        elif name == _TARGETS and "noise" in self._data:
            made: Any = PerturbedNormal(base.loc, base.scale, self._data["noise"], self._data.get("widths"))
            msg["fn"] = made.to_event(fn.event_dim)
        elif name == _TARGETS:
            msg["scale"] = msg["scale"] * self._data["weights"]


class PerturbedNormal(dist.Normal):
    """A Gaussian of a target plus noise of its own width: the mean is trained on the sum, the width on the target.

    A width that is trained on the sum would find its own noise in it and grow without end. Where the network gives the
    width, ``weight`` has a random weight of each target in its likelihood (the Bayesian bootstrap), so that members
    differ in it as the posterior does.
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
        latent = [node for _, node in guide_trace.iter_stochastic_nodes()]
        for node in latent:
            node["value"] = node["value"].detach().requires_grad_()
        with torch.enable_grad():
            trace = some.of(poutine.trace(poutine.replay(call.model, trace=guide_trace)).get_trace)
        observed = observed_sites(trace)
        if list(observed) != [_TARGETS] or len(observed[_TARGETS]["fn"].batch_shape) != 1:
            raise PyroDropoutError(
                f"anchored members need a network that observes {_TARGETS!r} alone, one value for each data point; this"
                f" one observes {', '.join(map(repr, observed)) or 'nothing'}. Use Ensemble(..., anchored=False)."
            )
        value, p = observed[_TARGETS]["value"], base_distribution(observed[_TARGETS]["fn"])
        # Here: gradients need the buffers of the run, which are restored in place.
        wide = _depends(p, [node["value"] for node in latent])
    shape = torch.Size([count, *observed[_TARGETS]["fn"].shape()[1:]])
    rows: list[Problem] = []
    device = next(template.parameters()).device
    for seed in seeds:
        with seeded(anchor_seed(seed), device):
            own, data = anchor(template), dict[str, Tensor]()
            if keeps_density(p, Normal):
                data["noise"] = math.sqrt(heat) * torch.randn(shape, dtype=value.dtype)
                if wide:
                    data["widths"] = _weights(shape, heat).to(call.dtype)
            else:
                data["weights"] = _weights(shape[:1], heat).to(call.dtype)
        rows.append({"anchors": own, "data": data})
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
    if not keeps_density(p, Normal) or not p.scale.requires_grad:
        return False
    slopes = torch.autograd.grad(p.scale.sum(), latent, allow_unused=True, retain_graph=True)
    return any(slope is not None and bool((slope != 0).any()) for slope in slopes)
