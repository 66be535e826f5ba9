"""What there is by name: guides, likelihoods and scores. Each is registered in the file that defines it.

The command line, the estimators, ``compare``, its report and the contract tests read this registry. Names of guides can
be read from the source without importing torch, so ``--help`` stays fast. Another package registers its own by entry
points that name their modules, in the groups "pyro_dropout.guides", "pyro_dropout.likelihoods" and
"pyro_dropout.scores"::

    [project.entry-points."pyro_dropout.guides"]
    radial = "my_package.radial"
"""

import ast
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:  # importing torch takes seconds
    from torch import Tensor

# The subpackages, in the order in which they may import: each from itself and from those before it.
FLOORS = (
    "mathematics",
    "engines",
    "generative",
    "guides",
    "training",
    "prediction",
    "judging",
    "references",
    "tables",
    "datasets",
    "comparison",
    "tabular",
    "sklearn",
    "cli",
)

Make = Callable[..., Any]  # a guide or an ensemble, of a model, keep by site, and the options of the entry
Made = TypeVar("Made", bound=type)
Computed = TypeVar("Computed", bound=Callable[..., "float | Tensor"])


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
    density: bool
    learns_keep: bool
    per_site: bool


_GUIDES: dict[str, GuideEntry] = {}
_HERE = Path(__file__).parent


def guide(
    name: str,
    *,
    make: Make | None = None,
    density: bool = True,
    learns_keep: bool = False,
    compared: bool = False,
    order: int = 100,
    alias: str = "",
    options: tuple[str, ...] = (),
    method: str = "mc",
    per_site: bool = True,
) -> Callable[[Made], Made]:
    """Register a guide; a decorator of its class.

    Args:
        name: on the command line, in the estimators and in comparisons; a literal, since it is read from the source
            too.
        make: builds the guide with settings for data that nobody has looked at yet, from a model and ``keep``, the
            probability of keeping a row by site; by default ``cls(model)``.
        density: whether draws of weights have a density with these settings.
        learns_keep: whether it learns what to keep; others never drop a layer's only input.
        compared: whether ``pyro-dropout compare`` takes it by default.
        order: its place in lists; new ones come last.
        alias: another name for it.
        options: settings that ``make`` takes by keyword as well, such as "members".
        method: how the command line and the estimators predict with it, by default: "mc" or "linearised".
        per_site: whether it is a ``SiteGuide``, with one distribution per site, which any SVI can train.

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
        if name in _GUIDES:
            _check_same("guide", name, _GUIDES[name].guide, cls)
        listed: dict[str, Any] = {"alias": alias, "order": order, "compared": compared, "options": options}
        own: dict[str, Any] = {"make": make or (lambda model, keep: cls(model)), "method": method, "density": density}
        _GUIDES[name] = GuideEntry(name=name, guide=cls, learns_keep=learns_keep, per_site=per_site, **listed, **own)
        return cls

    return register


def _check_same(kind: str, name: str, known: Callable[..., object], new: Callable[..., object]) -> None:
    """Raise unless a name is registered again by the same code, as when its module is reloaded."""
    if (known.__module__, known.__qualname__) != (new.__module__, new.__qualname__):
        raise ValueError(f"a {kind} named {name!r} is registered already: {known.__qualname__}.")


def _import_all(folder: str) -> None:
    """Import every module of a folder of the package, and what other packages add to it, so that all is registered."""
    for path in sorted((_HERE / folder).glob("*.py")):
        if path.stem != "__init__":
            import_module(f"pyro_dropout.{folder.replace('/', '.')}.{path.stem}")
    for point in _other_packages(folder.rpartition("/")[2]):
        try:
            import_module(point.module)
        except Exception as reason:  # whatever is wrong with another package must not stop this one
            said = f"{type(reason).__name__}: {reason}"
            warnings.warn(f"{point.name!r}, which another package registers, is left out. {said}", stacklevel=3)


@cache
def _other_packages(kind: str) -> tuple[EntryPoint, ...]:
    """Return the modules that other packages register for a kind: "guides", "likelihoods" or "scores"."""
    return tuple(sorted(entry_points(group=f"pyro_dropout.{kind}")))


def guides() -> Mapping[str, GuideEntry]:
    """Return all registered guides by name, in order; this imports them."""
    _import_all("guides")
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
    found = [entry for path in files for entry in _registrations(path)]
    return tuple(sorted(found, key=lambda entry: entry.order))


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
        if name in _LIKELIHOODS:
            _check_same("likelihood", name, _LIKELIHOODS[name].likelihood, cls)
        _LIKELIHOODS[name] = LikelihoodEntry(name, cls, make or cls, outputs)
        return cls

    return register


def likelihoods() -> Mapping[str, LikelihoodEntry]:
    """Return all registered likelihoods by name; this imports them."""
    _import_all("generative/likelihoods")
    return dict(_LIKELIHOODS)


# --- scores -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScoreEntry:
    """A score of predictions on held-out data: its function, and the arguments of ``score``."""

    name: str
    compute: Callable[..., "float | Tensor"]
    heading: str
    meaning: str
    better: str
    digits: int
    of: tuple[str, ...]
    order: int


_SCORES: dict[str, ScoreEntry] = {}
_BETTER = ("more", "less", "one", "level", "")
_KINDS = ("any", "numbers", "normal", "classes")


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
        raise ValueError(
            f"better must be one of {_BETTER} and of must hold some of {_KINDS}; got {better!r} and {of!r}."
        )

    def register(function: Computed) -> Computed:
        if name in _SCORES:
            _check_same("score", name, _SCORES[name].compute, function)
        _SCORES[name] = ScoreEntry(name, function, heading, meaning, better, digits, of, order)
        return function

    return register


def scores() -> Mapping[str, ScoreEntry]:
    """Return all registered scores by name, in order; this imports them."""
    _import_all("judging/scores")
    return dict(sorted(_SCORES.items(), key=lambda item: item[1].order))
