"""The covariance of a guide's weights, as a factor: R Σ Rᵀ = root rootᵀ for rows R, such as those of a Jacobian.

Σ itself has as many rows and columns as there are weights, and is never formed. A root is linear in its rows, and its
columns mean the same whatever the rows are: roots of the same sites can be stacked, and then hold the covariances
between all of their rows.

The Gaussian of a simple family that is nearest to another guide's is in closed form. Of p = N(m, Λ⁻¹), the nearest
N(m, diag D) in KL(q‖p) has D = 1/diag Λ: what varies while all other weights are held, not the wider marginals. Of all
q = N(m, s √D(I + AAᵀ)√D) with a number s, the nearest has the R eigenvectors of √D Λ √D with the smallest eigenvalues c
as the columns of A, the directions in which p is widest; it is as wide as p there, and elsewhere 1/s is the mean of the
other eigenvalues. With all directions it is p itself.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal
from torch.nn.functional import pad

from pyro_dropout.guides.sites import GuideSite
from pyro_dropout.mathematics.checks import describe
from pyro_dropout.mathematics.errors import PyroDropoutError, ShapeError
from pyro_dropout.mathematics.row_mixture_distribution import RowMixture
from pyro_dropout.mathematics.shapes import base_distribution
from pyro_dropout.protocols import Distribution, HasMoments, PyroModel


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


if TYPE_CHECKING:
    from pyro_dropout.guides.base import SiteGuide

MOST = 8192  # numbers of a covariance matrix that is formed


def model_of(guide: object, model: PyroModel | None) -> PyroModel:
    """Return ``model``, or else the model of a guide."""
    found = getattr(guide, "model", None) if model is None else model
    if not callable(found):
        raise PyroDropoutError(f"guide must be a fitted guide with a covariance; got {describe(guide)}.")
    return cast(PyroModel, found)


def nearest_to(guide: HasMoments, rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return √D of each site, and A, (numbers of the site, rank), for the Gaussian that is nearest to a guide's."""
    means = guide.mean()
    sizes = [mean.numel() for mean in means.values()]
    total, like = sum(sizes), next(iter(means.values()))
    if total > MOST:
        raise PyroDropoutError(
            f"the nearest Gaussian needs the covariance matrix of all {total:,} weights; the most is {MOST:,}. Start"
            " from a trajectory of SGD (swag), or from the mean alone (init=guide)."
        )
    by_site = torch.eye(total, dtype=like.dtype, device=like.device).split(sizes, -1)
    rows = {name: part.reshape(total, *means[name].shape) for name, part in zip(means, by_site, strict=True)}
    root = guide.covariance_root(rows).double()
    for name, part in zip(means, root.split(sizes), strict=True):
        if not bool(part.square().sum(-1).min() > 0):
            raise PyroDropoutError(
                f"site {name!r} is a point in {type(guide).__name__}, and a Gaussian near a point has no width. Take a"
                " guide with a width at every site, such as laplace(..., structure='kron')."
            )
    try:
        precision = torch.cholesky_inverse(torch.linalg.cholesky(root @ root.mT))
    except RuntimeError:  # torch's LinAlgError
        raise PyroDropoutError("the covariance of the guide is singular: some weights follow from others.") from None
    width = precision.diagonal().rsqrt()
    values, vectors = torch.linalg.eigh(width.unsqueeze(-1) * precision * width)
    values, most = values.clamp_min(torch.finfo(values.dtype).eps), min(rank, total)
    rest = values[most:].mean() if most < total else values[-1]  # 1/s
    lengths = (rest / values[:most] - 1).clamp_min(0).sqrt()
    columns = pad(vectors[:, :most] * lengths, (0, rank - most)).to(like)
    widths = dict(zip(means, (width * rest.rsqrt()).to(like).split(sizes), strict=True))
    return widths, dict(zip(means, columns.split(sizes), strict=True))


def set_state(guide: "SiteGuide", **tensors: Mapping[str, Tensor]) -> None:
    """Set parameters of a guide's sites, by their name and by site."""
    with torch.no_grad():
        for key, by_site in tensors.items():
            for name, value in by_site.items():
                place = getattr(guide._state(guide._sites[name]), key)
                place.copy_(value.reshape(place.shape))
