"""Names that can be told apart, for rows and for files."""

import itertools
from collections.abc import Iterable


def distinct(names: Iterable[str], separator: str = " ") -> list[str]:
    """Return the names with a number after each that came before, in the same or another case.

    Example:
        >>> distinct(["a", "b", "a", "A"])
        ['a', 'b', 'a 2', 'A 3']
    """
    found: dict[str, str] = {}
    for name in names:
        numbered = (f"{name}{separator}{k}" for k in itertools.count(2))
        chosen = next(each for each in itertools.chain([name], numbered) if each.casefold() not in found)
        found[chosen.casefold()] = chosen
    return list(found.values())
