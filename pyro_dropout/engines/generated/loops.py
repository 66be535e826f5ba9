"""Loops over elements, their order, and which are written as one: what plain C and CUDA C have in common."""

import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from pyro_dropout.engines.generated.values import Indices, Shape, Value, flat_index

Phases = Sequence[Sequence[Sequence["Loop"]]]  # loops that are written as one, in groups, between two barriers each


@dataclass(eq=False)
class Loop:
    """What computes one tensor.

    Attributes:
        name: of the tensor.
        shape: the shape of the loop over elements; empty for one number.
        over: the shape of the loop over terms; None if there is none.
        kind: how terms are joined.
        dtype: the type of the tensor.
        text: the expression of an element or a term.
        tile: how a product of matrices is computed; None if it is none.
        cost: about how many operations an element or a term takes.
        reads: tensors made by other loops, and whether all are read only where this loop writes.
        fixed: whether it always computes the same.
        shared: whether it is parts of one sum whose terms all threads share.
    """

    name: str
    shape: Shape
    over: Shape | None
    kind: str
    dtype: torch.dtype
    text: str = ""
    tile: Any = None
    cost: int = 0
    reads: dict[str, bool] = field(default_factory=dict)
    fixed: bool = False
    shared: bool = False

    @property
    def named(self) -> set[str]:
        """The tensors that it reads, and numbers of the state."""
        return set(re.findall(r"\b\w+(?=\[)|\b\w+_now\b", self.text if self.tile is None else self.tile.text))

    @property
    def in_register(self) -> bool:
        """Whether it is one number, which each thread has for itself."""
        return prod(self.shape) == 1 and self.tile is None

    @property
    def by_element(self) -> bool:
        """Whether each element is computed from others alone, without a sum."""
        return self.over is None and self.tile is None and not self.in_register

    @property
    def sizes(self) -> Shape:
        """Its sides that are not one."""
        return tuple(size for size in self.shape if size != 1)

    @property
    def key(self) -> object:
        """Loops with the same key can be written as one."""
        if self.tile is not None:
            return self.shape, self.tile.rows, self.tile.columns, self.tile.lanes
        return self.shared, self.sizes, None if self.over is None else tuple(n for n in self.over if n != 1)

    @property
    def own(self) -> Indices:
        """The indices of an element."""
        return tuple("0" if size == 1 else f"i{k}" for k, size in enumerate(self.shape))


class Loops:
    """A list of loops, to be put in order and written down."""

    def __init__(self) -> None:
        self._loops: dict[str, Loop] = {}
        self._places: dict[str, tuple[int, torch.dtype]] = {}  # the tensors in memory: sizes and types
        self._kept: set[str] = set()  # what is read after all loops
        self._in_place: dict[str, str] = {}  # what loops themselves write over another one
        self._order: Phases = []

    def stored(self, name: str, value: Value, over: Shape | None = None, kind: str = "") -> Value:
        """Let a loop compute a tensor, and return it as what the loop has written."""
        shape = value.shape if over is None else value.shape[: len(value.shape) - len(over)]
        loop = self._added(Loop(name, shape, over, kind, value.dtype, cost=value.cost), value)
        return Value(shape, value.dtype, lambda at: self._read(loop, at), name=name)

    def _added(self, loop: Loop, value: Value) -> Loop:
        """Add a loop that computes elements, or sums of them."""
        terms = () if loop.over is None else tuple("0" if size == 1 else f"r{k}" for k, size in enumerate(loop.over))
        loop.text = value.at((loop.own + terms)[-len(value.shape) :] if value.shape else ())
        if not loop.in_register:
            self._places[loop.name] = prod(loop.shape), loop.dtype
        return self._entered(loop)

    def _entered(self, loop: Loop) -> Loop:
        """Add a loop, with what its text reads of others."""
        own = flat_index(loop.own, loop.shape) if loop.by_element else None
        text = loop.text if loop.tile is None else loop.tile.text
        for name, place in re.findall(r"\b([a-zA-Z_]\w*)\b(?:\[([^\[\]]*)\])?", text):
            other = self._writer(name)
            if other is not None:
                same = place == own and loop.sizes == other.sizes and not other.shared
                loop.reads[other.name] = same and loop.reads.get(other.name, True)
        self._loops[loop.name] = loop
        return loop

    def _writer(self, name: str) -> Loop | None:
        """Return the loop that writes the memory of this name; None if none does."""
        return self._loops.get(name)

    def product(self, name: str, left: Value, right: Value, shape: Shape, dtype: torch.dtype) -> Value:
        """Let a loop compute a product of matrices, (..., m, k) and (..., k, n), and return it."""
        raise NotImplementedError

    def has(self, name: str | None) -> bool:
        """Whether a loop computes the tensor of this name."""
        return name in self._loops

    @staticmethod
    def _read(loop: Loop, at: Indices) -> str:
        return loop.name if loop.in_register else f"{loop.name}[{flat_index(at, loop.shape)}]"

    def written(self, kept: Sequence[str] = (), over: Mapping[str, str] | None = None) -> list[str]:
        """Return the lines of all loops, in an order with few barriers.

        Loops write over other tensors (``over``) themselves where they can; ``is_over`` says which do.
        """
        self._kept = set(kept)
        phases = self._phases({name: loop for name, loop in self._loops.items() if not loop.fixed})
        self._order, self._in_place = phases, self._overwritten(phases, over or {})
        return self._lines(phases)

    def is_over(self, name: str) -> bool:
        """Whether a loop has written its tensor over the one that it replaces, after ``written``."""
        return name in self._in_place

    def _phases(self, left: dict[str, Loop]) -> Phases:
        """Return loops that are written as one, one group after another, between two barriers each."""
        raise NotImplementedError

    def _lines(self, phases: Phases) -> list[str]:
        raise NotImplementedError

    def _next(self, left: dict[str, Loop], visible: Set[str], fresh: set[str]) -> list[Loop]:
        """Take loops away that can be written as one, and need no barrier before; there may be none."""
        ready = [loop for loop in left.values() if self._ready(loop, left, visible, fresh)]
        group = [loop for loop in ready if loop.in_register]
        if ready and not group:
            found: dict[object, list[Loop]] = {}
            for loop in ready:
                found.setdefault(loop.key, []).append(loop)
            group = max(found.values(), key=len)
        if not group:
            return []
        first, more = group[0], group
        here = fresh if first.by_element else set()  # threads share out sums and products in ways of their own
        while more:
            for loop in more:
                del left[loop.name]
                here.add(loop.name)
            # what reads these where they are written
            rest = [] if first.in_register or first.shared else [x for x in left.values() if x.by_element]
            rest = [x for x in rest if x.sizes == first.sizes and (first.by_element or not here.isdisjoint(x.reads))]
            more = [loop for loop in rest if self._ready(loop, left, visible, here)]
            group = [*group, *more]
        return group

    def _ready(self, loop: Loop, left: Mapping[str, Loop], visible: Set[str], fresh: Set[str]) -> bool:
        """Whether all that a loop reads is visible, or was written by the same thread (``fresh``)."""
        for name, own in loop.reads.items():
            if name in left:
                return False
            if name in visible or self._loops[name].in_register:
                continue
            if not (own and name in fresh):
                return False
        return True

    def _overwritten(self, phases: Phases, over: Mapping[str, str]) -> dict[str, str]:
        """Return which loops write over another tensor themselves, of those that are to.

        From their phase on no other loop reads that tensor; those that are written as one read their own element of it.
        """
        found: dict[str, str] = {}
        later: set[str] = set()  # read in later phases
        for groups in reversed(phases):
            for group in groups:
                heads = [loop for loop in group if not loop.by_element]
                named = {name for each in groups if each is not group for loop in each for name in loop.named}
                named |= later.union(*(loop.named for loop in heads))
                each = [loop for loop in group if loop.by_element]
                for loop in each:
                    target = over.get(loop.name)
                    if target and not {loop.name, target} & named and all(self._own_element(x, target) for x in each):
                        found[loop.name] = target
            later |= {name for group in groups for loop in group for name in loop.named}
        return found

    def _expressions(
        self, loops: Sequence[Loop], known: dict[str, str], prefix: str
    ) -> Iterator[tuple[Loop, str, str | None]]:
        """Yield loops that are written as one, each with its expression, and where its tensor is stored, if it is.

        What one of them needs of another stays a number: ``known`` has its name, and is given those of these loops.
        """
        mine = {loop.name for loop in loops}
        elsewhere = {name for other in self._loops.values() if other.name not in mine for name in other.reads}
        for loop in loops:
            text = loop.text
            for name in known.keys() & loop.reads:
                text = re.sub(rf"\b{name}\[[^\[\]]*\]", known[name], text)
            target = self._in_place.get(loop.name, loop.name) if loop.name in elsewhere | self._kept else None
            if target != loop.name:
                self._places.pop(loop.name, None)
            known.setdefault(loop.name, f"{prefix}{loop.name}")
            yield loop, text, target

    def _own_place(self, loop: Loop, name: str) -> str:
        """Return the place in memory of a loop's own element of a tensor."""
        return f"{name}[{flat_index(loop.own, loop.shape)}]"

    def _own_element(self, loop: Loop, name: str) -> bool:
        """Whether a loop reads nothing of a tensor but its own element."""
        places = re.findall(rf"\b{name}\[[^\[\]]*[\[\]]?", loop.text)
        return all(place == self._own_place(loop, name) for place in places)
