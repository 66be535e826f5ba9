"""Which distributions a guide can sample a site from; those of torch as distributions of Pyro.

A distribution of Pyro can be called in a sample statement and put into plates.
"""

import copy

from pyro.distributions import Delta
from pyro.distributions import Distribution as PyroDistribution
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor
from torch.distributions import Distribution as TorchDistribution
from torch.distributions import register_kl

from pyro_dropout.guides.sites import GuideSite
from pyro_dropout.mathematics.checks import describe
from pyro_dropout.mathematics.errors import PyroDropoutError
from pyro_dropout.mathematics.scored import Scored
from pyro_dropout.protocols import Distribution, SiteDistribution

_CONVERTED: dict[type, type] = {}  # a class of torch, and the one that also has Pyro's methods


class Image(Delta):
    """A draw mapped from unconstrained space; its divergence from the prior includes the log-determinant term."""


@register_kl(Image, PyroDistribution)  # type: ignore[untyped-decorator]
def _kl_image(q: Image, p: Distribution) -> Tensor:
    log_density: Tensor = q.log_density - p.log_prob(q.v)  # Pyro's KL of a Delta leaves log_density out
    return log_density


def pyro_distribution(q: Distribution) -> Distribution:
    """Return a distribution of torch as one of Pyro, with the same parameters; anything else as it is.

    Example:
        >>> import torch
        >>> q = pyro_distribution(torch.distributions.Independent(torch.distributions.Normal(torch.zeros(3), 1.0), 1))
        >>> q().shape, isinstance(q, torch.distributions.Independent)
        (torch.Size([3]), True)
    """
    if not isinstance(q, TorchDistribution) or isinstance(q, TorchDistributionMixin):
        return q
    converted, kind = copy.copy(q), type(q)
    if kind not in _CONVERTED:
        _CONVERTED[kind] = type(kind.__name__, (kind, TorchDistributionMixin), {"__module__": kind.__module__})
    converted.__class__ = _CONVERTED[kind]
    return converted


def check_distribution(q: object, site: GuideSite, guide: str) -> None:
    """Raise an error unless a guide can sample a site from q: see ``protocols.SiteDistribution``."""
    if not isinstance(q, SiteDistribution):
        raise PyroDropoutError(
            f"{guide} must give a distribution of Pyro or torch for {site.name!r}; it gave {describe(q)}, of type"
            f" {type(q).__module__}.{type(q).__qualname__}."
        )
    shape, event = q.batch_shape + q.event_shape, site.start.dim() if site.plain else site.free_dim
    if shape != site.start.shape or (len(q.event_shape) != event and not hasattr(q, "joint")):
        raise PyroDropoutError(
            f"{guide} must give {site.name!r} a distribution of shape {tuple(site.start.shape)} whose last {event}"
            f" dimensions are its event; it gave {type(q).__name__} with batch {tuple(q.batch_shape)} and event"
            f" {tuple(q.event_shape)}. Write .to_event({event})."
        )
    if not q.has_rsample and not isinstance(q, (Delta, Scored)):
        raise PyroDropoutError(
            f"{guide} gives {site.name!r} a {type(q).__name__}, whose draws have no gradient (rsample); training would"
            " not move it."
        )
