"""What the package offers by name. A guide is registered in the file that defines it, and nowhere else.

The command line, the estimators, ``compare``, the contract tests and the tables of the documentation all read this
registry. Names can be read from the source without importing torch, so ``--help`` stays fast.
"""

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

Made = TypeVar("Made", bound=type)


@dataclass(frozen=True)
class GuideEntry:
    """A guide under its name.

    Attributes:
        name: on the command line, in the estimators and in comparisons.
        guide: the class.
        make: builds it with settings for data that nobody has looked at yet, from a model and ``keep``, the
            probability of keeping a row by site.
        density: whether draws of weights have a density with these settings.
        learns_keep: whether it learns what to keep; others never drop a layer's only input.
        compared: whether ``pyro-dropout compare`` takes it by default.
        order: its place in lists.
        alias: another name for it; "" for none.
    """

    name: str
    guide: type
    make: Callable[[Any, Callable[[str], float]], Any]
    density: bool
    learns_keep: bool
    compared: bool
    order: int
    alias: str


@dataclass(frozen=True)
class Listed:
    """What the source says of a guide, without an import: its name, alias, order, and whether it is compared."""

    name: str
    alias: str
    order: int
    compared: bool


_GUIDES: dict[str, GuideEntry] = {}
_FOLDER = Path(__file__).parent / "guides"


def guide(
    name: str,
    *,
    make: Callable[[Any, Callable[[str], float]], Any] | None = None,
    density: bool = True,
    learns_keep: bool = False,
    compared: bool = False,
    order: int = 100,
    alias: str = "",
) -> Callable[[Made], Made]:
    """Register a guide; a decorator of its class.

    Args:
        name: of the guide, on the command line and elsewhere; a literal, since it is read from the source too.
        make: builds the guide from a model and ``keep``, a function of the site; by default ``cls(model)``.
        density: whether its draws of weights have a density.
        learns_keep: whether it learns what to keep.
        compared: whether ``pyro-dropout compare`` takes it by default.
        order: its place in lists; new ones come last.
        alias: another name for it.

    Example:
        >>> import pyro_dropout as pd
        >>> from pyro_dropout.registry import guide, guides
        >>> @guide("point", make=lambda model, keep: Point(model), density=False)
        ... class Point(pd.AutoDropout):
        ...     "Points, without noise."
        >>> guides()["point"].guide is Point, list(guides())[-1]
        (True, 'point')
        >>> from pyro_dropout import registry
        >>> _ = registry._GUIDES.pop("point")
    """

    def register(cls: Made) -> Made:
        known = _GUIDES.get(name)
        if known is not None and _path(known.guide) != _path(cls):
            raise ValueError(f"a guide named {name!r} is registered already: {known.guide.__qualname__}.")
        build = make or (lambda model, keep: cls(model))
        _GUIDES[name] = GuideEntry(name, cls, build, density, learns_keep, compared, order, alias)
        return cls

    return register


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def guides() -> Mapping[str, GuideEntry]:
    """Return all registered guides by name, in order; this imports them."""
    for path in sorted(_FOLDER.glob("*.py")):
        if path.stem != "__init__":
            import_module(f"pyro_dropout.guides.{path.stem}")
    return dict(sorted(_GUIDES.items(), key=lambda item: item[1].order))


def resolve_guide(name: str) -> GuideEntry:
    """Return the guide of this name or alias."""
    known = guides()
    by_alias = {entry.alias: entry for entry in known.values() if entry.alias}
    if name not in known and name not in by_alias:
        raise KeyError(name)
    return known.get(name) or by_alias[name]


def guide_names() -> tuple[str, ...]:
    """Return every name and alias of a guide, names first."""
    known = guides()
    return (*known, *(entry.alias for entry in known.values() if entry.alias))


@cache
def listed_guides() -> tuple[Listed, ...]:
    """Return the guides that the source registers, in order, without importing them."""
    found = [entry for path in sorted(_FOLDER.glob("*.py")) for entry in _registrations(path)]
    return tuple(sorted(found, key=lambda entry: entry.order))


def _registrations(path: Path) -> Iterator[Listed]:
    """Yield the calls of ``guide("name", ...)`` in a file."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "guide" and node.args:
            given: dict[Any, Any] = {
                each.arg: each.value.value for each in node.keywords if isinstance(each.value, ast.Constant)
            }
            name = ast.literal_eval(node.args[0])
            yield Listed(name, given.get("alias", ""), given.get("order", 100), given.get("compared", False))
