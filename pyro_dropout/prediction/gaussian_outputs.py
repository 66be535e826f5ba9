"""What a likelihood says where the outputs f of a network are Gaussian, N(m, C) at each point: moments and densities.

In closed form with Gaussian noise, and for the moments of counts; by one-dimensional quadrature, exact to rounding, for
yes and no and wherever a point has one target. Everything else is the mean over quasi-random points of the Gaussian.
"""

import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from pyro_dropout.generative.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Poisson
from pyro_dropout.mathematics.gaussian_expectations import log_expectation, log_mean_sigmoid, sigmoid_moments
from pyro_dropout.mathematics.gaussian_rows import semidefinite_root
from pyro_dropout.prediction.class_kernel import class_moments, has_class_kernel
from pyro_dropout.prediction.moments import F64, Sums, block_log_prob, block_outer, block_sums, moments_of
from pyro_dropout.protocols import Likelihood

_DIMENSIONS = torch.quasirandom.SobolEngine.MAXDIM
_PIECE = 2**22  # numbers that are processed at once
_IN_CACHE, _ON_GPU = 2**19, 2**25  # the same for classes, on a CPU and on a GPU
_LEAST = 256  # quasi-random points
_STRATA = 256  # log precisions that stand for their distribution, each with the same probability
_LOG_2PI = math.log(2 * math.pi)


class Nodes:
    """Quasi-random points of the standard normal distribution, the same for every data point.

    Args:
        count: at least how many; rounded up to a power of two, for which the points are balanced, and at least 256.
        seed: of their scrambling.
    """

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed = 1 << (max(_LEAST, count) - 1).bit_length(), seed

    def outputs(self, mean: Tensor, covariance: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield some points, and outputs there, (count, points, D), in the type of ``mean``."""
        for some, f in self.by_output(mean, semidefinite_root(covariance), _PIECE):
            yield some, f.movedim(-1, 0)

    def by_output(self, mean: Tensor, root: Tensor, piece: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield some points, and outputs there, (points, D, count), of about ``piece`` numbers; ``root`` is L."""
        points, width = mean.shape
        affine, z = self.affine(mean, root)
        size = max(1, piece // (self.count * width))
        for start in range(0, points, size):
            some = slice(start, start + size)
            yield some, affine[some] @ z

    def affine(self, mean: Tensor, root: Tensor) -> tuple[Tensor, Tensor]:
        """Return (L, m) of each point, (N, D, D + 1), and (z, 1), (D + 1, count): m + L z is their product."""
        z = _normal(mean.shape[-1], self.count, self.seed, mean.dtype, mean.device)
        return torch.cat([root.to(mean), mean.unsqueeze(-1)], -1), z


@functools.lru_cache(maxsize=4)
def _normal(width: int, count: int, seed: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return quasi-random points and a row of ones, (width + 1, count); the last few are kept for the next call."""
    if width > _DIMENSIONS:
        found = torch.randn(count, width, dtype=F64, generator=torch.Generator().manual_seed(seed), device="cpu")
    else:
        engine = torch.quasirandom.SobolEngine(width, scramble=True, seed=seed % 2**31)
        smallest = 0.5 / 2**30  # of the numbers that the engine gives, all but zero are larger
        found = torch.special.ndtri(engine.draw(count, dtype=F64).clamp(smallest, 1 - smallest))
    return torch.cat([found.mT, torch.ones(1, count, dtype=F64)]).to(device, dtype)


class Outputs:
    """p(y | f) of a likelihood where f is Gaussian at each point; here for any likelihood, by quasi-random points.

    In all methods ``mean`` is that of f, (N, D), in the type of the outputs, and ``covariance`` its covariance,
    (N, D, D), in float64. Derived classes have the formulas of a likelihood.

    Args:
        likelihood: p(y | f).
        nodes: for what has no formula.
    """

    normal = False  # whether y is a mixture of normals

    def __init__(self, likelihood: Any, nodes: Nodes) -> None:
        self.likelihood, self.nodes = likelihood, nodes

    def moments(self, mean: Tensor, covariance: Tensor) -> Sums:
        """Return the sums of a prediction of one draw: "mean", "spread", "noise", and those of classes."""
        parts = [block_sums(self.likelihood, f) for _, f in self.nodes.outputs(mean, covariance)]
        whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        return {name: value if name == "mean" else value.to(F64) / self.nodes.count for name, value in whole.items()}

    def log_prob(self, mean: Tensor, covariance: Tensor, y: Tensor) -> Tensor:
        """Return log E p(y | f) of each point, all its targets together, (N,), in float64."""
        each = self.nodes.outputs(mean, covariance)
        parts = [block_log_prob(self.likelihood.distribution(f), y[some]) for some, f in each]
        return torch.cat(parts) - math.log(self.nodes.count)

    def products(self, mean: Tensor, covariance: Tensor) -> Tensor:
        """Return the covariance of E[y | f] between the targets of a point, (N, D, D), in float64."""
        found = []
        for _, f in self.nodes.outputs(mean, covariance):
            p = self.likelihood.distribution(f)
            found.append(block_outer(p, p.mean.to(F64).mean(0)) / self.nodes.count)
        return torch.cat(found)

    def strata(self, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
        """Return means and standard deviations of equally probable normals, (S, N, ...), whose mixture y has."""
        raise NotImplementedError


class _GivenNoise(Outputs):
    """Gaussian noise of a given precision: y is Gaussian too."""

    normal = True

    def _noise(self, mean: Tensor) -> Tensor:
        return moments_of(self.likelihood.distribution(mean))["noise"]

    def moments(self, mean: Tensor, covariance: Tensor) -> Sums:
        return {"mean": mean.to(F64), "spread": _variance(covariance), "noise": self._noise(mean)}

    def log_prob(self, mean: Tensor, covariance: Tensor, y: Tensor) -> Tensor:
        total = covariance + torch.diag_embed(self._noise(mean))
        density: Tensor = torch.distributions.MultivariateNormal(mean.to(F64), total, validate_args=False).log_prob(
            y.to(F64)
        )
        return density

    def products(self, mean: Tensor, covariance: Tensor) -> Tensor:
        return covariance

    def strata(self, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
        return mean.to(F64).unsqueeze(0), (_variance(covariance) + self._noise(mean)).sqrt().unsqueeze(0)


class _LearnedNoise(Outputs):
    """Gaussian noise whose log precision is an output as well: given that, y is Gaussian."""

    normal = True

    def _places(self, f: Tensor) -> tuple[Tensor, Tensor]:
        """Return which outputs are means and which are log precisions, each in the shape of the targets of a point."""
        means, logs = self.likelihood.split(torch.arange(f.shape[-1], device=f.device).unsqueeze(0))
        return means[0], logs[0]

    def moments(self, mean: Tensor, covariance: Tensor) -> Sums:
        (means, logs), exact, variance = self._places(mean), mean.to(F64), _variance(covariance)
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

        peak = -(target - middle).square().clamp_min(1e-300).log()
        return log_expectation(log_normal, centre, width, peak)

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


class _Coins(Outputs):
    """Yes and no."""

    def moments(self, mean: Tensor, covariance: Tensor) -> Sums:
        exact, std = mean.to(F64), _variance(covariance).sqrt()
        p, spread, noise, surprise = sigmoid_moments(exact, std)
        votes = torch.where(std > 0, torch.special.ndtr(exact / std), (exact > 0).to(F64))
        return {"mean": p, "spread": spread, "noise": noise, "surprise": surprise, "votes": votes}

    def log_prob(self, mean: Tensor, covariance: Tensor, y: Tensor) -> Tensor:
        if y[0].numel() > 1:
            return super().log_prob(mean, covariance, y)
        middle, std = mean[:, 0].to(F64), covariance[:, 0, 0].sqrt()
        return log_mean_sigmoid(torch.where(y.reshape(-1) > 0, middle, -middle), std)


class _Counts(Outputs):
    """Counts by Poisson, whose rate is log-normal."""

    def moments(self, mean: Tensor, covariance: Tensor) -> Sums:
        variance = _variance(covariance)
        rate = torch.exp(mean.to(F64) + 0.5 * variance)
        return {"mean": rate, "spread": rate.square() * torch.expm1(variance), "noise": rate}

    def log_prob(self, mean: Tensor, covariance: Tensor, y: Tensor) -> Tensor:
        if y[0].numel() > 1:
            return super().log_prob(mean, covariance, y)
        target = y.to(F64).reshape(-1)

        def log_poisson(f: Tensor) -> Tensor:
            return target * f - f.exp() - torch.lgamma(target + 1)

        peak = target.clamp_min(0.5).log()
        return log_expectation(log_poisson, mean[:, 0].to(F64), covariance[:, 0, 0].sqrt(), peak)


class _Classes(Outputs):
    """One of several classes at each point, by quasi-random points in few passes over them."""

    def moments(self, mean: Tensor, covariance: Tensor) -> Sums:
        if not mean.is_cuda:
            return _classes(mean, semidefinite_root(covariance), self.nodes, _IN_CACHE)
        return _classes_without_waiting(mean, covariance, self.nodes)

    def log_prob(self, mean: Tensor, covariance: Tensor, y: Tensor) -> Tensor:
        piece = _ON_GPU if mean.is_cuda else _IN_CACHE
        ignored = self.likelihood.ignore_index
        known = torch.ones_like(y, dtype=torch.bool) if ignored is None else y != ignored
        places = torch.where(known, y, 0)[:, None, None]
        each = []
        for some, f in self.nodes.by_output(mean, semidefinite_root(covariance), piece):
            own = f.gather(1, places[some].expand(-1, 1, f.shape[-1])).squeeze(1)
            each.append(torch.logsumexp((own - torch.logsumexp(f, 1)).to(F64), -1))
        return torch.where(known, torch.cat(each) - math.log(self.nodes.count), 0.0)


_FORMULAS: dict[type, type[Outputs]] = {
    Gaussian: _GivenNoise,
    HeteroscedasticGaussian: _LearnedNoise,
    Bernoulli: _Coins,
    Poisson: _Counts,
    Categorical: _Classes,
}


def outputs_of(likelihood: Likelihood, nodes: Nodes) -> Outputs:
    """Return what a likelihood says of Gaussian outputs; a class derived from one of these may differ from it."""
    several = isinstance(likelihood, Categorical) and likelihood.shape is not None
    return (Outputs if several else _FORMULAS.get(type(likelihood), Outputs))(likelihood, nodes)


def _variance(covariance: Tensor) -> Tensor:
    return covariance.diagonal(dim1=-2, dim2=-1)


def _classes(mean: Tensor, root: Tensor, nodes: Nodes, piece: int) -> Sums:
    """Return the moments of classes at each point, with a root of its covariance."""
    if mean.is_cuda:
        affine, z = nodes.affine(mean, root)
        if has_class_kernel(affine):
            return _with_noise(class_moments(affine, z))
    found = [_with_noise(_in_cache(f)) for _, f in nodes.by_output(mean, root, piece)]
    return {name: torch.cat([part[name] for part in found]) for name in found[0]}


def _classes_without_waiting(mean: Tensor, covariance: Tensor, nodes: Nodes) -> Sums:
    """Return the same on a GPU; whether a covariance is singular is asked at the end, so that the GPU is never idle."""
    root, failed = torch.linalg.cholesky_ex(covariance)
    found = _classes(mean, root, nodes, _ON_GPU)
    return _classes(mean, semidefinite_root(covariance), nodes, _ON_GPU) if bool(failed.any()) else found


def _with_noise(means: Sums) -> Sums:
    found = {name: value.to(F64) for name, value in means.items()}
    return {**found, "noise": found["mean"] * (1 - found["mean"]) - found["spread"]}


def _in_cache(f: Tensor) -> Sums:
    """Return the moments of classes over outputs, (N, C, T), in few passes and logarithms; ``f`` is overwritten."""
    count = f.shape[-1]
    f.sub_(f.amax(1, keepdim=True))
    weights = f.exp()
    votes = weights.floor().sum(-1)  # e⁰ is 1, and all else is less
    total = weights.sum(1, keepdim=True)
    p = weights.div_(total)
    # The entropy of a softmax is log Σ e^f - Σ p f.
    surprise = total.log().flatten(1).mean(-1) - f.mul_(p).sum((1, 2)) / count
    mean = p.mean(-1)
    spread = p.sub_(mean.unsqueeze(-1)).square_().mean(-1)
    return {"mean": mean, "spread": spread, "surprise": surprise, "votes": votes / count}


def _given_precision(covariance: Tensor, means: Tensor, logs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the width of the log precision g, Cov[mean, g]/width, and the variance of the mean given g."""
    variance = _variance(covariance)
    width = variance[:, logs].sqrt()
    slope = torch.where(width > 0, covariance[:, means, logs] / width, 0.0)
    return width, slope, (variance[:, means] - slope.square()).clamp_min(0)
