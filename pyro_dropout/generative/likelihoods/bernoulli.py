"""Yes or no, by the sigmoid of the outputs."""

import pyro.distributions as dist
import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_dropout.errors import RangeError
from pyro_dropout.generative.likelihoods.likelihood import Likelihood, stays
from pyro_dropout.generative.likelihoods.moments import F64, Outputs, Sums, variance_of
from pyro_dropout.mathematics.checks import describe
from pyro_dropout.mathematics.normal import sigmoid_moments
from pyro_dropout.protocols import Distribution
from pyro_dropout.registry import likelihood


class _Coins(Outputs):
    """Yes and no."""

    def moments(self, mean: Tensor, covariance: Tensor) -> Sums:
        exact, std = mean.to(F64), variance_of(covariance).sqrt()
        p, spread, noise, surprise = sigmoid_moments(exact, std)
        votes = torch.where(std > 0, torch.special.ndtr(exact / std), (exact > 0).to(F64))
        return {"mean": p, "spread": spread, "noise": noise, "surprise": surprise, "votes": votes}

    def log_prob(self, mean: Tensor, covariance: Tensor, y: Tensor) -> Tensor:
        found = super().log_prob(mean, covariance, y)
        if mean.shape[-1] > 1:
            return found
        std = covariance[:, 0, 0].sqrt()  # where it is wide, the sigmoid is a step between two nodes
        p = sigmoid_moments(torch.where(y > 0, mean, -mean).squeeze(-1), std)[0]
        return torch.where((std >= 1) & (p > 1e-6), p.log(), found)


@likelihood("bernoulli")
class Bernoulli(Likelihood):
    """Yes or no by the sigmoid of the output; ``y`` holds 0 and 1, (N, D), or (N,) for one output.

    The outputs are log-odds. A network that ends in ``nn.Sigmoid`` must lose that layer.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> pdrop.Bernoulli().distribution(torch.zeros(2, 1)).mean.tolist()
        [[0.5], [0.5]]
    """

    gaussian_outputs, standardised_targets = _Coins, stays

    def distribution(self, f: Tensor) -> Distribution:
        """Return independent coin flips with log-odds ``f``."""
        return dist.Bernoulli(logits=f, validate_args=False).to_event(1)

    def checked(self, f: Tensor, y: Tensor) -> Tensor:
        """Return ``y`` as numbers of the model's type, with a column of its own when it came as a vector."""
        if y.shape == f.shape[-2:-1] and f.shape[-1] == 1:
            y = y.unsqueeze(-1)
        return super().checked(f, y.to(f.dtype) if y.dtype == torch.bool else y).to(f.dtype)

    def curvature_root(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        """Return diag √(p(1 - p))."""
        return torch.diag_embed(torch.exp(0.5 * (F.logsigmoid(f) + F.logsigmoid(-f))))

    def check_values(self, f: Tensor, y: Tensor) -> None:
        """Raise unless every target is 0 or 1."""
        if not bool(((y == 0) | (y == 1)).all()):
            raise RangeError(f"y must hold 0 and 1 only; got {describe(y)}.")
