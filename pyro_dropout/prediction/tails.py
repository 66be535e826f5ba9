"""How probable it is that a target lies below or above a value, in logs; and the values at such tails, the quantiles.

The mixture that the draws make is used whole, noise included. Logs keep tails apart that are too small for a
probability: a target forty standard deviations away still says how far it is.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributions import Bernoulli, Normal, Poisson, TransformedDistribution, constraints
from torch.distributions.transforms import ComposeTransform, Transform

from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.generative.likelihoods.moments import F64, base_of, normal_parts
from pyro_dropout.mathematics.mixtures import mixture_tail_quantile
from pyro_dropout.mathematics.shapes import keeps_density
from pyro_dropout.protocols import Distribution

Tails = tuple[Tensor, Tensor]

_SUMMED = 1000  # counts up to here are added up, many times as fast as a search
_SMALL = math.log(1e-9)
_ROUNDING = 1e-6  # of a log tail: a count whose tail is as large as asked for is not lost to rounding
_DOUBLINGS = 200  # of a bracket, or halvings of it


def is_whole(p: Distribution) -> bool:
    """Whether targets are whole numbers."""
    return bool(base_of(p).support.is_discrete)


def behind(p: Distribution) -> tuple[Distribution, Transform] | None:
    """Return the normal distribution of which targets are an increasing function, and the function; None if not so."""
    base: Distribution = base_of(p)
    steps: list[Transform] = []
    while isinstance(base, TransformedDistribution):
        base, steps = base_of(base.base_dist), [*base.transforms, *steps]
    return (base, ComposeTransform(steps)) if keeps_density(base, Normal) and all(map(_rises, steps)) else None


def _rises(step: Transform) -> bool:
    try:
        return step.bijective and bool(torch.as_tensor(step.sign > 0).all())
    except NotImplementedError:  # a function of several numbers
        return False


def log_tails(p: Distribution, y: Tensor) -> Tails:
    """Return log P(Y ≤ y) and log P(Y ≥ y) of single targets, in float64.

    A distribution may define ``log_tails(y)`` itself. Otherwise it must be a normal or an increasing function of one,
    counts by Poisson, yes or no, or have a ``cdf``.
    """
    base, y = base_of(p), y.to(F64)
    if hasattr(base, "log_tails"):
        below, above = base.log_tails(y)
        return below.to(F64), above.to(F64)
    normal = behind(base)
    if normal is not None:
        return _normal_tails(*normal, y)
    if isinstance(base, Bernoulli):
        no, yes = (torch.nn.functional.logsigmoid(sign * base.logits.to(F64)) for sign in (-1, 1))
        return _steps(y >= 1, y >= 0, no), _steps(y <= 0, y <= 1, yes)
    if isinstance(base, Poisson):
        rate, least, most = torch.broadcast_tensors(base.rate.to(F64), y.ceil(), y.floor())
        below = torch.special.gammaincc(most.clamp_min(0) + 1, rate).log()
        above = torch.special.gammainc(least.clamp_min(1), rate).log()
        return torch.where(most < 0, -math.inf, below), torch.where(least < 1, 0.0, above)
    first, last = _bounds(base, y)
    try:
        if not keeps_density(base) and not _tells_tails(base):
            raise NotImplementedError
        below = base.cdf(y.clamp(first, last)).to(F64)
        less = base.cdf((y.ceil() - 1).clamp(first, last)).to(F64) if is_whole(base) else below
    except NotImplementedError:
        raise PyroDropoutError(
            f"{type(base).__name__} has no distribution function, so its tails and quantiles are not known. Define"
            " cdf(value) in it, or log_tails(value): log P(Y ≤ value) and log P(Y ≥ value)."
        ) from None
    return _steps(y >= last, y >= first, below.log()), _steps(y <= first, y <= last, (1 - less).log())


def _tells_tails(p: Distribution) -> bool:
    """Whether the class that defines a density, or one below it, defines the distribution function too."""
    return "cdf" in next(names for each in type(p).__mro__ if {"cdf", "log_prob"} & (names := vars(each).keys()))


def _bounds(p: Distribution, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the least and the greatest possible target; they may be parameters, as of a Binomial."""
    ends = getattr(p.support, "lower_bound", -math.inf), getattr(p.support, "upper_bound", math.inf)
    low, high = (torch.as_tensor(end, dtype=F64, device=like.device) for end in ends)
    return low, high


def _steps(sure: Tensor, possible: Tensor, log_prob: Tensor) -> Tensor:
    """Return 0 where it is sure, otherwise a log probability where it is possible, and -inf elsewhere."""
    return torch.where(sure, 0.0, torch.where(possible, log_prob, -math.inf))


def _normal_tails(normal: Distribution, function: Transform, y: Tensor) -> Tails:
    loc, scale = normal_parts(normal)
    low, high = (function(loc.new_tensor(end)) for end in (-math.inf, math.inf))
    inside = (y > low) & (y < high)
    u = (function.inv(torch.where(inside, y, function(loc))) - loc) / scale
    return (
        _steps(y >= high, inside, torch.special.log_ndtr(u)),
        _steps(y <= low, inside, torch.special.log_ndtr(-u)),
    )


def mixed(each: Tensor) -> Tensor:
    """Return the log of the mean of probabilities, (...), from the logs of those of each draw, (T, ...)."""
    return torch.logsumexp(each, 0) - math.log(len(each))


def mixture_ends(
    kind: Distribution, p: Distribution | None, tails: Callable[[Tensor], Tails], near: Tails, log_tail: Tensor
) -> Tails:
    """Return the least y with log P(Y ≤ y) ≥ log_tail, and the greatest with log P(Y ≥ y) ≥ log_tail, in float64.

    Args:
        kind: p(y | f) at some output, for its support.
        p: p(y | f) with every draw, (T, ...), if they are in one distribution.
        tails: the log tails of the mixture at y.
        near: the mean and the standard deviation of y.
        log_tail: at most log ½. At -inf the ends are those of all possible targets.
    """
    endless = log_tail.isneginf()
    log_tail = torch.where(endless, math.log(0.5), log_tail)
    at, step = (torch.where(each.isfinite(), each, other) for each, other in zip(near, (0.0, 1.0), strict=True))
    whole, common = is_whole(kind), bool((log_tail > _SMALL).all())
    normal = None if p is None else behind(p)
    if normal is not None:
        (loc, scale), function = normal_parts(normal[0]), normal[1]
        low, high = (mixture_tail_quantile(side * loc, scale, log_tail) for side in (1, -1))
        return function(torch.where(endless, -math.inf, low)), function(torch.where(endless, math.inf, -high))
    counts = p is not None and kind.support is constraints.nonnegative_integer
    summed = _summed(base_of(p), log_tail) if counts and common and bool((at < _SUMMED / 4).all()) else None
    if summed is not None:
        low, high = summed
    else:
        limit = log_tail - (_ROUNDING if whole else 0.0)
        low = _least(lambda y: tails(y)[0] >= limit, at, step, whole)
        high = -_least(lambda y: tails(-y)[1] >= limit, -at, step, whole)
    first, last = _bounds(kind if p is None else base_of(p), low)
    if first.dim() > low.dim():
        first = first.amin(0)
    if last.dim() > low.dim():
        last = last.amax(0)
    return torch.where(endless, first, low), torch.where(endless, last, high)


def _summed(counts: Distribution, log_tail: Tensor) -> Tails | None:
    """Return the ends of counts from 0 by adding up the probabilities of the mixture; None if it takes too many."""
    tail = (log_tail - _ROUNDING).exp()
    low, high, below = torch.zeros_like(tail), torch.zeros_like(tail), torch.zeros_like(tail)
    for k in range(_SUMMED):
        high = torch.where(1 - below >= tail, k, high)
        below = below + counts.log_prob(torch.full_like(tail, k)).to(F64).exp().mean(0)
        low = torch.where(below < tail, k + 1, low)
        if bool(((1 - below < tail) & (below >= tail)).all()):
            return low, high
    return None


def _least(holds: Callable[[Tensor], Tensor], at: Tensor, step: Tensor, whole: bool) -> Tensor:
    """Return the least y for which a condition holds that holds for all greater ones; near ``at``, give or take."""
    step = step.clamp_min(1.0).ceil() if whole else step.clamp_min(torch.finfo(F64).tiny)
    low, high = at.floor() if whole else at, at.ceil() if whole else at
    for k in range(_DOUBLINGS):
        short, far = ~holds(high), holds(low)
        if not bool((short | far).any()):
            break
        reach = 2.0**k * step
        low, high = (
            torch.where(far, low - reach, torch.where(short, high, low)),
            torch.where(short, high + reach, torch.where(far, low, high)),
        )
    for _ in range(_DOUBLINGS):
        middle = (low + high) / 2
        middle = middle.floor() if whole else middle
        if bool((high - low <= (1 if whole else 1e-9 * step)).all()):
            break
        good = holds(middle)
        low, high = torch.where(good, low, middle), torch.where(good, middle, high)
    return high
