"""The low-rank or mean-field Gaussian that is nearest to another guide's, in closed form: where training can start.

Of p = N(m, Λ⁻¹), the nearest N(m, diag D) in KL(q‖p) has D = 1/diag Λ: what varies while all other weights are held,
not the wider marginals. Of all q = N(m, s √D(I + AAᵀ)√D) with a number s, the nearest has the R eigenvectors of √D Λ √D
with the smallest eigenvalues c as the columns of A, the directions in which p is widest; it is as wide as p there, and
elsewhere 1/s is the mean of the other eigenvalues. With all directions it is p itself.
"""

from typing import Any

import torch
from torch.nn.functional import pad

import pyro_dropout as pdrop


def nearest_gaussian(guide: Any, rank: int = 0, model: Any = None) -> Any:
    """Return the nearest low-rank Gaussian of the whole network, or mean field if ``rank`` is 0, with the same mean."""
    model = guide.model if model is None else model
    made: Any = pdrop.AutoLowRank(model, rank, "net", init=guide) if rank else pdrop.AutoMeanField(model, init=guide)
    means = guide.mean()
    sizes = [mean.numel() for mean in means.values()]
    like = next(iter(means.values()))
    by_site = torch.eye(sum(sizes), dtype=like.dtype, device=like.device).split(sizes, -1)
    rows = {name: part.reshape(-1, *means[name].shape) for name, part in zip(means, by_site, strict=True)}
    root = guide.covariance_root(rows).double()
    precision = torch.cholesky_inverse(torch.linalg.cholesky(root @ root.mT))
    width = precision.diagonal().rsqrt()
    values, vectors = torch.linalg.eigh(width.unsqueeze(-1) * precision * width)
    values, most = values.clamp_min(torch.finfo(values.dtype).eps), min(rank, len(values))
    rest = values[most:].mean() if most < len(values) else values[-1]  # 1/s
    lengths = (rest / values[:most] - 1).clamp_min(0).sqrt()
    found = {"log_scale": (width * rest.rsqrt()).log()}
    if rank:
        found["factor"] = pad(vectors[:, :most] * lengths, (0, rank - most))
    parameters = dict(made.named_parameters())
    with torch.no_grad():
        for key, whole in found.items():
            for name, part in zip(means, whole.split(sizes), strict=True):
                place = parameters[f"states.{name.replace('.', '/')}.{key}"]
                place.copy_(part.reshape(place.shape))
    return made
