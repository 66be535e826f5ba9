"""The Gaussian of a simple family that is nearest to another guide's, in closed form: where training can start.

Of p = N(m, Λ⁻¹), the nearest N(m, diag D) in KL(q‖p) has D = 1/diag Λ: what varies while all other weights are held,
not the wider marginals. Of all q = N(m, s √D(I + AAᵀ)√D) with a number s, the nearest has the R eigenvectors of √D Λ √D
with the smallest eigenvalues c as the columns of A, the directions in which p is widest; it is as wide as p there, and
elsewhere 1/s is the mean of the other eigenvalues. With all directions it is p itself.
"""

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.guides.base import SiteGuide
from pyro_dropout.mathematics.checks import describe
from pyro_dropout.protocols import HasMoments, PyroModel

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


def set_state(guide: SiteGuide, **tensors: Mapping[str, Tensor]) -> None:
    """Set parameters of a guide's sites, by their name and by site."""
    with torch.no_grad():
        for key, by_site in tensors.items():
            for name, value in by_site.items():
                place = getattr(guide._state(guide._sites[name]), key)
                place.copy_(value.reshape(place.shape))
