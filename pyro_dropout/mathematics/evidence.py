"""The evidence of a Laplace approximation, as a function of the noise and of prior widths (MacKay 1992).

Everything is in closed form once the point and the curvature there are known. With another precision τ' of Gaussian
noise the curvature is H τ'/τ, and the log-likelihood changes by what its normaliser and its squares do.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from pyro_dropout.mathematics.curvature import Curvature
from pyro_dropout.mathematics.errors import PyroDropoutError

F64 = torch.float64
NOISE = "tau"  # the name of the noise among what is found, beside the sites


def log_evidence(curvature: Curvature, point: Mapping[str, Tensor], logs: Mapping[str, Tensor] | None = None) -> Tensor:
    """Return log p(D) ≈ log p(y | w) + log p(w) + n/2 log 2π - ½ log det(H + P), in float64.

    Equation: laplace-evidence.

    Args:
        curvature: at the point.
        point: w by site.
        logs: by how much to change the log precisions: of the noise ("tau") and of the prior of some sites; with
            gradients.

    Example:
        >>> import torch
        >>> from pyro_dropout.mathematics.curvature import Curvature, Dense
        >>> from pyro_dropout.mathematics.evidence import log_evidence
        >>> block = Dense({"w": torch.Size([1])}, {"w": torch.ones(1)}, hessian=torch.tensor([[3.0]]))
        >>> log_evidence(Curvature([block], torch.tensor(-7.0), 10), {"w": torch.zeros(1)}).item() # -7 - ½ log 4
        -7.693147180559945
    """
    logs = logs or {}
    likelihood, log_ratio = curvature.log_likelihood, logs.get(NOISE)
    if log_ratio is not None:
        numbers, squares = _noise(curvature)
        likelihood = likelihood + 0.5 * (numbers * log_ratio - torch.expm1(log_ratio) * squares)
    precisions = precisions_of(curvature, logs)
    prior = [0.5 * (p.log() - p * point[name].to(F64).square()).sum() for name, p in precisions.items()]
    if log_ratio is None:
        log_det = curvature.log_det(precisions)
    else:  # log det(rH + P) = n log r + log det(H + P/r)
        size = sum(block.size() for block in curvature)
        log_det = size * log_ratio + curvature.log_det({n: p * torch.exp(-log_ratio) for n, p in precisions.items()})
    return likelihood + torch.stack(prior).sum() - 0.5 * log_det


def _noise(curvature: Curvature) -> tuple[Tensor, Tensor]:
    """Return how many numbers the targets have, and Σ τ(y - f)²."""
    if curvature.numbers is None or curvature.squares is None:
        raise PyroDropoutError("the likelihood has no precision tau; only the widths of the prior can be changed.")
    return curvature.numbers, curvature.squares


def precisions_of(curvature: Curvature, logs: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return the prior's precisions by site, each of the site's shape, with their logs changed by ``logs``."""
    logs = logs or {}
    found = {name: value for block in curvature for name, value in block.by_site().items()}
    return {name: value * logs[name].exp() if name in logs else value for name, value in found.items()}
