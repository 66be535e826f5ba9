"""Anchors: where the members of an anchored ensemble are pulled to, each a draw from the prior.

The anchor of a Gaussian prior N(μ, σ²) is a standard normal number r for every element, which stands for μ + σr. Any
other prior has the distance of a draw from its median, in unconstrained space.
"""

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal, Normal, biject_to

from pyro_dropout.generative.random_state import seeded
from pyro_dropout.guides.base import SiteGuide
from pyro_dropout.mathematics.base_distribution import base_distribution
from pyro_dropout.protocols import Distribution

_DRAWS = 4001  # of a prior that is not Gaussian, for its median in unconstrained space


def is_gaussian(p: Distribution) -> bool:
    """Whether a distribution is Gaussian."""
    return isinstance(base_distribution(p), Normal | MultivariateNormal)


def gaussian_at(p: Distribution, numbers: Tensor) -> Tensor:
    """Return μ + σr (with a full covariance, μ + Lr) of a Gaussian distribution."""
    base = base_distribution(p)
    if isinstance(base, MultivariateNormal):
        found: Tensor = base.loc + (base._unbroadcasted_scale_tril @ numbers.unsqueeze(-1)).squeeze(-1)
    else:
        found = base.loc + base.scale * numbers
    return found


def prior_of(template: SiteGuide, name: str) -> Distribution:
    """Return the prior of a site, its plates at full size, as it was when the guide read the model."""
    site = template._sites[name]
    fn = template.prototype_trace.nodes[name]["fn"]
    lead = site.start.shape[: site.start.dim() - site.free_dim]
    return fn if fn.batch_shape == lead or not site.plates else fn.expand(lead)


def centres(template: SiteGuide) -> dict[str, Tensor | None]:
    """Return the median of each prior in unconstrained space; None for a Gaussian, which needs none."""
    found: dict[str, Tensor | None] = {}
    for name in template._sites:
        fn = prior_of(template, name)
        with seeded(0, template._sites[name].start.device):
            found[name] = None if is_gaussian(fn) else _free(fn, fn.sample((_DRAWS,))).median(0).values
    return found


def anchors(template: SiteGuide, middles: dict[str, Tensor | None]) -> dict[str, Tensor]:
    """Draw the anchors of one member by site, on the CPU, with torch's generator.

    Args:
        template: a guide that has read the model.
        middles: what ``centres`` returns.
    """
    found: dict[str, Tensor] = {}
    for name, centre in middles.items():
        fn = prior_of(template, name)
        if centre is None:
            like = template._sites[name].start
            found[name] = torch.randn(fn.batch_shape + fn.event_shape, dtype=like.dtype)
        else:
            found[name] = (_free(fn, fn.sample()) - centre).cpu()
    return found


def anchored_start(template: SiteGuide, middles: dict[str, Tensor | None], seed: int) -> dict[str, Tensor]:
    """Return the anchors of the member of this seed as values in unconstrained space, by site."""
    device = next(site.start.device for site in template._sites.values())
    with seeded(anchor_seed(seed), device):
        drawn = anchors(template, middles)
    found: dict[str, Tensor] = {}
    for name, centre in middles.items():
        fn, anchor = prior_of(template, name), drawn[name].to(device)
        found[name] = gaussian_at(fn, anchor) if centre is None else centre + anchor
    return found


def anchor_seed(seed: int) -> int:
    """Return the seed of a member's anchors and perturbed data; its own is that of its fresh start."""
    return seed ^ 1


def _free(fn: Distribution, value: Tensor) -> Tensor:
    found: Tensor = biject_to(fn.support).inv(value)
    return found
