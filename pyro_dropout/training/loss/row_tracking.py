"""Tracks draws for each data point: a record of every tensor that was made from one.

A layer turns a placeholder into values whose rows were each made with the draw of one data point (`Rows`). Any other
operation uses it as if it were a draw, or makes values that cannot have a row for each, and then the draws are lost
(`Lost`). The record is kept beside the tensors and never on them: they may be the user's. Whether rows stay apart is
seen in what the model does (``generative/own_rows.py``), and not in the names of its operations.

torch gives a handler only the function and its arguments; what the function does with these comes first in this file.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from pyro.distributions.torch_distribution import ExpandedDistribution, MaskedDistribution
from torch import Tensor
from torch.distributions import Transform
from torch.utils.weak import WeakIdKeyDictionary

from pyro_dropout.engines.torch_internals import without_torch_function
from pyro_dropout.errors import NotFollowedError
from pyro_dropout.mathematics.per_data_point import drawn_per_data_point
from pyro_dropout.mathematics.shapes import base_distribution
from pyro_dropout.protocols import Distribution

Operation = Callable[..., Any]  # a function of torch's
Args = tuple[Any, ...]  # what it is called with
Kwargs = Mapping[str, Any]

# Operations that read only the shape of their first argument, or of all but the first, and not its values.
_NOT_THE_FIRST = {"zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like"}
_NOT_THE_FIRST |= {"new_zeros", "new_ones", "new_empty", "new_full", "new_tensor"}
_ONLY_THE_FIRST = {"expand_as", "view_as", "reshape_as", "type_as", "to"}
# Operations that return Python numbers; and those of them with which distributions check their parameters.
_CHECKS = {"__bool__", "is_nonzero", "equal", "allclose"}
_READS = _CHECKS | {"item", "tolist", "numpy", "__float__", "__int__", "__index__", "__complex__", "__array__"}
# Layers that update their own statistics, which are not part of their output.
STATISTICS = (F.batch_norm, F.instance_norm, torch.batch_norm, torch.instance_norm)
_IN_PLACE = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")}
_IN_PLACE |= {"__ilshift__", "__irshift__", "__setitem__"}
# What is asked of a tensor that its values do not decide: answers are no tensors, and nothing is made from a draw.
_ASKED = ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "is_sparse", "is_nested", "is_cuda")
QUESTIONS = {getattr(getattr(Tensor, name), "__get__") for name in _ASKED}  # noqa: B009 - properties
QUESTIONS |= {Tensor.dim, Tensor.size, Tensor.stride, Tensor.numel, Tensor.__len__, Tensor.is_contiguous}
QUESTIONS |= {Tensor.is_complex, Tensor.is_floating_point, Tensor.element_size}
_OURS = ("pyro_dropout.", "jaxtyping", "typeguard")  # frames between the model and its operation
_HOLDERS = (torch.distributions.Distribution, Transform, list, tuple, dict)


def tensors(values: Iterable[object]) -> Iterator[Tensor]:
    """Yield the tensors among ``values``, and in lists and tuples among them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors(value)


def tensors_in(values: Iterable[object], seen: set[int] | None = None) -> Iterator[Tensor]:
    """Yield all tensors that distributions are made of, including those in their transforms and collections."""
    seen = set() if seen is None else seen
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, _HOLDERS) and id(value) not in seen:
            seen.add(id(value))
            inside = value if isinstance(value, list | tuple | dict) else vars(value)
            yield from tensors_in(inside.values() if isinstance(inside, dict) else inside, seen)


def name_of(func: Operation) -> str:
    """Return the name of an operation, for messages."""
    return str(getattr(func, "__qualname__", None) or getattr(func, "__name__", func))


def carried(func: Operation, args: Args, kwargs: Kwargs) -> Iterator[Tensor]:
    """Yield the tensors whose values an operation uses, and not only their shapes or types."""
    name = getattr(func, "__name__", "")
    if name in _NOT_THE_FIRST:
        return tensors((*args[1:], *kwargs.values()))
    return tensors(args[:1] if name in _ONLY_THE_FIRST else (*args, *kwargs.values()))


def _written_by_name(name: str, args: Args, kwargs: Kwargs) -> list[Tensor]:
    """Return the tensors that an operation changes in place, judging by its name; version counters show the others."""
    in_place = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    in_place = in_place or (name == "__set__" and isinstance(args[-1], Tensor))  # x.data = w
    return [*tensors(args[:1] if in_place else ()), *tensors((kwargs.get("out"),))]


def _version(value: Tensor) -> int:
    return 0 if value.is_inference() else int(value._version)


def _reads_numbers(name: str, only_in_a_check: bool) -> bool:
    """Whether an operation gives the model Python numbers; ``only_in_a_check`` leaves out yes-or-no questions."""
    if name not in _READS:
        return False
    # Pyro's losses sum what the model returned, and check values; the model reads nothing there.
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__")).startswith(_OURS):
        frame = frame.f_back
    asks = "" if frame is None else str(frame.f_globals.get("__name__"))
    return not asks.startswith(("pyro.", "torch.distributions")) and not (only_in_a_check and name in _CHECKS)


def not_followed(site: str, reason: str, advice: str = "") -> NotFollowedError:
    """Return the error for a site whose draws for each data point would get lost."""
    advice = advice or "Use shared draws (per_example=False)."
    return NotFollowedError(f"site {site!r} cannot be drawn for each data point: {reason}. {advice}", site, reason)


@dataclass(frozen=True)
class Rows:
    """A tensor with rows that were each made with one draw of these sites; each with the number of its draws."""

    counts: Mapping[str, int]


@dataclass(frozen=True)
class Lost:
    """A tensor in which the draws are lost, and how a site got there."""

    site: str
    operation: str
    mixes: bool = False

    def refusal(self, name: str) -> NotFollowedError:
        """Return the error for a site ``name`` that was reached this way."""
        fault, advice = "mixes data points, each of which has its own draw", ""
        if not self.mixes:
            fault = "is not a layer"
            advice = "Use F.linear or @ with data points first, or shared draws (per_example=False)."
        return not_followed(self.site, f"it reaches {name!r} through {self.operation}, which {fault}", advice)


Track = Rows | Lost


class Record:
    """Which tensors were made from placeholders; a tensor is forgotten with its last use."""

    def __init__(self) -> None:
        self._tracks: MutableMapping[Tensor, Track] = WeakIdKeyDictionary()
        self._changed = False  # whether a tensor was changed in place, and its views with it

    def of(self, value: Tensor) -> Track | None:
        """Return what is known about a tensor; a view changes with its base."""
        found = self._tracks.get(value)
        if found is None and self._changed and value._base is not None:
            found = self._tracks.get(value._base)
        return found

    def _note(self, made: Iterable[Tensor], track: Track | None) -> None:
        for value in made:
            if track is not None and drawn_per_data_point(value) is None:
                self._tracks[value] = track

    def _merged(self, values: Iterable[Tensor], more: Mapping[str, int] | None = None) -> Track | None:
        """Return the record of what is made of several tensors, and of draws of ``more`` sites; None if of no draw."""
        counts = dict(more or {})
        for track in [track for value in values if (track := self.of(value)) is not None]:
            if isinstance(track, Lost):
                return track
            counts |= track.counts
        return Rows(counts) if counts or more is not None else None

    def after_layer(self, result: object, args: Args, kwargs: Kwargs) -> None:
        """Record the output of a rewritten layer: its rows have draws of the placeholders among its inputs."""
        given = list(tensors((*args, *kwargs.values())))
        drawn = {recipe.site: recipe.count or 0 for recipe in filter(None, map(drawn_per_data_point, given))}
        self._note(tensors((result,)), self._merged(given, drawn))

    def run(self, func: Operation, args: Args, kwargs: Kwargs) -> object:
        """Run an operation that is not a layer, and record what it has made and changed."""
        name, operation = str(getattr(func, "__name__", "")), name_of(func)
        given = list(tensors((*args, *kwargs.values())))
        carriers = list(carried(func, args, kwargs))
        lost = self._lost(carriers, operation)
        if lost is not None and _reads_numbers(name, only_in_a_check=lost.mixes):
            raise not_followed(lost.site, f"the model reads its numbers by {operation}")
        changed = _written_by_name(name, args, kwargs)
        recipe = next(filter(None, map(drawn_per_data_point, changed)), None)
        if recipe is not None:
            advice = "Make a new tensor, or use shared draws (per_example=False)."
            raise not_followed(recipe.site, f"the model changes it in place ({operation})", advice)
        versions = list(map(_version, given))
        result = func(*args, **kwargs)
        if func not in STATISTICS:
            changed += [value for value, before in zip(given, versions, strict=True) if _version(value) != before]
        # An input that is returned unchanged has not been touched: x.type_as(w) may be x itself.
        made = [value for value in tensors((result,)) if not any(value is other for other in given)]
        if changed:
            self._changed = True
            made += [*changed, *(value._base for value in changed if value._base is not None)]
        for value in made:
            self._note([value], lost or self._rows(operation, carriers, value))
        return result

    def _lost(self, carriers: list[Tensor], operation: str) -> Lost | None:
        """Return how the first placeholder got lost, here or earlier."""
        for value in carriers:
            recipe, track = drawn_per_data_point(value), self.of(value)
            if recipe is not None:
                return Lost(recipe.site, operation)
            if isinstance(track, Lost):
                return track
        return None

    def _rows(self, operation: str, carriers: list[Tensor], value: Tensor) -> Track | None:
        """Return the record of an operation's result, for inputs whose rows each belong to a data point."""
        track = self._merged(carriers)
        if isinstance(track, Rows) and any(count and value.numel() % count for count in track.counts.values()):
            return Lost(next(iter(track.counts)), operation, mixes=True)
        return track

    def check(self, name: str, fn: Distribution, *others: object) -> None:
        """Raise unless the distribution of a site is valid with a draw for each data point.

        ``others`` is what else its density is made of: an observed value, a scale, a mask.
        """
        with without_torch_function():
            parts = list(tensors_in((fn, *others)))
            track = self._lost(parts, "a parameter of a distribution") or self._merged(parts)
            if isinstance(track, Lost):
                raise track.refusal(name)
            base = base_distribution(fn, MaskedDistribution, ExpandedDistribution)
            size = torch.Size(getattr(base, "batch_shape", ())).numel()  # some of Pyro's are plain tuples
        for site, count in track.counts.items() if track is not None else ():
            if count and size % count:
                raise Lost(site, f"one {type(fn).__name__} for all points", mixes=True).refusal(name)
