"""Scores of a posterior against a reference: each a function of its draws, with its Monte Carlo error.

Distances are measured in standard deviations of the reference, those of probabilities as they are: a score means the
same on every problem. The reference's thinned draws are shifted and scaled to its moments over all draws.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pyro_dropout.protocols import Weights
from pyro_dropout.registry import Column, ScoreEntry

if TYPE_CHECKING:
    from pyro_dropout.benchmark.problems import Problem

AT_DATA, IN_GAP, OUTSIDE = 0, 1, 2  # regions of test points
_GROUPS = 10  # of draws, each left out once for the Monte Carlo error
_TAIL = 0.025  # outside a 95 % interval, on either side


@dataclass(frozen=True)
class Drawn:
    """Draws of a posterior: quantities, (S, K) or (S, K, C), and weights, {site: (S, ...)}."""

    quantities: Tensor
    weights: Weights

    def parts(self) -> list["Drawn"]:
        """Return all draws but those of a group, for each of some groups; equal draws are in the same group.

        The draws of an ensemble are a few members, each many times: its error is that of so many members.
        """
        same = torch.unique(self.quantities.flatten(1), dim=0, return_inverse=True)[1]
        order = torch.arange(len(same))
        first = order.new_full((len(same),), len(same)).scatter_reduce(0, same, order, "amin")  # of the equal ones
        number = (first.argsort().argsort())[same]
        groups = min(_GROUPS, int(number.max()) + 1)
        left = [number % groups != group for group in range(groups)] if groups > 1 else []
        return [Drawn(self.quantities[kept], {k: v[kept] for k, v in self.weights.items()}) for kept in left]


@dataclass(frozen=True)
class Truth:
    """What a reference says at the rows that are scored.

    Attributes:
        draws: of the quantities, (R, K) or (R, K, C), with the moments below.
        mean: over all draws of the reference.
        std: over all draws of the reference.
        unit: what distances are divided by: ``std``, and 1 for probabilities.
        regions: of the rows, or None.
        moments: {site: (mean, standard deviation)} of the weights that are identified.
    """

    draws: Tensor
    mean: Tensor
    std: Tensor
    unit: Tensor
    regions: Tensor | None
    moments: Mapping[str, tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, problem: "Problem", rows: Tensor | slice = slice(None)) -> "Truth":
        """Return the reference of a problem, at some of its rows."""
        known = problem.reference
        mean, std = known.mean.double()[rows], known.std.double()[rows]
        unit = torch.ones_like(std) if problem.kind == "classes" else std.clamp_min(1e-12)
        regions = None if problem.regions is None else problem.regions[rows]
        return cls(_with_moments(known.draws[:, rows], mean, std), mean, std, unit, regions, known.moments)


def rows_of(problem: "Problem", held_out: bool) -> Tensor | slice:
    """Return which quantities are scored: all of them, or those that are not held out."""
    return slice(None) if held_out or problem.held_out_rows is None else ~problem.held_out_rows


def half_of(problem: "Problem", rows: Tensor | slice = slice(None)) -> Drawn:
    """Return the draws of half of the reference's chains, whose scores are the best that can be expected."""
    known = problem.reference
    mean, std = known.half_mean.double()[rows], known.half_std.double()[rows]
    return Drawn(_with_moments(known.half_draws[:, rows], mean, std), {})


def _with_moments(draws: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Return draws with exactly these means and standard deviations."""
    draws = draws.double()
    own = draws.std(0, correction=0)
    return mean + (draws - draws.mean(0)) * torch.where(own > 0, std / own, 1.0)


# --- the registry -----------------------------------------------------------------------------------------------------

Compute = Callable[[Drawn, Truth], float]
_SCORES: dict[str, ScoreEntry] = {}
COSTS = {
    "seconds": Column("seconds", "seconds", "Time of training, without drawing and scoring.", "less", 1),
    "gradients": Column("gradients", "gradients", "Gradients of the log-likelihood of one data point.", "less", 0),
    "parameters": Column("parameters", "parameters", "Numbers that the posterior keeps.", "", 0),
}


def score(heading: str, better: str, *of: str, digits: int = 3) -> Callable[[Compute], Compute]:
    """Register a function of ``Drawn`` and ``Truth`` by its name; its docstring tells readers of a page.

    Args:
        heading: of its column.
        better: "more", "less", "one" or "level", as for scores of comparisons.
        of: the kinds of problems that have it: "numbers", "classes" and "parameters", all if none is given.
        digits: after the decimal point.

    Example:
        >>> from pyro_dropout.benchmark import scores
        >>> @scores.score("bias", "less", "numbers")
        ... def bias(drawn, truth):
        ...     "Return the mean error of the mean."
        ...     return float((drawn.quantities.mean(0) - truth.mean).abs().mean())
        >>> scores.columns()["bias"].meaning
        'The mean error of the mean.'
        >>> _ = scores._SCORES.pop("bias")
    """

    def register(function: Compute) -> Compute:
        words = " ".join((function.__doc__ or "").split()).removeprefix("Return ")
        name, kinds = function.__name__, of or ("numbers", "classes", "parameters")
        meaning = words[:1].upper() + words[1:]
        _SCORES[name] = ScoreEntry(name, heading, meaning, better, digits, compute=function, of=kinds, order=0)
        return function

    return register


def columns() -> dict[str, Column]:
    """Return the columns of a benchmark by name: all scores, and then what a posterior costs."""
    return {**_SCORES, **COSTS}


def scored(drawn: Drawn, truth: Truth, kind: str) -> dict[str, tuple[float, float]]:
    """Return every score that a kind of problem has, with its Monte Carlo error: a jackknife over groups of draws."""
    found, parts = {}, drawn.parts()
    for entry in (each for each in _SCORES.values() if kind in each.of):
        value = float(entry.compute(drawn, truth))
        if not math.isnan(value):
            each = torch.tensor([entry.compute(part, truth) for part in parts], dtype=torch.float64)
            error = (len(parts) - 1) ** 0.5 * float(each.std(correction=0)) if parts else math.nan
            found[entry.name] = (value, error)
    return found


# --- the scores -------------------------------------------------------------------------------------------------------


@score("agreement", "more", "classes")
def agreement(drawn: Drawn, truth: Truth) -> float:
    """Return the share of test points at which the most probable class, of means over draws, is the reference's."""
    return float((drawn.quantities.mean(0).argmax(-1) == truth.mean.argmax(-1)).double().mean())


@score("total variation", "less", "classes")
def total_variation(drawn: Drawn, truth: Truth) -> float:
    """Return half of the sum over classes of |probability - reference's|, averaged over the test points."""
    return float((drawn.quantities.mean(0) - truth.mean).abs().sum(-1).mean() / 2)


@score("W₂", "less")
def w2(drawn: Drawn, truth: Truth) -> float:
    """Return the 2-Wasserstein distance of each quantity (f at a test point, a probability, a parameter), averaged."""
    a, b = (each.flatten(1).sort(0).values for each in (drawn.quantities, truth.draws))
    steps = [torch.arange(1, len(each) + 1, dtype=torch.float64) / len(each) for each in (a, b)]
    levels = torch.cat(steps).sort().values  # W₂² = ∫ (F⁻¹(t) - G⁻¹(t))² dt, whose integrand is constant between levels
    width = torch.diff(levels, prepend=levels.new_zeros(1))
    x, y = (each[torch.searchsorted(step, levels - width / 2)] for each, step in zip((a, b), steps, strict=True))
    return float(((width[:, None] * (x - y).square()).sum(0).sqrt() / truth.unit.flatten()).mean())


@score("energy", "less")
def energy(drawn: Drawn, truth: Truth) -> float:
    """Return the energy distance of whole functions (all quantities of a draw), a share of its largest value.

    0 is the same distribution; by chance it may be a little less.
    """
    x, y = ((each / truth.unit).flatten(1) for each in (drawn.quantities, truth.draws))
    across = 2 * torch.cdist(x, y).mean()
    within = [torch.cdist(each, each).sum() / (len(each) * max(1, len(each) - 1)) for each in (x, y)]
    return float((across - sum(within)) / across)  # without bias: no draw is compared with itself


def _width(drawn: Drawn, truth: Truth, region: int) -> float:
    """Return the mean standard deviation in a region, divided by the reference's."""
    if truth.regions is None and region != AT_DATA:
        return math.nan
    rows = slice(None) if truth.regions is None else truth.regions == region
    own, known = (each[rows] / truth.unit[rows] for each in (drawn.quantities.std(0, correction=0), truth.std))
    return float(own.mean() / known.mean())  # of no rows: NaN


@score("at the data", "one", digits=2)
def width(drawn: Drawn, truth: Truth) -> float:
    """Return the mean standard deviation of f at the data, or of all parameters, divided by the reference's."""
    return _width(drawn, truth, AT_DATA)


@score("in the gap", "one", "numbers", "classes", digits=2)
def width_gap(drawn: Drawn, truth: Truth) -> float:
    """Return the same in the gap between the data."""
    return _width(drawn, truth, IN_GAP)


@score("outside", "one", "numbers", "classes", digits=2)
def width_outside(drawn: Drawn, truth: Truth) -> float:
    """Return the same outside the data."""
    return _width(drawn, truth, OUTSIDE)


@score("coverage", "level")
def coverage(drawn: Drawn, truth: Truth) -> float:
    """Return how probable the posterior's central 95 % intervals are under the reference, averaged over quantities."""
    low, high = torch.quantile(drawn.quantities, torch.tensor([_TAIL, 1 - _TAIL], dtype=torch.float64), dim=0)
    return float(((truth.draws >= low) & (truth.draws <= high)).double().mean())


@score("moments", "less")
def moments(drawn: Drawn, truth: Truth) -> float:
    """Return √(difference of means² + difference of standard deviations²) of each identified weight, averaged.

    It is the 2-Wasserstein distance of two normals with these moments.
    """
    found = []
    for site, own in drawn.weights.items():
        mean, std = (part.double() for part in truth.moments[site])
        apart = torch.hypot(own.double().mean(0) - mean, own.double().std(0, correction=0) - std)
        found.append((apart / std).flatten())
    return float(torch.cat(found).mean()) if found else math.nan
