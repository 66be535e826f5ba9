"""Gaussian noise that depends on the input: the network gives means and log precisions."""

import math

import torch
from torch import Tensor

from pyro_dropout.errors import ShapeError
from pyro_dropout.generative.likelihoods.likelihood import Dims, Likelihood, OutputShape, check_real
from pyro_dropout.generative.likelihoods.moments import F64, Outputs, Sums, variance_of
from pyro_dropout.mathematics.normal import Normal, log_expectation
from pyro_dropout.protocols import Distribution
from pyro_dropout.registry import likelihood

_LARGEST_LOG = 170.0  # of a precision, so that its root and its inverse are numbers
_STRATA = 256  # log precisions that stand for their distribution, each with the same probability
_LOG_2PI = math.log(2 * math.pi)


def _given_precision(covariance: Tensor, means: Tensor, logs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the width of the log precision g, Cov[mean, g]/width, and the variance of the mean given g."""
    variance = variance_of(covariance)
    width = variance[:, logs].sqrt()
    slope = torch.where(width > 0, covariance[:, means, logs] / width, 0.0)
    return width, slope, (variance[:, means] - slope.square()).clamp_min(0)


class _LearnedNoise(Outputs):
    """Gaussian noise whose log precision is an output as well: given that, y is Gaussian."""

    normal = True

    def _places(self, f: Tensor) -> tuple[Tensor, Tensor]:
        """Return which outputs are means and which are log precisions, each in the shape of the targets of a point."""
        means, logs = self.likelihood.split(torch.arange(f.shape[-1], device=f.device).unsqueeze(0))
        return means[0], logs[0]

    def moments(self, mean: Tensor, covariance: Tensor) -> Sums:
        (means, logs), exact, variance = self._places(mean), mean.to(F64), variance_of(covariance)
        noise = torch.exp(0.5 * variance[:, logs] - exact[:, logs])
        return {"mean": exact[:, means], "spread": variance[:, means], "noise": noise}

    def log_prob(self, mean: Tensor, covariance: Tensor, y: Tensor) -> Tensor:
        if y[0].numel() > 1:
            return super().log_prob(mean, covariance, y)
        exact, target = mean.to(F64), y.to(F64).reshape(-1)
        means, logs = (place.reshape(-1) for place in self._places(mean))
        width, slope, rest = (part.squeeze(-1) for part in _given_precision(covariance, means, logs))
        middle, centre = exact[:, means].squeeze(-1), exact[:, logs].squeeze(-1)
        steepness = torch.where(width > 0, slope / width, 0.0)

        def log_normal(g: Tensor) -> Tensor:
            variance = rest + torch.exp(-g)
            apart = target - middle - steepness * (g - centre)
            return -0.5 * (apart.square() / variance + variance.log() + _LOG_2PI)

        return log_expectation(log_normal, centre, width)

    def products(self, mean: Tensor, covariance: Tensor) -> Tensor:
        means = self._places(mean)[0]
        return covariance[:, means][:, :, means]

    def strata(self, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
        """Return 256 normals, each at the median of a stratum of the log precision."""
        (means, logs), exact = self._places(mean), mean.to(F64)
        width, slope, rest = _given_precision(covariance, means, logs)
        levels = (torch.arange(_STRATA, dtype=F64, device=mean.device) + 0.5) / _STRATA
        z = torch.special.ndtri(levels).reshape(-1, *[1] * width.dim())
        return exact[:, means] + slope * z, (rest + torch.exp(-exact[:, logs] - width * z)).sqrt()


@likelihood("heteroscedastic", outputs=2)
class HeteroscedasticGaussian(Likelihood):
    """Targets whose noise depends on the input: the network gives D means and then D log precisions.

    Args:
        dims: the shape of the network's output at one point if it is a sequence or a map, such as (T, 2·D) or
            (2·D, H, W); one size may be None, if it differs from batch to batch. Targets have D in the place of 2·D;
            if D is 1, they may be without it.
        dim: which of ``dims`` holds the means and then the log precisions.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> f = torch.tensor([[2.0, 0.0]])  # one point: mean 2, log precision 0
        >>> pdrop.HeteroscedasticGaussian().distribution(f).variance
        tensor([[1.]])
        >>> depth = pdrop.HeteroscedasticGaussian(dims=(2, 8, 8), dim=0)
        >>> depth.distribution(depth.flattened(torch.zeros(5, 2, 8, 8))).event_shape
        torch.Size([1, 8, 8])
    """

    gaussian_outputs = _LearnedNoise

    def __init__(self, dims: Dims | None = None, dim: int = -1) -> None:
        super().__init__()
        self.shape = None if dims is None else OutputShape(dims, dim)
        if self.shape is not None and self.shape.parts % 2:
            raise ShapeError(f"dims must have an even size at dim, for means and log precisions; got {dims}.")

    def split(self, f: Tensor) -> tuple[Tensor, Tensor]:
        """Return the means and the log precisions in ``f``, (..., N, 2D)."""
        if self.shape is None and f.shape[-1] % 2:
            raise ShapeError(f"the model must have 2·D outputs, means and log precisions; got {f.shape[-1]}.")
        mean, log_tau = f.chunk(2, -1) if self.shape is None else self.shape.whole(f).chunk(2, self.shape.from_end)
        return mean, log_tau

    def distribution(self, f: Tensor) -> Distribution:
        """Return N(mean, 1/precision)."""
        mean, log_tau = self.split(f)
        event = 1 if self.shape is None else len(self.shape.dims)
        scale = torch.exp(-0.5 * log_tau.clamp(-_LARGEST_LOG, _LARGEST_LOG))  # far from the data it would be 0 or inf
        return Normal(mean, scale).to_event(event)  # type: ignore[no-untyped-call]

    def checked(self, f: Tensor, y: Tensor) -> Tensor:
        """Return ``y``, which has half as many columns as ``f``."""
        mean = self.split(f)[0]
        if self.shape is None:
            return super().checked(mean, y)
        wanted = mean.shape[f.dim() - 2 :]
        if self.shape.parts == 2 and y.dim() == len(wanted) - 1:
            y = y.unsqueeze(self.shape.from_end)
        if y.shape != wanted:
            raise ShapeError(f"y must hold real numbers, shape {tuple(wanted)}; got {tuple(y.shape)}.")
        check_real(y)
        return y

    def curvature_root(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        """Return diag(√τ, √½) for a mean and its log τ: the Hessian would be negative where y is near the mean."""
        _, log_tau = self.split(f)
        where = -1 if self.shape is None else self.shape.from_end
        roots = torch.cat([torch.exp(0.5 * log_tau), torch.full_like(log_tau, 0.5**0.5)], where)
        return torch.diag_embed(roots.reshape(f.shape))

    def standardised_targets(self) -> bool:
        """Yes: means and log precisions are those of standardised targets."""
        return True

    def raw_outputs(self, f: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        """Return outputs whose means are shifted and scaled, and whose log precisions are shifted."""
        middle, log_tau = self.split(f)
        lead, where = f.dim() - 1, -1 if self.shape is None else self.shape.from_end
        mean, std = (each.reshape(middle.shape[lead:]) for each in (mean, std))
        return torch.cat([middle * std + mean, log_tau - 2 * std.log().expand_as(log_tau)], where).flatten(lead)

    def raw_likelihood(self, std: Tensor) -> Likelihood:
        """Return itself: the outputs hold the precision."""
        return self
