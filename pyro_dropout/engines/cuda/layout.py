"""Where the tensors of a kernel lie: those that are not needed at the same time share memory."""

from collections.abc import Mapping, Sequence

import torch

from pyro_dropout.engines.cuda.values import c_type

_WORD = 8  # bytes


def laid_out(
    places: Mapping[str, tuple[int, torch.dtype]],
    lives: Mapping[str, tuple[int, int]],
    start: int,
    most: int | None = None,
) -> tuple[list[str], int, int]:
    """Return the lines that say where tensors lie, the words of ``memory`` with ``start``, and those of ``far``."""
    ends, taken = {"memory": start, "far": 0}, list[tuple[str, int, int, int, int]]()
    lines = []
    for name, (size, dtype) in sorted(places.items(), key=lambda each: lives.get(each[0], (-1, 0))):
        words = -(-size * dtype.itemsize // _WORD)
        first, last = lives.get(name, (-1, 10**9))
        for space in ("memory", "far"):
            beside = [(a, b) for s, a, b, begin, end in taken if s == space and first <= end and begin <= last]
            place = _gap(beside, start if space == "memory" else 0, words)
            if space == "far" or most is None or place + words <= most:
                break
        taken.append((space, place, place + words, first, last))
        ends[space] = max(ends[space], place + words)
        lines.append(f"{c_type(dtype)}* {name} = ({c_type(dtype)}*)({space} + {place});")
    return lines, ends["memory"], ends["far"]


def _gap(taken: Sequence[tuple[int, int]], start: int, words: int) -> int:
    """Return the first place from ``start`` where so many words are free."""
    place = start
    for begin, end in sorted(taken):
        if place + words <= begin:
            break
        place = max(place, end)
    return place
