"""In which order statements run, and which of them share a loop.

Between calls of torch lie segments, each a function in C. Within a segment statements over the same shape share a loop
where what one reads was computed for the same element before: it is then a number in a register, and needs no memory
unless something else reads it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from pyro_dropout.engines.generated.statement import Call, Memory, Place, Statement
from pyro_dropout.engines.generated.translation import Translation


@dataclass(eq=False)
class Loop:
    """Statements that run together for each element of a shape."""

    size: tuple[int, ...]
    statements: list[Statement] = field(default_factory=list)


@dataclass(eq=False)
class Segment:
    """Loops that run one after another, and the calls of torch that follow them."""

    loops: list[Loop] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)


class Order:
    """Draws, then segments.

    Attributes:
        draws: random numbers, in the order in which torch draws them.
        segments: what follows.
        stored: the memories of the program's own that must exist.
    """

    def __init__(self, statements: Translation) -> None:
        self.draws: list[Call] = []
        self.segments: list[Segment] = []
        self._level: dict[Statement | Call, int] = {}
        self._loop: dict[Statement, int] = {}
        self._readers: dict[Memory, list[tuple[Statement | Call, Place]]] = {}
        for each in statements.order:
            if isinstance(each, Call) and each.draws:
                self.draws.append(each)
            elif isinstance(each, Call):
                self._place_call(each)
            else:
                self._place_statement(each)
            for place in _read(each):
                self._readers.setdefault(place.memory, []).append((each, place))
        self.stored = self._find_stored(statements.results)

    def _segment(self, level: int) -> Segment:
        while len(self.segments) <= level:
            self.segments.append(Segment())
        return self.segments[level]

    def _place_call(self, call: Call) -> None:
        before = [self._level.get(w, 0) for place in call.reads for w in place.memory.written if w is not call]
        self._level[call] = max(before, default=0)
        self._segment(self._level[call]).calls.append(call)

    def _place_statement(self, one: Statement) -> None:
        earlier: list[tuple[Statement | Call, bool]] = []  # and whether it may be in the same loop
        for place in _read(one):
            earlier += [(w, self.forwards(w, place)) for w in place.memory.written if w in self._level]
        if not one.apart:
            earlier += [(w, False) for w in one.write.memory.written if w in self._level]
        if one.last:
            for reader, place in self._readers.get(one.write.memory, []):
                same = place.rows is None and isinstance(reader, Statement) and not reader.apart
                earlier.append((reader, same and _same_elements(place, one.write)))
        level = 0
        for each, _ in earlier:
            level = max(level, self._level[each] + isinstance(each, Call))
        segment = self._segment(level)
        first = 0
        for each, together in earlier:
            if isinstance(each, Statement) and self._level[each] == level:
                together = together and _domain(each.size) == _domain(one.size)
                first = max(first, self._loop[each] + (not together))
        size = _domain(one.size)
        found = next((k for k in range(first, len(segment.loops)) if segment.loops[k].size == size), None)
        if found is None:
            found = len(segment.loops)
            segment.loops.append(Loop(size))
        segment.loops[found].statements.append(one)
        self._level[one], self._loop[one] = level, found

    def together(self, left: Statement, right: Statement) -> bool:
        """Whether two statements share a loop."""
        return self._level[left] == self._level[right] and self._loop[left] == self._loop[right]

    @staticmethod
    def forwards(writer: Statement | Call, place: Place) -> bool:
        """Whether a place is, element for element, what a statement writes."""
        if not isinstance(writer, Statement) or writer.adds or writer.last or place.rows is not None:
            return False
        return len(place.memory.written) == 1 and _same_elements(place, writer.write)

    def _find_stored(self, results: Iterable[Place]) -> set[Memory]:
        stored = {place.memory for place in results}
        stored |= {each.write.memory for each in self._level if isinstance(each, Statement) and each.adds}
        calls = [*self.draws, *(each for each in self._level if isinstance(each, Call))]
        stored |= {place.memory for call in calls for place in call.writes}
        for memory, readers in self._readers.items():
            for reader, place in readers:
                writers = memory.written
                inside = isinstance(reader, Statement) and len(writers) == 1 and isinstance(writers[0], Statement)
                if not inside or not self.forwards(writers[0], place) or not self.together(writers[0], reader):  # type: ignore[arg-type]
                    stored.add(memory)
        return {memory for memory in stored if memory.given is None}


def _read(each: Statement | Call) -> Iterable[Place]:
    for place in each.reads:
        yield place
        if place.rows is not None:
            yield place.rows


def _domain(size: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(each for each in size if each != 1)


def _same_elements(left: Place, right: Place) -> bool:
    """Whether two places are the same elements in the same order, apart from dimensions of size one."""
    return _strides(left) == _strides(right)


def _strides(place: Place) -> tuple[int, list[tuple[int, int]]]:
    pairs = zip(place.size, place.stride, strict=True)
    return place.offset, [(size, stride) for size, stride in pairs if size != 1]
