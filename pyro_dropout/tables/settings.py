"""How a table is read, what is trained on it, and how: options of the command line and ``fit_table``, kept in a record.

A field says what it is and what it may be; the command line makes its options from that. Importing this module imports
neither torch nor pandas, so that help texts come at once.
"""

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from itertools import chain
from numbers import Integral, Number, Real
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from pyro_dropout.errors import PyroDropoutError, RangeError
from pyro_dropout.registry import guide_names, listed_guides, resolve_guide

Task = Literal["auto", "regression", "classification"]
Missing = Literal["auto", "refuse", "drop"]
Decimal = Literal["point", "comma"]
Separator = Literal["comma", "semicolon", "tab", "pipe"]
Noise = Literal["constant", "by-input"]
Scale = Literal["plain", "log", "logit", "count"]
T = TypeVar("T")
LARGEST, SEEDS = 10**9, 2**32  # of counts; seeds are below
SAMPLES = 500  # weight draws of a prediction, in pieces of the rows
SCORED = 200  # those by which fit and compare score each candidate, on all held-back rows at once


def setting(default: Any, help: str = "", **more: object) -> Any:
    """Return a field of settings: its default, what it is in words, its ``metavar``, and as ``limits`` its range."""
    return field(default=default, metadata={"help": help, **more})


def choices(kind: object) -> tuple[object, ...]:
    """Return what a type lists as a ``Literal``; () for others."""
    parts = get_args(kind)
    return parts if get_origin(kind) is Literal else tuple(chain.from_iterable(map(choices, parts)))


@dataclass(frozen=True)
class Settings:
    """Base of all settings: their values are checked when they are made."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value, known, limits = getattr(self, each.name), choices(each.type), each.metadata.get("limits")
            if value is None and each.default is None:
                continue
            if each.type is float:
                if not isinstance(value, Real):
                    raise RangeError(f"{each.name} must be a number; got {value!r}.")
                object.__setattr__(self, each.name, float(value))  # 0 and 0.0 are two records in JSON
            if known and not isinstance(value, bool) and value not in known:
                raise RangeError(f"{each.name} must be one of {', '.join(map(str, known))}; got {value!r}.")
            kind = Integral if limits and isinstance(limits[0], int) else Real
            if limits and not (isinstance(value, kind) and limits[0] <= value <= limits[1]):
                raise RangeError(f"{each.name} must lie in [{limits[0]:g}, {limits[1]:g}]; got {value!r}.")


_COLUMNS: Any = {"metavar": "COLUMNS"}
_COUNT: Any = {"metavar": "N", "limits": (1, LARGEST)}


@dataclass(frozen=True)
class Reading(Settings):
    """How a table is read; ``seed`` is that of the choice of held-back rows.

    Missing values among inputs are filled in with the mean of the training rows, for categories the share of each, with
    a feature that says where. Rows without a target are left out, or refused.
    """

    target: str | None = setting(None, "Column to predict; by default the last.", metavar="COLUMN")
    task: Task = setting("auto", "Type of the target; auto infers it from the values.")
    missing: Missing = setting(
        "auto", "On missing values: fill in means and mark them, refuse the table, or drop their rows."
    )
    categorical: tuple[str, ...] = setting((), "Columns of numbers that are categories: a,b,c.", **_COLUMNS)
    drop: tuple[str, ...] = setting((), "Columns to ignore: a,b,c.", **_COLUMNS)
    held_back: float = setting(0.2, "Fraction of the rows held back for testing.", metavar="SHARE")
    seed: int = setting(0, "Seed of all random numbers.", metavar="N", limits=(0, SEEDS - 1))
    decimal: Decimal | None = setting(
        None, "Decimal mark of columns that may be read in two ways: is 1,200 large or small?"
    )
    encoding: str | None = setting(None, "Encoding of a CSV file that is not Unicode, such as latin-1.", metavar="NAME")
    separator: Separator | None = setting(None, "Separator of a CSV file; by default what splits its header.")
    keep: tuple[str, ...] = setting(
        (), "Columns to use although they look like identifiers or free text: a,b,c.", **_COLUMNS
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.held_back < 1:
            raise RangeError(f"held_back must lie in [0, 1); got {self.held_back!r}.")


@dataclass(frozen=True)
class Wanted(Settings):
    """What is to be trained on a table; "auto" is chosen on held-back rows, None is the default of the guide."""

    guide: str = setting("auto", "One of {guides}; auto chooses on the held-back rows.", metavar="NAME")
    scale: Literal["auto"] | Scale = setting(
        "auto", "Scale of a numeric target: log for positive numbers, logit for proportions, count for whole numbers."
    )
    noise: Literal["auto"] | Noise = setting(
        "auto", "Noise of a numeric target: the same for all rows, or learned from the inputs."
    )
    width: int | None = setting(None, "Hidden units; by default 50, and fewer for more than 500 inputs.", **_COUNT)
    members: int | None = setting(
        None, "Members of an ensemble; by default 8 with --guide auto, 32 for ensemble, 16 for others.", **_COUNT
    )

    def check(self, classes: bool) -> None:
        """Raise unless all of it makes sense for a target that is a class, or a number."""
        if self.guide not in (known := ("auto", *guide_names())):
            raise RangeError(f"guide must be one of {', '.join(known)}; got {self.guide!r}.")
        if self.members is not None and self.guide != "auto" and "members" not in resolve_guide(self.guide).options:
            raise PyroDropoutError(f"members={self.members}: only an ensemble has members, not {self.guide}.")
        if classes and (self.scale not in ("auto", "plain") or self.noise == "by-input"):
            given = f"scale={self.scale!r} and noise={self.noise!r}"
            raise PyroDropoutError(f"classes have no scale and no noise; got {given}.")


@dataclass(frozen=True)
class Training(Settings):
    """How long and how a guide is trained; ``conformal`` says whether held-back rows calibrate intervals."""

    steps: int = setting(1200, "Training steps; by default 1200, and 2000 for a given guide.", **_COUNT)
    lr: float = setting(
        0.05,
        "Learning rate; by default 0.05, falling to zero, and 0.01 for a given guide.",
        metavar="RATE",
        limits=(math.ulp(0.0), 1e300),
    )
    batch_size: int | None = setting(
        None, "Rows in a mini-batch; by default all, up to 2,048, and otherwise 1,024.", **_COUNT
    )
    seed: int = setting(0, limits=(0, SEEDS - 1))
    compile: bool | Literal["auto"] = "auto"
    conformal: bool = True

    def options(self) -> dict[str, Any]:
        """Return the arguments of ``fit``."""
        return {name: value for name, value in asdict(self).items() if name != "conformal"}


_KINDS = (Reading, Wanted, Training)
_GIVEN = {"steps": 2000, "lr": 0.01}  # by default, of a guide that is named


def settings_of(options: Mapping[str, Any]) -> tuple[Reading, Wanted, Training]:
    """Return the settings that options by name say; those that are None, or not given, have their defaults."""
    known = {each.name for kind in _KINDS for each in fields(kind)}
    strange = next((name for name in options if name not in known), None)
    if strange is not None:
        raise PyroDropoutError(f"there is no option {strange!r}; choose from {', '.join(sorted(known))}.")
    given = {name: value for name, value in options.items() if value is not None}
    given |= {
        name: value.item() for name, value in given.items() if isinstance(value, Number) and hasattr(value, "item")
    }
    for name in given.keys() & {each.name for each in fields(Reading) if isinstance(each.default, tuple)}:
        several = isinstance(given[name], Iterable) and not isinstance(given[name], str)
        given[name] = tuple(map(str, given[name])) if several else (str(given[name]),)
    given |= {"target": str(given["target"])} if "target" in given else {}  # the names of columns are texts
    aliases = {each.alias: each.name for each in listed_guides() if each.alias}
    guide = given.get("guide", "auto")
    given = ({} if guide == "auto" else _GIVEN) | given | {"guide": aliases.get(guide, guide)}
    parts = ({each.name: given[each.name] for each in fields(kind) if each.name in given} for kind in _KINDS)
    reading, wanted, training = (kind(**part) for kind, part in zip(_KINDS, parts, strict=True))
    return reading, wanted, training


# --- from a file ------------------------------------------------------------------------------------------------------


_hints = functools.cache(get_type_hints)  # a record may hold thousands of one class


def built(kind: type[T], found: object) -> T:
    """Return a dataclass from plain data, such as those of a JSON file; each value must have the type of its field.

    Only numbers, texts, tuples and dataclasses can be built. Raise ``KeyError`` or ``TypeError`` with the name of the
    first field that is wrong.
    """
    hints: dict[str, Any] = _hints(kind)  # type: ignore[arg-type]
    if not isinstance(found, dict) or found.keys() - hints.keys():
        raise TypeError(repr(next(iter(found.keys() - hints.keys()), "")) if isinstance(found, dict) else kind.__name__)
    for each in fields(kind):  # type: ignore[arg-type]
        if each.name not in found and each.default is MISSING:
            raise KeyError(each.name)
    return kind(**{name: _typed(hints[name], value, name) for name, value in found.items()})


def _typed(hint: Any, value: Any, name: str) -> Any:
    """Return a value as the type of a field; raise ``TypeError`` with the field's name if it has another."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        for part in parts:
            try:
                return _typed(part, value, name)
            except TypeError:
                continue
    elif origin is Literal and any(type(value) is type(each) and value == each for each in parts):
        return value
    elif origin is tuple and isinstance(value, list | tuple):
        kinds = parts[:1] * len(value) if parts[-1] is Ellipsis else parts
        if len(kinds) == len(value):
            return tuple(_typed(kind, each, name) for kind, each in zip(kinds, value, strict=True))
    elif is_dataclass(hint):
        return built(hint, value)  # type: ignore[arg-type]
    elif hint is float and type(value) in (int, float) and math.isfinite(value):
        return float(value)
    elif hint in (bool, int, str, NoneType) and type(value) is hint:
        return value
    raise TypeError(repr(name))
