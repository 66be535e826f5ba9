"""Tracks draws for each data point: a record of every tensor that was made from one.

A layer turns a placeholder into values whose rows were each made with the draw of one data point (`Rows`). Any other
operation uses it as if it were a draw, or mixes data points that have their own draws, and then the draws are lost
(`Lost`). The record is kept beside the tensors and never on them: they may be the user's.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from pyro.distributions.torch_distribution import ExpandedDistribution, MaskedDistribution
from torch import Tensor

from pyro_dropout.engines.torch_internals import without_torch_function
from pyro_dropout.errors import NotFollowedError
from pyro_dropout.mathematics.per_data_point import drawn_per_data_point
from pyro_dropout.mathematics.shapes import base_distribution
from pyro_dropout.protocols import Distribution
from pyro_dropout.training.loss import operations
from pyro_dropout.training.loss.operations import Args, Kwargs, Notes, Operation, tensors, tensors_in

# How many rows there are, and what has been selected since: row n of two tensors is the same point if these agree.
Order = tuple[int, tuple[object, ...]]

_PARAMETER = "a parameter of a distribution"


@dataclass(frozen=True)
class Rows:
    """A tensor with rows that were each made with one draw of each of these sites."""

    orders: Mapping[str, Order]


@dataclass(frozen=True)
class Lost:
    """A tensor in which the draws are lost, and how a site got there."""

    site: str
    operation: str
    mixes: bool = False

    def refusal(self, name: str) -> NotFollowedError:
        """Return the error for a site ``name`` that was reached this way."""
        if self.mixes:
            fault, advice = "mixes data points, each of which has its own draw", "Use"
        else:
            fault = "is not a layer that it can rewrite"
            advice = "Use F.linear or @ with data points first, leave the site out with per_example(sites=...), or use"
        return NotFollowedError(
            f"per_example() cannot follow site {self.site!r} to {name!r}: it went through {self.operation}, which"
            f" {fault}. {advice} shared draws (per_example=False).",
            self.site,
            f"it reaches {name!r} through {self.operation}, which {fault.removesuffix(' that it can rewrite')}",
        )


Track = Rows | Lost


class Record:
    """Which tensors were made from placeholders; a tensor is forgotten with its last use."""

    def __init__(self) -> None:
        self._tracks = Notes[Track]()
        self._changed = False  # whether a tensor was changed in place, and its views with it
        self._held: list[object] = []  # indices, kept alive so that an id is unique

    def of(self, value: Tensor) -> Track | None:
        """Return what is known about a tensor; a view changes with its base."""
        found = self._tracks.get(value)
        if found is None and self._changed and value._base is not None:
            found = self._tracks.get(value._base)
        return found

    def after_layer(self, result: object, args: Args, kwargs: Kwargs, operation: str) -> None:
        """Record the output of a rewritten layer: its rows have draws of the placeholders among its inputs."""
        given = list(tensors((*args, *kwargs.values())))
        recipes = [recipe for value in given if (recipe := drawn_per_data_point(value)) is not None]
        drawn = [Rows({recipe.site: (recipe.count or 0, ())}) for recipe in recipes]
        before = [track for value in given if (track := self.of(value)) is not None]
        track = _merged([*before, *drawn], operation)
        for value in tensors((result,)):
            if drawn_per_data_point(value) is None:
                self._tracks[value] = track

    def run(self, func: Operation, args: Args, kwargs: Kwargs) -> object:
        """Run an operation that is not a layer, and record what it has made and changed."""
        name, operation = str(getattr(func, "__name__", "")), operations.name_of(func)
        given = list(tensors((*args, *kwargs.values())))
        carriers = list(operations.carried(func, args, kwargs))
        lost = self._lost(carriers, operation)
        if lost is not None and operations.reads_numbers(name, only_in_a_check=lost.mixes):
            raise NotFollowedError(
                f"the model reads the numbers of site {lost.site!r} ({operation}), which differ for every data point"
                " under per_example(). Use shared draws (per_example=False).",
                lost.site,
                f"the model reads its numbers by {operation}",
            )
        changed = operations.written_by_name(name, args, kwargs)
        recipe = next(filter(None, map(drawn_per_data_point, changed)), None)
        if recipe is not None:
            raise NotFollowedError(
                f"the model changes the draw of site {recipe.site!r} in place ({operation}), which per_example() cannot"
                " follow. Make a new tensor, or use shared draws (per_example=False).",
                recipe.site,
                f"the model changes it in place ({operation})",
            )
        versions = [operations.version(value) for value in given]
        result = func(*args, **kwargs)
        if func not in operations.STATISTICS:
            changed += [v for v, before in zip(given, versions, strict=True) if operations.version(v) != before]
        # An input that is returned unchanged has not been touched: x.type_as(w) may be x itself.
        made = [value for value in tensors((result,)) if not any(value is other for other in given)]
        if changed:
            self._changed = True
            made += [*changed, *(value._base for value in changed if value._base is not None)]
        for value in made:
            track = lost or self._rows(name, operation, args, kwargs, carriers, value)
            if track is not None and drawn_per_data_point(value) is None:
                self._tracks[value] = track
        return result

    def _lost(self, carriers: list[Tensor], operation: str) -> Lost | None:
        """Return how the first placeholder got lost, here or earlier."""
        for value in carriers:
            recipe, track = drawn_per_data_point(value), self.of(value)
            if recipe is not None:
                return Lost(recipe.site, _PARAMETER if operations.in_a_distribution() else operation)
            if isinstance(track, Lost):
                return track
        return None

    def _rows(
        self, name: str, operation: str, args: Args, kwargs: Kwargs, carriers: list[Tensor], value: Tensor
    ) -> Track | None:
        """Return the record of an operation's result, for inputs whose rows each belong to a data point."""
        found = [track for each in carriers if (track := self.of(each)) is not None]
        if not found:
            return None
        track = _merged(found, operation)
        if isinstance(track, Lost):
            return track
        counts = {count for count, _ in track.orders.values()}
        key = self._picked(name, args, counts)
        if key is not None:
            count = value.shape[0] if value.dim() else 1
            return Rows({site: (count, (*order, key)) for site, order in track.orders.items()})
        subject, right = carriers[0], kwargs.get("weight", args[1] if len(args) > 1 else None)
        mixes = any(count and value.numel() % count for count in counts)
        if name in operations.PRODUCTS and isinstance(right, Tensor):
            mixes = mixes or (right.dim() <= 2 and self.of(right) is not None)
        if subject.dim() and subject.shape[0] in counts - {1}:
            mixes = mixes or operations.along_rows(name, subject, args, kwargs)
        return Lost(next(iter(track.orders)), operation, mixes=True) if mixes else track

    def _picked(self, name: str, args: Args, counts: set[int]) -> str | int | None:
        """Return a key for the points that an index selects or moves; None if all stay where they are."""
        if name not in ("__getitem__", "__setitem__"):
            return None
        index = args[1][0] if isinstance(args[1], tuple) and args[1] else args[1]
        if isinstance(index, int | slice):  # along the dimension of points, or another one
            counts_points = args[0].dim() > 0 and args[0].shape[0] in counts
            return repr(index) if counts_points and index != slice(None) else None
        if index is None or index is Ellipsis:
            return None
        self._held.append(index)
        return id(index)

    def check(self, name: str, fn: Distribution, *others: object) -> Mapping[str, Order]:
        """Raise unless the distribution of a site is valid with a draw for each data point; return its rows' order.

        ``others`` is what else its density is made of: an observed value, a scale, a mask.
        """
        with without_torch_function():
            parts = list(tensors_in((fn, *others)))
            lost = self._lost(parts, _PARAMETER)
            track = lost or _merged([t for value in parts if (t := self.of(value)) is not None], "its distribution")
            if isinstance(track, Lost):
                raise track.refusal(name)
            size = _independent(fn).numel()
        for site, (count, _) in track.orders.items():
            if count and size % count:
                raise Lost(site, f"one {type(fn).__name__} for all points", mixes=True).refusal(name)
        return track.orders


def _merged(tracks: Iterable[Track], operation: str) -> Track:
    """Return the record of what an operation makes of several tensors; rows of a site in two orders mix its draws."""
    orders: dict[str, Order] = {}
    for track in tracks:
        if isinstance(track, Lost):
            return track
        for site, order in track.orders.items():
            if orders.setdefault(site, order) != order:
                return Lost(site, operation, mixes=True)
    return Rows(orders)


def _independent(fn: Distribution) -> torch.Size:
    """Return the shape of the independent parts of a distribution."""
    base = base_distribution(fn, MaskedDistribution, ExpandedDistribution)
    return torch.Size(getattr(base, "batch_shape", ()))  # some of Pyro's are plain tuples
