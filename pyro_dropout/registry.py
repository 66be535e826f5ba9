"""What there is by name: guides, likelihoods and scores. Each is registered in the file that defines it.

The command line, the estimators, ``compare``, its report and the contract tests read this registry. Names of guides can
be read from the source without importing torch, so ``--help`` stays fast. Another package registers its own by entry
points that name their modules, in the groups "pyro_dropout.guides", "pyro_dropout.likelihoods", "pyro_dropout.scores"
and "pyro_dropout.problems" (those of ``benchmark``)::

    [project.entry-points."pyro_dropout.guides"]
    radial = "my_package.radial"
"""

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pyro_dropout.errors import warn_caller

if TYPE_CHECKING:  # importing torch takes seconds
    from torch import Tensor

# The subpackages, in the order in which they may import: each from itself and from those before it.
_ORDER = """
    mathematics engines generative guides training prediction judging references
    tables datasets comparison benchmark tabular sklearn cli
"""
FLOORS = tuple(_ORDER.split())

Make = Callable[..., Any]  # a guide or an ensemble, of a model, keep by site, and the options of the entry
Made = TypeVar("Made", bound=type)
Computed = TypeVar("Computed", bound=Callable[..., "float | Tensor"])
_HERE = Path(__file__).parent


def _check_new(kind: str, name: str, known: Any, new: Any) -> None:
    """Raise if other code has the name; the same code has it when its module is reloaded."""
    if known is not None and (known.__module__, known.__qualname__) != (new.__module__, new.__qualname__):
        raise ValueError(f"a {kind} named {name!r} is registered already: {known.__qualname__}.")


# --- guides -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Listed:
    """What the source says of a guide, without an import; the attributes are arguments of ``guide``."""

    name: str
    alias: str = ""
    order: int = 100
    compared: bool = False
    options: tuple[str, ...] = ()
    method: str = "mc"


@dataclass(frozen=True, kw_only=True)
class GuideEntry(Listed):
    """A guide under its name: its class, and the arguments of ``guide``."""

    guide: type
    make: Make
    density: bool = True
    per_site: bool = True


_GUIDES: dict[str, GuideEntry] = {}


def guide(name: str, *, make: Make | None = None, **settings: Any) -> Callable[[Made], Made]:
    """Register a guide; a decorator of its class.

    Args:
        name: on the command line, in the estimators and in comparisons; a literal, since it is read from the source
            too.
        make: builds the guide with settings for data that nobody has looked at yet, from a model and ``keep``, the
            probability of keeping a row by site; by default ``cls(model)``.
        settings: ``density=False`` if draws of weights have no density with these settings; ``compared=True`` if
            ``pyro-dropout compare`` takes it by default; ``order``, its place in lists (new ones come last); ``alias``,
            another name; ``options``, what ``make`` takes by keyword as well, such as "members"; ``method``, how the
            command line and the estimators predict with it, "mc" or "linearised"; ``per_site=False`` if it is no
            ``SiteGuide``, with one distribution per site, which any SVI can train.

    Example:
        >>> import pyro_dropout as pdrop
        >>> from pyro_dropout.registry import guide, guides
        >>> @guide("point", make=lambda model, keep: Point(model), density=False)
        ... class Point(pdrop.AutoDropout):
        ...     "Points, without noise."
        >>> guides()["point"].guide is Point, list(guides())[-1]
        (True, 'point')
        >>> from pyro_dropout import registry
        >>> _ = registry._GUIDES.pop("point")
    """

    def register(cls: Made) -> Made:
        known = _GUIDES.get(name)
        _check_new("guide", name, known and known.guide, cls)
        build = make or (lambda model, keep: cls(model))
        _GUIDES[name] = GuideEntry(name=name, guide=cls, make=build, **settings)
        return cls

    return register


def import_all(folder: str, kind: str = "") -> None:
    """Import every module of a folder of the package, and what other packages add to its kind, so all is registered."""
    for path in sorted((_HERE / folder).glob("*.py")):
        if path.stem != "__init__":
            import_module(f"pyro_dropout.{folder.replace('/', '.')}.{path.stem}")
    for point in _other_packages(kind or folder.rpartition("/")[2]):
        try:
            import_module(point.module)
        except Exception as reason:  # whatever is wrong with another package must not stop this one
            said = f"{type(reason).__name__}: {reason}"
            warn_caller(f"{point.name!r}, which another package registers, is left out. {said}")


@cache
def _other_packages(kind: str) -> tuple[EntryPoint, ...]:
    """Return the modules that other packages register for a kind: "guides", "likelihoods", "scores" or "problems"."""
    return tuple(sorted(entry_points(group=f"pyro_dropout.{kind}")))


def guides() -> Mapping[str, GuideEntry]:
    """Return all registered guides by name, in order; this imports them."""
    import_all("guides")
    return dict(sorted(_GUIDES.items(), key=lambda item: item[1].order))


def resolve_guide(name: str) -> GuideEntry:
    """Return the guide of this name or alias."""
    known = guides()
    return {**{entry.alias: entry for entry in known.values() if entry.alias}, **known}[name]


def guide_names() -> tuple[str, ...]:
    """Return every name and alias of a guide, names first."""
    known = guides()
    return (*known, *(entry.alias for entry in known.values() if entry.alias))


@cache
def listed_guides() -> tuple[Listed, ...]:
    """Return the guides that the source registers, in order, without importing them."""
    files = sorted((_HERE / "guides").glob("*.py"))
    specs = [find_spec(point.module) for point in _other_packages("guides")]
    files += [Path(spec.origin) for spec in specs if spec is not None and spec.origin]
    return tuple(sorted((each for path in files for each in _registrations(path)), key=lambda entry: entry.order))


def _registrations(path: Path) -> Iterator[Listed]:
    """Yield the decorators ``@guide("name", ...)`` of a file's classes."""
    classes = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.ClassDef)]
    for node in (each for made in classes for each in made.decorator_list):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "guide" and node.args:
            literals = [each for each in node.keywords if isinstance(each.value, ast.Constant | ast.Tuple)]
            given = {each.arg: ast.literal_eval(each.value) for each in literals}
            known = {field.name: given[field.name] for field in fields(Listed) if field.name in given}
            yield Listed(name=ast.literal_eval(node.args[0]), **known)


# --- likelihoods ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LikelihoodEntry:
    """A likelihood under its name: its class, and the arguments of ``likelihood``."""

    name: str
    likelihood: type
    make: Callable[[], Any]
    outputs: int


_LIKELIHOODS: dict[str, LikelihoodEntry] = {}


def likelihood(name: str, *, make: Callable[[], Any] | None = None, outputs: int = 1) -> Callable[[Made], Made]:
    """Register a likelihood; a decorator of its class. The contract tests then hold it to what all of them promise.

    Args:
        name: of the likelihood.
        make: builds one with settings for data that nobody has looked at yet; by default ``cls()``.
        outputs: of a network with one target.

    Example:
        >>> import pyro_dropout as pdrop
        >>> from pyro_dropout import registry
        >>> list(registry.likelihoods())[:3]
        ['bernoulli', 'categorical', 'poisson']
        >>> registry.likelihoods()["gaussian"].make().tau.item()
        1.0
    """

    def register(cls: Made) -> Made:
        known = _LIKELIHOODS.get(name)
        _check_new("likelihood", name, known and known.likelihood, cls)
        _LIKELIHOODS[name] = LikelihoodEntry(name, cls, make or cls, outputs)
        return cls

    return register


def likelihoods() -> Mapping[str, LikelihoodEntry]:
    """Return all registered likelihoods by name; this imports them."""
    import_all("generative/likelihoods")
    return dict(_LIKELIHOODS)


# --- scores -----------------------------------------------------------------------------------------------------------


_BETTER = {
    "more": "more is better",
    "less": "less is better",
    "one": "the nearer to 1 the better",
    "level": "the nearer to 0.95 the better",
    "": "",
}
_KINDS = ("any", "numbers", "normal", "classes")


@dataclass(frozen=True)
class Column:
    """One column of a comparison; the attributes are arguments of ``score``."""

    name: str
    heading: str
    meaning: str
    better: str = ""
    digits: int = 2

    @property
    def direction(self) -> str:
        """Which values are better, in words; "" if neither direction is."""
        return _BETTER[self.better]

    def badness(self, value: float) -> float:
        """Return a number that is smaller the better the value is."""
        goal = {"one": 1.0, "level": 0.95}.get(self.better)
        return abs(value - goal) if goal is not None else -value if self.better == "more" else value


@dataclass(frozen=True, kw_only=True)
class ScoreEntry(Column):
    """A score of predictions on held-out data: its column, its function, and the other arguments of ``score``."""

    compute: Callable[..., "float | Tensor"]
    of: tuple[str, ...]
    order: int


_SCORES: dict[str, ScoreEntry] = {}


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
        of: the kinds of targets that have it, of "any", "numbers", "normal" (Gaussian noise) and "classes".
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
        allowed = f"better must be one of {tuple(_BETTER)} and of must hold some of {_KINDS}"
        raise ValueError(f"{allowed}; got {better!r} and {of!r}.")

    def register(function: Computed) -> Computed:
        known = _SCORES.get(name)
        _check_new("score", name, known and known.compute, function)
        _SCORES[name] = ScoreEntry(name, heading, meaning, better, digits, compute=function, of=of, order=order)
        return function

    return register


def scores() -> Mapping[str, ScoreEntry]:
    """Return all registered scores by name, in order; this imports them."""
    import_all("judging/scores")
    return dict(sorted(_SCORES.items(), key=lambda item: item[1].order))
