"""What a likelihood says where the outputs f of a network are Gaussian, N(m, C) at each point: moments and densities.

In closed form with Gaussian noise, and for the moments of counts; by one-dimensional quadrature, exact to rounding, for
yes and no and wherever a point has one target. Everything else is the mean over quasi-random points of the Gaussian.
"""

import functools
import math
from collections.abc import Iterator
from typing import TypeGuard

import torch
from torch import Tensor

from pyro_dropout.generative.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Poisson
from pyro_dropout.mathematics.gaussian_expectations import log_expectation, log_mean_sigmoid, sigmoid_moments
from pyro_dropout.mathematics.positive_definite import semidefinite_root
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


def output_moments(likelihood: Likelihood, mean: Tensor, covariance: Tensor, nodes: Nodes) -> Sums:
    """Return the sums of a prediction of one draw: "mean", "spread", "noise", and those of classes.

    Args:
        likelihood: p(y | f).
        mean: of f, (N, D), in the type of the outputs.
        covariance: of f, (N, D, D), in float64.
        nodes: for what has no formula.
    """
    exact, variance = mean.to(F64), covariance.diagonal(dim1=-2, dim2=-1)
    if type(likelihood) is Gaussian:
        return {"mean": exact, "spread": variance, "noise": moments_of(likelihood.distribution(mean))["noise"]}
    if type(likelihood) is HeteroscedasticGaussian:
        means, logs = _places(likelihood, mean)
        noise = torch.exp(0.5 * variance[:, logs] - exact[:, logs])
        return {"mean": exact[:, means], "spread": variance[:, means], "noise": noise}
    if type(likelihood) is Bernoulli:
        p, spread, noise, surprise = sigmoid_moments(exact, variance.sqrt())
        votes = torch.where(variance > 0, torch.special.ndtr(exact / variance.sqrt()), (exact > 0).to(F64))
        return {"mean": p, "spread": spread, "noise": noise, "surprise": surprise, "votes": votes}
    if type(likelihood) is Poisson:
        rate = torch.exp(exact + 0.5 * variance)
        return {"mean": rate, "spread": rate.square() * torch.expm1(variance), "noise": rate}
    if _is_one_class(likelihood):
        if not mean.is_cuda:
            return _classes(mean, semidefinite_root(covariance), nodes, _IN_CACHE)
        return _classes_without_waiting(mean, covariance, nodes)
    parts = [block_sums(likelihood, f) for _, f in nodes.outputs(mean, covariance)]
    whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return {name: value if name == "mean" else value.to(F64) / nodes.count for name, value in whole.items()}


def output_log_prob(likelihood: Likelihood, mean: Tensor, covariance: Tensor, y: Tensor, nodes: Nodes) -> Tensor:
    """Return log E p(y | f) of each point, all its targets together, (N,), in float64."""
    exact = mean.to(F64)
    if type(likelihood) is Gaussian:
        noise = moments_of(likelihood.distribution(mean))["noise"]
        root = torch.linalg.cholesky(covariance + torch.diag_embed(noise))
        apart = torch.linalg.solve_triangular(root, (y.to(F64) - exact).unsqueeze(-1), upper=False).squeeze(-1)
        log_det = 2 * root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        density: Tensor = -0.5 * (apart.square().sum(-1) + log_det + y.shape[-1] * _LOG_2PI)
        return density
    if y[0].numel() == 1 and type(likelihood) in (Bernoulli, Poisson, HeteroscedasticGaussian):
        target = y.to(F64).reshape(-1)
        if type(likelihood) is HeteroscedasticGaussian:
            return _noisy_log_prob(likelihood, mean, covariance, target)
        middle, std = exact[:, 0], covariance[:, 0, 0].sqrt()
        if type(likelihood) is Bernoulli:
            return log_mean_sigmoid(torch.where(target > 0, middle, -middle), std)

        def log_poisson(f: Tensor) -> Tensor:
            return target * f - f.exp() - torch.lgamma(target + 1)

        return log_expectation(log_poisson, middle, std, target.clamp_min(0.5).log())
    if _is_one_class(likelihood):
        piece = _ON_GPU if mean.is_cuda else _IN_CACHE
        ignored = likelihood.ignore_index
        known = torch.ones_like(y, dtype=torch.bool) if ignored is None else y != ignored
        places = torch.where(known, y, 0)[:, None, None]
        each = []
        for some, f in nodes.by_output(mean, semidefinite_root(covariance), piece):
            own = f.gather(1, places[some].expand(-1, 1, f.shape[-1])).squeeze(1)
            each.append(torch.logsumexp((own - torch.logsumexp(f, 1)).to(F64), -1))
        return torch.where(known, torch.cat(each) - math.log(nodes.count), 0.0)
    parts = [block_log_prob(likelihood.distribution(f), y[some]) for some, f in nodes.outputs(mean, covariance)]
    return torch.cat(parts) - math.log(nodes.count)


def output_products(likelihood: Likelihood, mean: Tensor, covariance: Tensor, nodes: Nodes) -> Tensor:
    """Return the covariance of E[y | f] between the targets of a point, (N, D, D), in float64."""
    if type(likelihood) is Gaussian:
        return covariance
    if type(likelihood) is HeteroscedasticGaussian:
        means = _places(likelihood, mean)[0]
        return covariance[:, means][:, :, means]
    found = []
    for _, f in nodes.outputs(mean, covariance):
        p = likelihood.distribution(f)
        found.append(block_outer(p, p.mean.to(F64).mean(0)) / nodes.count)
    return torch.cat(found)


def normal_strata(likelihood: Likelihood, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Return means and standard deviations of equally probable normals, (S, N, ...), whose mixture y has.

    With a given noise it is one normal. With an uncertain one they are 256, each at the median of a stratum of the log
    precision: given that, the mean of y is normal.
    """
    exact, variance = mean.to(F64), covariance.diagonal(dim1=-2, dim2=-1)
    if type(likelihood) is Gaussian:
        noise = moments_of(likelihood.distribution(mean))["noise"]
        return exact.unsqueeze(0), (variance + noise).sqrt().unsqueeze(0)
    assert type(likelihood) is HeteroscedasticGaussian
    means, logs = _places(likelihood, mean)
    width, slope, rest = _given_precision(covariance, means, logs)
    levels = (torch.arange(_STRATA, dtype=F64, device=mean.device) + 0.5) / _STRATA
    z = torch.special.ndtri(levels).reshape(-1, *[1] * width.dim())
    return exact[:, means] + slope * z, (rest + torch.exp(-exact[:, logs] - width * z)).sqrt()


def _is_one_class(likelihood: Likelihood) -> TypeGuard[Categorical]:
    """Whether each point has one target, a class."""
    return type(likelihood) is Categorical and likelihood.shape is None


def _classes(mean: Tensor, root: Tensor, nodes: Nodes, piece: int) -> Sums:
    """Return the moments of classes at each point, with a root of its covariance."""
    if mean.is_cuda:
        affine, z = nodes.affine(mean, root)
        if has_class_kernel(affine):
            return _with_noise(class_moments(affine, z))
    found = [_class_moments(f) for _, f in nodes.by_output(mean, root, piece)]
    return {name: torch.cat([part[name] for part in found]) for name in found[0]}


def _classes_without_waiting(mean: Tensor, covariance: Tensor, nodes: Nodes) -> Sums:
    """Return the same on a GPU; whether a covariance is singular is asked at the end, so that the GPU is never idle."""
    root, failed = torch.linalg.cholesky_ex(covariance)
    found = _classes(mean, root, nodes, _ON_GPU)
    return _classes(mean, semidefinite_root(covariance), nodes, _ON_GPU) if bool(failed.any()) else found


def _class_moments(f: Tensor) -> Sums:
    """Return the moments of classes over outputs, (N, C, T), in few passes over them; ``f`` may be overwritten."""
    return _with_noise(_with_whole_operations(f) if f.is_cuda else _in_cache(f))


def _with_noise(means: Sums) -> Sums:
    found = {name: value.to(F64) for name, value in means.items()}
    return {**found, "noise": found["mean"] * (1 - found["mean"]) - found["spread"]}


def _with_whole_operations(f: Tensor) -> Sums:
    """On a GPU every operation is a pass over memory, so few are best."""
    p = torch.softmax(f, 1)
    spread, mean = torch.var_mean(p, -1, correction=0)
    surprise = torch.special.entr(p).sum((1, 2))
    votes = p.eq_(p.amax(1, keepdim=True)).mean(-1)  # 1 where a class is the most probable, else 0
    return {"mean": mean, "spread": spread, "surprise": surprise / f.shape[-1], "votes": votes}


def _in_cache(f: Tensor) -> Sums:
    """On a CPU a piece stays in the cache, so simple operations are best, and few logarithms."""
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


def _places(likelihood: HeteroscedasticGaussian, f: Tensor) -> tuple[Tensor, Tensor]:
    """Return which outputs are means and which are log precisions, each in the shape of the targets of a point."""
    means, logs = likelihood.split(torch.arange(f.shape[-1], device=f.device).unsqueeze(0))
    return means[0], logs[0]


def _given_precision(covariance: Tensor, means: Tensor, logs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the width of the log precision g, Cov[mean, g]/width, and the variance of the mean given g."""
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    width = variance[:, logs].sqrt()
    slope = torch.where(width > 0, covariance[:, means, logs] / width, 0.0)
    return width, slope, (variance[:, means] - slope.square()).clamp_min(0)


def _noisy_log_prob(likelihood: HeteroscedasticGaussian, mean: Tensor, covariance: Tensor, y: Tensor) -> Tensor:
    """Return log p(y) of one target with an uncertain mean and noise: given the log precision, it is normal."""
    exact = mean.to(F64)
    means, logs = (place.reshape(-1) for place in _places(likelihood, mean))
    width, slope, rest = (part.squeeze(-1) for part in _given_precision(covariance, means, logs))
    middle, centre = exact[:, means].squeeze(-1), exact[:, logs].squeeze(-1)
    steepness = torch.where(width > 0, slope / width, 0.0)

    def log_normal(g: Tensor) -> Tensor:
        variance = rest + torch.exp(-g)
        apart = y - middle - steepness * (g - centre)
        return -0.5 * (apart.square() / variance + variance.log() + _LOG_2PI)

    peak = -(y - middle).square().clamp_min(1e-300).log()
    return log_expectation(log_normal, centre, width, peak)
