"""One draw of a guide, the model run with it, and the resulting terms of the loss."""

import math
from itertools import zip_longest
from typing import Any

import torch
from pyro import poutine
from pyro.distributions import Delta
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.generative.observed_sites import check_observed
from pyro_dropout.generative.priors import LearnedNormal
from pyro_dropout.mathematics.divergence import Method
from pyro_dropout.mathematics.shapes import base_distribution
from pyro_dropout.protocols import Message, PyroModel, Trace
from pyro_dropout.training.loss.learned_widths import with_best_width
from pyro_dropout.training.loss.row_tracking import Args, Kwargs, tensors_in
from pyro_dropout.training.loss.site_terms import Watch, auxiliary, divergence, observed, of_draw
from pyro_dropout.training.loss.temperature import Marks, is_point, numbers_of, share_of_data

_FREE = "_unconstrained"  # the suffix that guides add to a site's name for its draw


class Particle(Messenger):
    """The terms of the loss at one draw.

    A divergence is computed as soon as the model has sampled its site, before the forward pass, and so after it in the
    backward pass: its gradients are computed when the tensors of the forward pass are gone, not on top of them.
    """

    model_trace: Trace  # the model's run with the draw

    def __init__(self, guide_trace: Trace, kl: Method, kl_samples: int) -> None:
        super().__init__()
        self.guide_trace = guide_trace
        self.divergences: dict[str, Tensor] = {}  # of latent and auxiliary sites
        self.surprises: dict[str, Tensor] = {}  # of observed sites
        self._kl, self._kl_samples, self._marks = kl, kl_samples, Marks()
        self._sites = _samples(guide_trace)
        self._places = {name: place for place, name in enumerate(self._sites)}
        self._latest = -1  # the position in the guide of the latest site that the model has sampled
        sites = self._sites.values()
        for site in sites:
            _check_not_enumerated(site)
            _check_differentiable(site)
        self._watch = Watch(site["value"] for site in sites)  # for priors that are made from draws

    def run(self, model: PyroModel, args: Args, kwargs: Kwargs) -> None:
        """Run the model with the draw."""
        with self._watch, self:
            replayed = poutine.replay(self._marks(model), trace=self.guide_trace)
            self.model_trace = poutine.trace(replayed).get_trace(*args, **kwargs)

    def add_up(self) -> None:
        """Compute the terms of observed sites, and of sites that only the guide has."""
        seen = {name: site for name, site in _samples(self.model_trace).items() if site["is_observed"]}
        self.surprises |= {name: observed(site) for name, site in seen.items()}
        for name, site in self._sites.items():
            if name in self.model_trace.nodes:
                continue
            if not site["infer"].get("is_auxiliary"):
                raise PyroDropoutError(
                    f"the model has no site {name!r}, which the guide samples. Mark it with"
                    " infer={'is_auxiliary': True} if that is intended."
                )
            self.divergences[name] = auxiliary(site)

    def temperatures(self) -> dict[str, float]:
        """Return the factor on each divergence that the model's priors ask for; those of 1 are left out."""
        times = {name: site["infer"].get("penalty", 1.0) for name, site in self._sites.items()}
        marks = {name: how for name, how in self._marks.of.items() if times.get(name) != math.inf}
        if not marks:
            return {}
        own = {name: site["fn"] for name, site in self._sites.items() if not site["infer"].get("is_auxiliary")}
        points = {name for name, q in own.items() if is_point(q) and not self._is_image(name)}
        numbers, found = numbers_of(q for name, q in own.items() if name not in points), {}
        for name in self.divergences:
            if name in marks:
                found[name] = (
                    marks[name].of_point(times[name]) if name in points else share_of_data(marks[name], numbers)
                )
            elif name not in self.model_trace.nodes and any(self._is_image(each) for each in marks):  # log q of these
                found[name] = share_of_data(next(iter(marks.values())), numbers)
        return {name: factor for name, factor in found.items() if factor != 1.0}

    def _pyro_post_sample(self, msg: Message) -> None:
        if not _has_density(msg):
            return
        name = msg["name"]
        q_site = self.guide_trace.nodes.get(name)
        if msg["is_observed"]:
            if q_site is not None and not _is_deterministic(q_site):
                does, instead = "samples", "Remove it from the guide."
                if q_site["is_observed"]:  # as guides do that run the model, such as Pyro's AutoNormalMessenger
                    does, instead = "observes", "Train it with pyro.infer.SVI(..., loss=pyro.infer.Trace_ELBO())."
                raise PyroDropoutError(f"the guide {does} {name!r}, which the model observes. {instead}")
            check_observed([msg])
            return
        _check_not_enumerated(msg)
        if q_site is None:
            raise PyroDropoutError(
                f"the guide has no site {name!r}, which the model samples. Sample it in the guide, or condition the"
                " model on it."
            )
        _check_shapes(msg, q_site)
        self.divergences[name] = self._divergence(q_site, msg)
        self._watch.on = len(self.divergences) < len(self._places)

    def _divergence(self, q_site: Message, p_site: Message) -> Tensor:
        if isinstance(base_distribution(p_site["fn"]), LearnedNormal):
            p_site = with_best_width(q_site, p_site)
        place = self._places[p_site["name"]]
        # The model samples this site after one that the guide draws later: that one may have been made from this draw.
        late, self._latest = place < self._latest, max(place, self._latest)
        learned = self._watch.moves(tensors_in((p_site["fn"],)))
        apart = learned and (late or getattr(q_site["fn"], "joint", False))
        if isinstance(q_site["fn"], Delta) and self._is_image(p_site["name"]):
            return of_draw(q_site, p_site)
        return divergence(q_site, p_site, self._kl, self._kl_samples, apart=apart, learned=learned)

    def _is_image(self, name: str) -> bool:
        """Whether a point of the guide is a mapped draw: of a draw that has its name, or that has no site's name."""
        draws = [each for each, site in self._sites.items() if site["infer"].get("is_auxiliary")]
        others = {f"{each}{_FREE}" for each in self._sites if each != name}
        return any(each not in others for each in draws)


def _samples(trace: Trace) -> dict[str, Message]:
    """Return the sites of a trace that have a density."""
    return {name: site for name, site in trace.nodes.items() if _has_density(site)}


def _has_density(site: Any) -> bool:
    return site["type"] == "sample" and not site_is_subsample(site) and not _is_deterministic(site)


def _check_shapes(p_site: Message, q_site: Message) -> None:
    """Raise an error if a site has different shapes in model and guide: broadcasting would hide it."""
    p, q = p_site["fn"], q_site["fn"]
    if not hasattr(p, "event_shape") or not hasattr(q, "event_shape"):
        return
    shapes = p.batch_shape + p.event_shape, q.batch_shape + q.event_shape
    if any(ours != theirs for ours, theirs in zip_longest(*map(reversed, shapes), fillvalue=1)):
        raise PyroDropoutError(
            f"site {p_site['name']!r} has shape {tuple(shapes[0])} in the model and {tuple(shapes[1])} in the guide."
            " Give both the same plates."
        )


def _is_deterministic(site: Message) -> bool:
    return bool(site["infer"] and site["infer"].get("_deterministic"))


def _check_differentiable(site: Message) -> None:
    """Raise an error if a draw has no gradient in parameters that are trained, such as a label in its probability."""
    q = site["fn"]
    if isinstance(q, Delta) or getattr(q, "has_rsample", False) or not torch.is_grad_enabled():
        return
    if q.log_prob(site["value"]).requires_grad:
        raise PyroDropoutError(
            f"the guide draws {site['name']!r} from {type(q).__name__}, and such a draw has no gradient in the"
            " parameters of its distribution. Train it with pyro.infer.SVI(..., loss=pyro.infer.TraceGraph_ELBO())."
        )


def _check_not_enumerated(site: Message) -> None:
    if site["infer"].get("enumerate") and not site["is_observed"]:
        raise PyroDropoutError(
            f"site {site['name']!r} is marked for enumeration, but pyro_dropout.ELBO draws every site. Use"
            " pyro.infer.TraceEnum_ELBO, or remove infer={'enumerate': ...}."
        )
