"""Whether a row is like the rows that a model was trained on, or lies beyond them or in a hole between them.

A network interpolates, and its posterior need not be uncertain where data are missing. So rows are compared with the
training rows themselves, in three ways:

- along each input: the training values next to the row's, one below and one above, leave an empty interval. If data
  were as dense in it as beside it, E rows would lie in it, where E is the geometric mean of the rows in the two
  intervals of the same width beside it. All rows in a hole share this interval, at its edges as in its middle;
- along each input, among those training rows that are near the row in another input: holes of two inputs, and of an
  input within a category; an unseen pair of categories too, with E from their shares;
- in all inputs together: the mean distance to the five nearest training rows. Numbers are in standard deviations of
  their principal components, so that a row far from the others is one that breaks what ties inputs together, such as a
  column in another unit; categories count as they are.

Each has a limit, which rows like the training rows seldom exceed. Where data are evenly dense, chance alone says how
seldom: the interval about a row is two spacings wide, so P(E > e) = (1 + e) exp(-e). Inputs with spikes, ties and
holes of their own exceed such limits more often, so training rows are left out one at a time, and limits are raised
until few enough of them exceed. The score of a row is the largest of its figures in units of their limits.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pyro_dropout.errors import ShapeError
from pyro_dropout.mathematics.checks import check_count, check_finite, check_level
from pyro_dropout.mathematics.shapes import Bool, Float

_F64 = torch.float64
_MOST_ROWS = 5000  # of the training rows, chosen at random
_LEFT_OUT = 600  # training rows that are left out in turn
_PAIRED = 12  # numbers, and as many categories, that are looked at two at a time
_NEIGHBOURS = 5
_FEWEST = 10
_EDGES = 3  # rows that may exceed the limit along inputs if all are few: a hole in the training rows has two edges
_SMALLEST = 1e-30  # of a limit
_THINNEST = 1e-6  # of a principal component's variance, in those of standardised inputs
_PIECE = 2**22


@dataclass(frozen=True, eq=False)
class Support:
    """Which rows are unlike the training rows; made by ``Support.of``.

    Attributes:
        rows: training rows, at most 5,000 of them, (n, Q).
        along: the limit of E for each input, (Q,).
        among: the same among rows near in another input, (P, P), for P inputs.
        paired: these P inputs.
        limits: of the largest quotient along inputs, of that among neighbours, and of the distance.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> _ = torch.manual_seed(0)
        >>> x = torch.rand(1000, 6)
        >>> x = x[(x[:, 2] < 0.4) | (x[:, 2] > 0.6)]  # a hole in one of six inputs
        >>> support = pdrop.judging.Support.of(x)
        >>> row = torch.full((1, 6), 0.3)
        >>> support.flag(row).tolist(), support.flag(row.index_fill(1, torch.tensor(2), 0.45)).tolist()
        ([False], [True])
    """

    rows: Float[Tensor, "n Q"]
    along: Float[Tensor, " Q"]
    among: Float[Tensor, "P P"]
    paired: tuple[int, ...]
    limits: tuple[float, float, float]

    @classmethod
    def of(cls, x: Float[Tensor, "N Q"], rate: float = 0.03, seed: int = 0) -> "Support":
        """Learn what training rows are like.

        Args:
            x: the inputs of the training rows, (N, Q), as the model takes them; at least ten rows.
            rate: the share of rows like them that may be flagged; with fewer than 3/rate rows about three rows' share.
            seed: of the choice of rows, where there are many.
        """
        check_finite("x", x, data=True)
        check_level("rate", rate)
        check_count("seed", seed, 0)
        if x.dim() != 2 or len(x) < _FEWEST:
            raise ShapeError(f"x must have shape (N, Q) with at least {_FEWEST} rows; got {tuple(x.shape)}.")
        rows = _once(some_of(x, seed))
        near = _Neighbourhoods(rows.to(_F64), _paired(rows))
        own = torch.arange(min(len(rows), _LEFT_OUT))
        along, among, distance = near.figures(rows[own].to(_F64), own)
        chances = {"along": 0.45 * rate, "among": 0.45 * rate, "distance": 0.1 * rate}
        alone = torch.quantile(along, 0.98, 0).clamp_min(_by_chance(chances["along"] / rows.shape[1]))
        pairs = 2 * len(near.paired) ** 2
        paired = torch.quantile(among, 0.97, 0).clamp_min(_by_chance(chances["among"] / pairs)) if pairs else among[0]
        limits = (
            max(1.0, _exceeded((along / alone).amax(1), max(chances["along"], _EDGES / len(own)))),
            max(1.0, _exceeded((among / paired).flatten(1).amax(1), chances["among"])) if pairs else 1.0,
            max(_SMALLEST, _exceeded(distance, chances["distance"])),
        )
        return cls(rows, alone, paired, near.paired, limits)

    def score(self, x: Float[Tensor, "N Q"]) -> Float[Tensor, " N"]:
        """Return how unlike the training rows each row is, (N,): above 1 it is flagged."""
        return self._quotients(x).amax(1).to(x)

    def flag(self, x: Float[Tensor, "N Q"]) -> Bool[Tensor, " N"]:
        """Return which rows are unlike the training rows, (N,)."""
        return (self._quotients(x).amax(1) > 1).to(x.device)

    def inputs(self, x: Float[Tensor, "N Q"]) -> list[tuple[int, ...]]:
        """Return for each row the inputs that set it apart most, one or two; () if none does, or only all together."""
        single, pairs = self.rows.shape[1], len(self.paired)
        best, which = self._quotients(x)[:, :-1].max(1)
        found: list[tuple[int, ...]] = []
        for value, place in zip(best.tolist(), which.tolist(), strict=True):
            if value <= 1:
                found.append(())
            elif place < single:
                found.append((place,))
            else:
                found.append(tuple(sorted(self.paired[k] for k in divmod(place - single, pairs))))
        return found

    def state(self) -> dict[str, Tensor]:
        """Return tensors for a file, the argument of ``from_state``."""
        paired, limits = torch.tensor(self.paired, dtype=torch.int64), torch.tensor(self.limits, dtype=_F64)
        return {"rows": self.rows, "along": self.along, "among": self.among, "paired": paired, "limits": limits}

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> "Support":
        """Return what ``state`` was made from; raise ``KeyError`` or ``TypeError`` if it is invalid."""
        rows, along, among, paired, limits = (state[name] for name in ("rows", "along", "among", "paired", "limits"))
        if not (
            (rows.dim() == 2 and len(rows) >= _FEWEST and along.shape == rows.shape[1:] and limits.shape == (3,))
            and (paired.dim() == 1 and paired.dtype == torch.int64 and among.shape == (len(paired), len(paired)))
            and bool(((paired >= 0) & (paired < rows.shape[1])).all())
            and all(each.is_floating_point() and bool(each.isfinite().all()) for each in (rows, along, among, limits))
            and all(bool((each > 0).all()) for each in (along, among, limits))
        ):
            raise TypeError("what training rows are like")
        one, two, three = limits.tolist()
        return cls(rows, along, among, tuple(paired.tolist()), (one, two, three))

    def _quotients(self, x: Tensor) -> Tensor:
        """Return every figure in units of its limit, (N, Q + P² + 1)."""
        check_finite("x", x, data=True)
        if x.dim() != 2 or x.shape[1] != self.rows.shape[1]:
            raise ShapeError(f"x must have shape (N, {self.rows.shape[1]}), as in training; got {tuple(x.shape)}.")
        near = _Neighbourhoods(self.rows.to(_F64), self.paired)
        along, among, distance = near.figures(x.detach().cpu().to(_F64), None)
        parts = (along / self.along, (among / self.among).flatten(1), distance.unsqueeze(1))
        return torch.cat([part / limit for part, limit in zip(parts, self.limits, strict=True)], 1)


def some_of(x: Tensor, seed: int) -> Tensor:
    """Return the rows that are compared with new ones, on the CPU: at most 5,000 of them, in a random order."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed), device="cpu")
    return x.detach().cpu()[order[:_MOST_ROWS]]


def _once(rows: Tensor) -> Tensor:
    """Return rows without their copies, in which every one left out would meet itself.

    Rows of a few values in every column repeat by chance, as many as there are; those stay.
    """
    places = np.sort(np.unique(rows.numpy(), axis=0, return_index=True)[1])
    continuous = max(len(column.unique()) for column in rows.T) > len(places) / 2 if rows.numel() else False
    return rows[torch.from_numpy(places)] if continuous and len(places) >= _FEWEST else rows


def _paired(rows: Tensor) -> tuple[int, ...]:
    """Return the inputs to look at two at a time: the numbers with the most values, the most even categories."""
    distinct = torch.tensor([len(column.unique()) for column in rows.T])
    uneven = ((rows == rows.amin(0)).to(_F64).mean(0) - 0.5).abs()
    numbers = [k for k in distinct.argsort(descending=True, stable=True).tolist() if distinct[k] > 2]
    flags = [k for k in uneven.argsort(stable=True).tolist() if distinct[k] == 2]
    return tuple(sorted(numbers[:_PAIRED] + flags[:_PAIRED]))


def _by_chance(rate: float) -> float:
    """Return the E that the empty interval about a row exceeds with this probability, where data are evenly dense.

    Its width in units of the mean spacing is that of two spacings, Gamma(2): P(E > e) = (1 + e) exp(-e).
    """
    from scipy.stats import gamma

    return float(gamma.isf(rate, 2))


def _exceeded(values: Tensor, rate: float) -> float:
    """Return the limit that a new value exceeds with at most this probability.

    Where values are too few to say, their upper half is continued as an exponential tail.
    """
    count, ordered = len(values), values.sort().values
    place = math.ceil((count + 1) * (1 - rate))
    if place <= count:
        return ordered[place - 1].item()
    upper = (ordered[-1] - ordered[(count - 1) // 2]) / math.log(count)  # per factor e of the probability
    return (ordered[-1] - upper * math.log((count + 1) * rate)).item()


class _Neighbourhoods:
    """Training rows in order along each input, and what lies about other rows."""

    def __init__(self, rows: Tensor, paired: tuple[int, ...]) -> None:
        self.rows, self.paired = rows, paired
        self.ordered, self.order = rows.T.contiguous().sort(dim=1, stable=True)  # (Q, n)
        self.flags = (self.ordered.diff(dim=1) > 0).sum(1) <= 1  # inputs with one value or two
        self.window = min(len(rows), max(24, min(128, len(rows) // 8)))
        numbers = rows[:, ~self.flags]
        self.mean = numbers.mean(0)
        self.spread = numbers.std(0) if numbers.numel() else self.mean  # of no columns torch warns
        z = (numbers - self.mean) / self.spread
        variance, axes = torch.linalg.eigh(z.T @ z / len(z))
        self.axes = axes / variance.clamp_min(_THINNEST).sqrt()
        self.places = self._placed(rows)

    def figures(self, x: Tensor, own: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return E along each input, (N, Q), and among neighbours, (N, P, P), and the distance, (N,).

        ``own`` are the places of x among the training rows, if they are left out of these in turn.
        """
        size = max(1, _PIECE // max(self.window * len(self.paired), len(self.rows)))
        pieces = []
        for start in range(0, max(len(x), 1), size):
            some = slice(start, start + size)
            pieces.append(self._piece(x[some], None if own is None else own[some]))
        along, among, distance = zip(*pieces, strict=True)
        return torch.cat(along), torch.cat(among), torch.cat(distance)

    def _piece(self, x: Tensor, own: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        values = x.T.contiguous()
        first, last = (torch.searchsorted(self.ordered, values, right=right) for right in (False, True))
        among = [self._among(x, k, first, last, own) for k in self.paired]
        pairs = torch.stack(among, 1) if among else x.new_zeros(len(x), 0, 0)
        along = _expected(self.ordered, values, 0 if own is None else 1)
        return along.T, pairs, self._distance(x, own)

    def _among(self, x: Tensor, k: int, first: Tensor, last: Tensor, own: Tensor | None) -> Tensor:
        """Return E of the paired inputs among the rows nearest in input k, below or above it, (N, P)."""
        chosen, n = torch.tensor(self.paired, device=x.device), len(self.rows)
        flags = self.flags[chosen]
        given, rows = x.T[chosen], self.rows.T[chosen][:, self.order[k]]  # (P, N), and (P, n) in the order of input k
        share = (last - first)[chosen[flags]] / n  # of the rows in the same category
        best = torch.zeros_like(given)
        for start in (last[k] - self.window, first[k])[: 1 if self.flags[k] else 2]:
            places = start.clamp(0, n - self.window)

            def near(values: Tensor, places: Tensor = places) -> Tensor:
                return values.unfold(-1, self.window, 1)[..., places, :]  # (..., N, m)

            kept = x.new_ones(1, 1, dtype=torch.bool) if own is None else near(self.order[k]) != own.unsqueeze(1)
            if bool(self.flags[k]):  # neighbours in a category are in it
                kept = kept & (near(self.ordered[k]) == x[:, k : k + 1])
            # Numbers in ascending order, those of rows that are not kept after all others.
            values = near(rows[~flags])
            if not bool(kept.all()):
                values.masked_fill_(~kept, math.inf)
            values.numpy().sort(-1)  # five times as fast as torch's
            hole = _expected(values, given[~flags].unsqueeze(2), inside=True).squeeze(2)
            best[~flags] = torch.maximum(best[~flags], hole)
            # Categories: how many of these rows should be in that of x, where none is.
            seen = (kept & (near(rows[flags]) == given[flags].unsqueeze(2))).any(2)
            unseen = (share * kept.expand(len(x), self.window).sum(1)).masked_fill(seen, 0.0)
            best[flags] = torch.maximum(best[flags], unseen)
        return best.index_fill(0, (chosen == k).nonzero()[:, 0], 0.0).T

    def _placed(self, x: Tensor) -> Tensor:
        """Return numbers in standard deviations of their principal components, then categories, (N, Q)."""
        white = (x[:, ~self.flags] - self.mean) / self.spread @ self.axes
        return torch.cat([white, x[:, self.flags] * 0.5**0.5], 1)

    def _distance(self, x: Tensor, own: Tensor | None) -> Tensor:
        """Return the mean distance to the nearest rows, (N,)."""
        places, white = self._placed(x), int((~self.flags).sum())
        apart = torch.cdist(places, self.places)
        if own is not None:  # a row has no part in its principal components: the formula of Sherman and Morrison
            its = places[:, :white]
            square = its.square().sum(1, keepdim=True)
            part = (square - its @ self.places[:, :white].T).square() / (len(self.rows) - square).clamp_min(1.0)
            apart = (apart.square() + part).sqrt()
            apart[torch.arange(len(x)), own] = math.inf
        return apart.topk(min(_NEIGHBOURS, len(self.rows) - 1), largest=False).values.mean(1)


def _expected(values: Tensor, x: Tensor, itself: int = 0, inside: bool = False) -> Tensor:
    """Return E of each x, (..., V), among values in ascending order, (..., n): zero where a value is that of x.

    It is how many values the empty interval about x would hold if they were as dense in it as beside it. Beyond all
    values the interval reaches to the first of them. One value is that of x ``itself``, if x is among them. ``inside``:
    zero also where x is nearer to an end than the second value there, and so does not lie in a hole.
    """

    def below(at: Tensor) -> Tensor:
        return torch.searchsorted(values, at.contiguous())

    def up_to(at: Tensor) -> Tensor:
        return at.nextafter(at.new_tensor(math.inf))

    first, n = below(x), values.shape[-1]
    last = first + itself
    left = torch.where(first > 0, values.gather(-1, (first - 1).clamp_min(0)), -math.inf)
    right = torch.where(last < n, values.gather(-1, last.clamp_max(n - 1)), math.inf)
    one, other = left.isfinite(), right.isfinite()
    depth = torch.minimum(x - left, right - x)
    width = torch.where(one & other, right - left, depth)
    lower, upper = first - below(left - width), below(up_to(right + width)) - last
    alone = torch.where(one, lower, torch.where(other, upper, 0))
    found = torch.where(one & other, lower * upper, alone).to(_F64).sqrt()
    seen = right == x
    if inside:
        nearer = x - left <= right - x
        place = below(torch.where(nearer, left - depth, up_to(right + depth)))
        seen |= torch.where(nearer, first - place, place - last) < 2
    return found.masked_fill(seen, 0.0)
