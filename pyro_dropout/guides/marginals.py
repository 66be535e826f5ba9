"""Queries of a trained guide: the distribution of one site, means, covariances, draws, medians and quantiles.

Any Pyro distribution works: quantiles come from its ``icdf`` where it has one, and where each element of the site is
an increasing function of one number; otherwise, as of a simplex, from draws. Covariances come as a factor,
R Σ Rᵀ = root rootᵀ for rows R, such as those of a Jacobian: Σ itself has as many rows and columns as there are weights,
and is never formed. A root is linear in its rows, and its columns mean the same whatever the rows are: roots of the
same sites can be stacked, and then hold the covariances between all of their rows.
"""

import contextlib
from abc import abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np
import pyro.distributions as dist
import torch
from pyro.infer.autoguide import AutoGuide
from torch import Tensor
from torch.distributions import TransformedDistribution

from pyro_dropout.errors import PyroDropoutError, ShapeError
from pyro_dropout.generative.process_state import forked, one_at_a_time
from pyro_dropout.guides.sites import GuideSite
from pyro_dropout.mathematics.checks import check_count, check_level
from pyro_dropout.mathematics.full_rank_normal import SharedNoise, joint_root
from pyro_dropout.mathematics.shapes import base_distribution
from pyro_dropout.protocols import Distribution, Trace

_MONTE_CARLO = "Linearised predictions need covariances of real-valued weights outside all plates; use method='mc'."
_DRAWS = 10_000  # for quantiles where there is no formula


class Marginals(AutoGuide):
    """A guide that describes the posterior of each site; ``SiteGuide`` provides the sites."""

    _sites: dict[str, GuideSite]
    prototype_trace: Trace

    @abstractmethod
    def _distribution(self, site: GuideSite, noise: SharedNoise | None = None) -> Distribution: ...

    @abstractmethod
    def _tell(self) -> None: ...

    @abstractmethod
    def _shared(self) -> dict[str, SharedNoise]: ...

    def _marginal(self, site: GuideSite) -> Distribution:
        """Return q of one site by itself, as it was learned."""
        return self._distribution(site)

    def _asked(self, site: GuideSite, noise: SharedNoise | None) -> Distribution:
        """Return q of a site as the queries of all sites together need it."""
        return self._marginal(site) if noise is None else self._distribution(site, noise)

    def _known(self) -> list[GuideSite]:
        """Return all sites, with their parameters told to Pyro."""
        if self.prototype_trace is None:
            raise PyroDropoutError(
                f"{type(self).__name__} has not seen its model's sites yet: call it once with the model's arguments, or"
                " fit it, first."
            )
        self._tell()
        return list(self._sites.values())

    @one_at_a_time
    def posterior(self, name: str) -> Distribution:
        """Return the posterior distribution of one site."""
        sites = {site.name: site for site in self._known()}
        if name not in sites:
            raise PyroDropoutError(f"{name!r} is not a site of this guide; the sites are {', '.join(sites)}.")
        site, q = sites[name], self._marginal(sites[name])
        if site.transform is None:
            return q
        if isinstance(q, dist.Delta):
            return dist.Delta(site.image(q.v), event_dim=site.event_dim)
        return TransformedDistribution(q, [site.transform])

    @one_at_a_time
    def random_sites(self) -> list[str]:
        """Return the names of the sites that are not points."""
        return [site.name for site in self._known() if not isinstance(self._marginal(site), dist.Delta)]

    @one_at_a_time
    def mean(self) -> dict[str, Tensor]:
        """Return E[w] of every site; of a constrained site, the image of the mean in unconstrained space."""
        with torch.no_grad():
            return {site.name: site.image(self._marginal(site).mean.clone()) for site in self._known()}

    @one_at_a_time
    def covariance_root(self, rows: Mapping[str, Tensor]) -> Tensor:
        """Return root, (B, K), with root rootᵀ = R Cov[w] Rᵀ for B rows R over the weights; exact, and linear in R.

        Args:
            rows: {site: (B, *shape)}, of real-valued sites outside all plates; sites that are absent have rows of zero.
        """
        sites = {site.name: site for site in self._known()}
        for name, value in rows.items():
            if name not in sites or value.shape[1:] != sites[name].start.shape:
                known = ", ".join(f"{each} {tuple(site.start.shape)}" for each, site in sites.items())
                raise ShapeError(f"rows must be (B, *shape) of sites, {known}; got {name!r}, {tuple(value.shape)}.")
            if not sites[name].plain:
                why = "in a plate" if sites[name].plates else "constrained"
                raise PyroDropoutError(f"the covariance of site {name!r} is not known: it is {why}. {_MONTE_CARLO}")
        with torch.no_grad():
            noises = self._shared()
            asked = {name: self._asked(sites[name], noises.get(name)) for name in rows}
            return joint_root(
                [(_site_root(sites[name], asked[name], value), noises.get(name)) for name, value in rows.items()]
            )

    @one_at_a_time
    def sample_weights(self, n: int) -> dict[str, Tensor]:
        """Draw ``n`` times from the posterior: {name: (n, ...)}."""
        check_count("n", n)
        with torch.no_grad():
            sites = self._known()
            if not sites:
                raise PyroDropoutError("the model has no latent site, so there is nothing to draw; run the model.")
            shared = self._shared()
            drawn = [self._asked(site, shared.get(site.name)).sample((n,)).clone() for site in sites]
            return {site.name: site.image(value) for site, value in zip(sites, drawn, strict=True)}

    def median(self, *args: object, **kwargs: object) -> dict[str, Tensor]:
        """Return the posterior median of every element of every site."""
        return {name: values[0] for name, values in self.quantiles([0.5], *args, **kwargs).items()}

    @one_at_a_time
    def quantiles(self, quantiles: Sequence[float] | Tensor, *args: object, **kwargs: object) -> dict[str, Tensor]:
        """Return quantiles of every element of every site: {name: (len(quantiles), ...)}."""
        levels = [float(level) for level in quantiles]
        for level in levels:
            check_level("quantiles", level)
        if self.prototype_trace is None and (args or kwargs):
            self._setup_prototype(*args, **kwargs)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            return {site.name: torch.stack(_quantiles(site, self._marginal(site), levels)) for site in self._known()}


def _quantiles(site: GuideSite, q: Distribution, levels: list[float]) -> list[Tensor]:
    """Return quantiles of every element of a site whose distribution in unconstrained space is q."""
    if isinstance(q, dist.Delta):
        return [site.image(q.v) for _ in levels]
    base = base_distribution(q)
    like: Tensor = base.sample()
    if site.increasing:
        with contextlib.suppress(NotImplementedError):
            return [site.image(base.icdf(like.new_full((), level)).expand(like.shape)) for level in levels]
    with forked():
        draws = site.image(q.sample((_DRAWS,)))
    found = np.quantile(draws.double().cpu().numpy(), levels, axis=0)
    return list(torch.as_tensor(found).to(draws))


def _site_root(site: GuideSite, q: Distribution, rows: Tensor) -> Tensor:
    """Return root, (B, K), with root rootᵀ = rows Cov[w] rowsᵀ for the weights of one site with the distribution q."""
    if isinstance(q, dist.Delta):
        return rows.new_zeros(len(rows), 0)
    if hasattr(q, "covariance_root"):
        found: Tensor = q.covariance_root(rows)
        return found
    base = base_distribution(q)
    try:
        width: Tensor | None = None if base.event_shape else q.stddev.to(rows)
    except (NotImplementedError, AttributeError):
        width = None
    if width is None or not bool(torch.isfinite(width).all()):
        raise PyroDropoutError(
            f"the covariance of site {site.name!r} is not known: it has the distribution {type(base).__name__}, with no"
            f" covariance_root(rows), and not independent numbers with a finite variance. {_MONTE_CARLO}"
        )
    return rows.flatten(1) * width.flatten()
