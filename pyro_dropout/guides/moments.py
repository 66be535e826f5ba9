"""The covariance of a guide's weights, as a factor: R Σ Rᵀ = root rootᵀ for rows R, such as those of a Jacobian.

Σ itself has as many rows and columns as there are weights, and is never formed. A root is linear in its rows, and its
columns mean the same whatever the rows are: roots of the same sites can be stacked, and then hold the covariances
between all of their rows.
"""

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from pyro_dropout.errors import PyroDropoutError, ShapeError
from pyro_dropout.guides.sites import GuideSite
from pyro_dropout.mathematics.row_mixture_distribution import RowMixture
from pyro_dropout.mathematics.shapes import base_distribution
from pyro_dropout.protocols import Distribution


def check_rows(site: GuideSite, rows: Tensor) -> None:
    """Raise unless a site is real-valued and in no plate, and ``rows`` are (B, *shape)."""
    if not site.plain:
        why = "in a plate" if site.plates else "constrained"
        raise PyroDropoutError(
            f"the covariance of site {site.name!r} is not known: it is {why}. Linearised predictions are for"
            " real-valued weights outside all plates; use method='mc'."
        )
    if rows.shape[1:] != site.start.shape:
        raise ShapeError(
            f"rows of {site.name!r} must have shape (B, *site), here (B, {', '.join(map(str, site.start.shape))});"
            f" got {tuple(rows.shape)}."
        )


def site_root(site: GuideSite, q: Distribution, rows: Tensor) -> Tensor:
    """Return root, (B, K), with root rootᵀ = rows Cov[w] rowsᵀ for the weights of one site with the distribution q."""
    if isinstance(q, RowMixture):
        return torch.cat(mixture_roots(q, rows), -1)
    base = base_distribution(q)
    flat = rows.flatten(1)
    if isinstance(base, MultivariateNormal) and q.event_shape == base.event_shape and not q.batch_shape:
        return flat @ base.scale_tril.to(rows)
    try:
        width: Tensor | None = None if base.event_shape else q.stddev.to(rows)
    except (NotImplementedError, AttributeError):
        width = None
    if width is None or not bool(torch.isfinite(width).all()):
        raise PyroDropoutError(
            f"the covariance of site {site.name!r} is not known: it has the distribution {type(base).__name__}. It must"
            " be a RowMixture, a MultivariateNormal, or independent numbers with a finite variance; otherwise use"
            " method='mc'."
        )
    return flat * width.flatten()


def mixture_roots(q: RowMixture, rows: Tensor) -> list[Tensor]:
    """Return the parts of a row mixture's root: within components, diagonal and by V, and between their means.

    The rows of a weight are independent, and Cov[w_r] = Σ_l π_rl (diag σ_l² + V_l V_lᵀ + (m_l - m)(m_l - m)ᵀ).
    """
    by_row, probs = q.to_rows(rows), q.probs.mT  # (B, R, rest) and (L, R)
    found = []
    if not q.noiseless:
        variance = (q.per_row(probs) * q.scale.square()).sum(0)
        found.append((rows * variance.sqrt()).flatten(1))
    if q.cov_factor is not None:
        # One V that all components share needs its columns once: the probabilities sum to 1.
        shared = len(q.cov_factor) == 1
        factor = q.cov_factor if shared else q.cov_factor * probs.sqrt()[..., None, None]
        found.append(torch.einsum("brk,lrkq->brlq", by_row, factor).flatten(1))
    if q.components > 1:
        apart = q.to_rows(q.locs - q.mean) * probs.sqrt().unsqueeze(-1)
        found.append(torch.einsum("brk,lrk->brl", by_row, apart).flatten(1))
    return found or [rows.new_zeros(len(rows), 0)]
