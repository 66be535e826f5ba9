"""What the package offers by name: guides and scores. Each is registered in the file that defines it.

The command line, the estimators, ``compare``, its report and the contract tests read this registry. Names of guides can
be read from the source without importing torch, so ``--help`` stays fast.
"""

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

# The subpackages, in the order in which they may import: each from itself and from those before it.
FLOORS = (
    "mathematics",
    "generative",
    "guides",
    "training",
    "prediction",
    "judging",
    "references",
    "tables",
    "datasets",
    "comparison",
    "sklearn",
    "cli",
)

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


def _path(thing: Any) -> str:
    return f"{thing.__module__}.{thing.__qualname__}"


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


# --- scores -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScoreEntry:
    """A score of predictions on held-out data: one column of a comparison.

    Attributes:
        name: of the column.
        compute: returns the score of a prediction and its targets: a number, or one for each point.
        heading: of the column, as people read it.
        meaning: what it says, in a sentence or two.
        better: "more", "less", "one" (the nearer to 1), "level" (the nearer to 0.95), or "" where none is better.
        digits: after the decimal point.
        of: the kinds of targets that have it, of "any", "numbers", "normal" (Gaussian noise) and "classes".
        order: its place in the table.
    """

    name: str
    compute: Callable[[Any, Any], Any]
    heading: str
    meaning: str
    better: str
    digits: int
    of: tuple[str, ...]
    order: int


_SCORES: dict[str, ScoreEntry] = {}
_BETTER = ("more", "less", "one", "level", "")
_KINDS = ("any", "numbers", "normal", "classes")
Computed = TypeVar("Computed", bound=Callable[..., Any])


def score(
    name: str,
    *,
    heading: str,
    meaning: str,
    better: str,
    of: tuple[str, ...] = ("any",),
    digits: int = 3,
    order: int = 100,
) -> Callable[[Computed], Computed]:
    """Register a function of a prediction and its targets as a score of comparisons; a decorator.

    Args:
        name: of the column.
        heading: of the column, as people read it.
        meaning: what it says, in a sentence or two.
        better: "more", "less", "one" (the nearer to 1), "level" (the nearer to 0.95), or "" where none is better.
        of: the kinds of targets that have it, of "any", "numbers", "normal" and "classes".
        digits: after the decimal point.
        order: its place in the table; new ones come after those of the package.

    Example:
        >>> from pyro_dropout import registry
        >>> @registry.score("bias", heading="bias", meaning="Mean of y - E[y].", better="", of=("numbers",))
        ... def bias(prediction, y):
        ...     return (y - prediction.mean).mean()
        >>> registry.scores()["bias"].compute is bias
        True
        >>> _ = registry._SCORES.pop("bias")
    """
    if better not in _BETTER or not set(of) <= set(_KINDS):
        raise ValueError(
            f"better must be one of {_BETTER} and of must hold some of {_KINDS}; got {better!r} and {of!r}."
        )

    def register(function: Computed) -> Computed:
        known = _SCORES.get(name)
        if known is not None and _path(known.compute) != _path(function):
            raise ValueError(f"a score named {name!r} is registered already: {_path(known.compute)}.")
        _SCORES[name] = ScoreEntry(name, function, heading, meaning, better, digits, of, order)
        return function

    return register


def scores() -> Mapping[str, ScoreEntry]:
    """Return all registered scores by name, in order; this imports them."""
    for path in sorted((Path(__file__).parent / "judging" / "scores").glob("*.py")):
        if path.stem != "__init__":
            import_module(f"pyro_dropout.judging.scores.{path.stem}")
    return dict(sorted(_SCORES.items(), key=lambda item: item[1].order))
