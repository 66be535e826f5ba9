"""Points: one value for every weight, so that training finds the maximum a posteriori; and their anchors.

The members of an anchored ensemble are pulled to anchors, each a draw from the prior.
"""

from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import Normal

from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.generative.process_state import seeded
from pyro_dropout.guides.base import GuideSite, Init, InitLoc, SiteGuide, trained
from pyro_dropout.mathematics.shapes import base_distribution, keeps_density
from pyro_dropout.protocols import Distribution, PyroModel


class Points(SiteGuide):
    """A point for every site; its ELBO is log p(y, w) up to a constant. The members of an ``Ensemble`` by default.

    Args:
        model: a network.
        init: where the points start: "module", "paper", a function of name and shape, or a fitted guide or a dict of
            weights.
        init_loc_fn: where all sites start, as in Pyro's guides, such as ``init_to_median``.
    """

    def __init__(self, model: PyroModel, *, init: Init = "module", init_loc_fn: InitLoc | None = None) -> None:
        super().__init__(model, bias="map", other="map", init=init, init_loc_fn=init_loc_fn)
        self._start()

    def parameters_of(self, site: GuideSite) -> dict[str, Tensor]:
        """The value itself."""
        return {"loc": trained(site.start)}

    def weight_distribution(self, site: GuideSite, state: Any) -> Any:
        """A point."""
        return dist.Delta(state.loc, event_dim=state.loc.dim())


# --- anchors ----------------------------------------------------------------------------------------------------------


def anchor(template: SiteGuide) -> dict[str, Tensor]:
    """Draw how far the anchors of one member are from the means of the Gaussian priors, with torch's generator."""
    found = {}
    for name, (site, prior) in _priors(template).items():
        # On the CPU: the same numbers on every device.
        noise = torch.randn(prior.batch_shape, dtype=site.start.dtype, device="cpu")
        found[name] = prior.scale * noise.to(site.start.device)
    return found


def at_anchors(template: SiteGuide, seed: int) -> dict[str, Tensor]:
    """Return the parameters of points that are at the anchors of the member with this seed."""
    with seeded(anchor_seed(seed), next(site.start.device for site in template._sites.values())):
        drawn = anchor(template)
    own = ((site, prior.mean + drawn[name]) for name, (site, prior) in _priors(template).items())
    return {f"states.{site.key}.loc": at.reshape(site.start.shape).to(site.start) for site, at in own}


def anchor_seed(seed: int) -> int:
    """Return the seed of a member's anchors and perturbed data; its own is that of its fresh start."""
    return seed ^ 1


def _priors(template: SiteGuide) -> dict[str, tuple[GuideSite, Normal]]:
    found = {}
    for name, site in template._sites.items():
        base = base_distribution(whole_prior(template, name))
        if not keeps_density(base, Normal):
            raise PyroDropoutError(
                f"anchors are drawn from Gaussian priors, and that of {name!r} is a {type(base).__name__}. Use"
                " Ensemble(..., anchored=False)."
            )
        found[name] = site, base
    return found


def whole_prior(template: SiteGuide, name: str) -> Distribution:
    """Return the prior of a site, its plates at full size, as it was when the guide read the model."""
    site = template._sites[name]
    fn = template.prototype_trace.nodes[name]["fn"]
    lead = site.start.shape[: site.start.dim() - site.free_dim]
    return fn if fn.batch_shape == lead or not site.plates else fn.expand(lead)
