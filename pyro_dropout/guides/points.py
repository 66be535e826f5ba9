"""Points: one value for every latent variable, so that training finds the maximum a posteriori; and their anchors.

The members of an anchored ensemble are pulled to anchors, each a draw from the prior.

Points have no maximum to find where the width of a prior is itself a latent variable, as in hierarchical models. With
θ_k ~ N(μ, τ²) for K groups, the joint density has the factor τ^(-K). It grows without bound where τ goes to zero and
all θ_k to μ, whatever the data are, so the most probable point says nothing about the posterior.
"""

from typing import Any

import pyro.distributions as dist
import torch
from pyro import poutine
from torch import Tensor
from torch.distributions import MultivariateNormal, Normal, biject_to

from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.generative.random_state import forked, seeded
from pyro_dropout.guides.base import GuideSite, Init, InitLoc, SiteGuide, trained
from pyro_dropout.mathematics.shapes import base_distribution
from pyro_dropout.protocols import Distribution, PyroModel, Trace

_ROUNDING = 1e-3  # of a slope, for a relative change of the other site; that of a width is about its number of elements


def dependent_width(
    model: PyroModel, prototype: Trace, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[str, str] | None:
    """Return a latent site whose prior's width depends on another latent site, and that one; None if there is none.

    A draw that moves along with its prior keeps its density if only the location changes. Widths are those in
    unconstrained space; ``prototype`` is a trace of the model.
    """
    sites = {name: site for name, site in prototype.iter_stochastic_nodes() if site["value"].is_floating_point()}
    values = {name: site["value"].detach().clone().requires_grad_() for name, site in sites.items()}
    with forked(), torch.enable_grad(), poutine.block():
        trace = poutine.trace(poutine.condition(model, data=values)).get_trace(*args, **kwargs)
        for name in values:
            fn: Distribution = trace.nodes[name]["fn"]
            if not fn.has_rsample:
                continue
            value, to = fn.rsample(), biject_to(fn.support)
            density: Tensor = fn.log_prob(value).sum() + to.log_abs_det_jacobian(to.inv(value), value).sum()
            others = {other: value for other, value in values.items() if other != name}
            if not density.requires_grad or not others:
                continue
            slopes = torch.autograd.grad(density, list(others.values()), allow_unused=True, retain_graph=True)
            for other, slope in zip(others, slopes, strict=True):
                if slope is not None and bool((slope * others[other].abs().clamp(min=1.0)).abs().max() > _ROUNDING):
                    return name, other
    return None


class Points(SiteGuide):
    """A point for every site; its ELBO is log p(y, w) up to a constant. The members of an ``Ensemble`` by default.

    Args:
        model: any Pyro model with continuous sites.
        init: where the points start: "module", "paper", a function of name and shape, or a fitted guide or a dict of
            weights.
        init_loc_fn: where all sites start, as in Pyro's guides, such as ``init_to_median``.
    """

    def __init__(self, model: PyroModel, *, init: Init = "module", init_loc_fn: InitLoc | None = None) -> None:
        super().__init__(model, bias="map", other="map", init=init, init_loc_fn=init_loc_fn)
        self._start()

    def _setup_prototype(self, *args: object, **kwargs: object) -> None:
        super()._setup_prototype(*args, **kwargs)
        if hasattr(self.model, "sample_sites"):
            return  # a network, whose priors are fixed
        found = dependent_width(self.model, self.prototype_trace, args, kwargs)
        if found is not None:
            self.prototype_trace = None
            site, other = found
            raise PyroDropoutError(
                f"the width of site {site!r} depends on {other!r}, another latent site, so the density of points grows"
                f" without bound where the width is zero. Sample a standard normal and scale it, as in {site} = mu +"
                f" {other} * z (pyro.infer.reparam.LocScaleReparam), or give the ensemble members with a width, such as"
                " AutoMeanField."
            )

    def parameters_of(self, site: GuideSite) -> dict[str, Tensor]:
        """The value itself."""
        return {"loc": trained(site.start)}

    def weight_distribution(self, site: GuideSite, state: Any) -> Any:
        """A point."""
        return dist.Delta(state.loc, event_dim=state.loc.dim())


_DRAWS = 4001  # of a prior that is not Gaussian, for its median in unconstrained space


class Anchors:
    """What the members of an ensemble are pulled to: draws from the prior, told by their distance from its centre.

    Both are in unconstrained space; the centre of a Gaussian is its mean, and of any other prior the median.
    """

    def __init__(self, template: SiteGuide) -> None:
        self.sites = template._sites
        self.priors = {name: whole_prior(template, name) for name in self.sites}
        self.device = next(site.start.device for site in self.sites.values())
        with seeded(0, self.device):
            self.centres = {name: _centre(p) for name, p in self.priors.items()}

    def drawn(self) -> dict[str, Tensor]:
        """Draw how far the anchors of one member are from the centres, with torch's generator."""
        found: dict[str, Tensor] = {}
        for name, p in self.priors.items():
            base = base_distribution(p)
            if not isinstance(base, Normal | MultivariateNormal):
                found[name] = biject_to(p.support).inv(p.sample()) - self.centres[name]
                continue
            # on the CPU: the same on every device
            r = torch.randn(p.batch_shape + p.event_shape, dtype=self.sites[name].start.dtype, device="cpu")
            r = r.to(self.device)
            if isinstance(base, MultivariateNormal):
                found[name] = (base._unbroadcasted_scale_tril @ r.unsqueeze(-1)).squeeze(-1)
            else:
                found[name] = base.scale * r
        return found

    def starts(self, seeds: list[int]) -> list[dict[str, Tensor]]:
        """Return the parameters of points that are at their anchors, for each seed."""
        rows = []
        for seed in seeds:
            with seeded(anchor_seed(seed), self.device):
                drawn = self.drawn()
            own = ((site, self.centres[name] + drawn[name]) for name, site in self.sites.items())
            rows.append({f"states.{site.key}.loc": at.reshape(site.start.shape).to(site.start) for site, at in own})
        return rows


def whole_prior(template: SiteGuide, name: str) -> Distribution:
    """Return the prior of a site, its plates at full size, as it was when the guide read the model."""
    site = template._sites[name]
    fn = template.prototype_trace.nodes[name]["fn"]
    lead = site.start.shape[: site.start.dim() - site.free_dim]
    return fn if fn.batch_shape == lead or not site.plates else fn.expand(lead)


def _centre(p: Distribution) -> Tensor:
    gaussian = isinstance(base_distribution(p), Normal | MultivariateNormal)
    found: Tensor = p.mean if gaussian else biject_to(p.support).inv(p.sample((_DRAWS,))).median(0).values
    return found.detach()


def anchor_seed(seed: int) -> int:
    """Return the seed of a member's anchors and perturbed data; its own is that of its fresh start."""
    return seed ^ 1
