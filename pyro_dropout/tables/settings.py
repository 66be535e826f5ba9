"""How a table is read: the settings that the command line, ``fit_table`` and a run's record share.

A field says what it is and what it may be; the command line makes its options from that. Importing this module imports
neither torch nor pandas, so that help texts come at once.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from itertools import chain
from numbers import Integral, Real
from typing import Any, Literal, get_args, get_origin

from pyro_dropout.errors import RangeError

Task = Literal["auto", "regression", "classification"]
Missing = Literal["auto", "refuse", "drop"]
Decimal = Literal["point", "comma"]
Separator = Literal["comma", "semicolon", "tab", "pipe"]
LARGEST, SEEDS = 10**9, 2**32  # of counts; seeds are below


def option(help: str = "", **more: object) -> dict[str, Any]:
    """Return what a field of settings is, in words, its ``metavar``, and as ``limits`` the least and the most."""
    return {"help": help, **more}


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
            if known and not isinstance(value, bool) and value not in known:
                raise RangeError(f"{each.name} must be one of {', '.join(map(str, known))}; got {value!r}.")
            kind = Integral if limits and isinstance(limits[0], int) else Real
            if limits and not (isinstance(value, kind) and limits[0] <= value <= limits[1]):
                raise RangeError(f"{each.name} must lie in [{limits[0]:g}, {limits[1]:g}]; got {value!r}.")


_COLUMNS: Any = {"metavar": "COLUMNS"}


@dataclass(frozen=True)
class Reading(Settings):
    """How a table is read; ``seed`` is that of the choice of held-back rows.

    Missing values among inputs are filled in with the mean of the training rows, for categories the share of each, with
    a feature that says where. Rows without a target are left out, or refused.
    """

    target: str | None = field(
        default=None, metadata=option("Column to predict; by default the last.", metavar="COLUMN")
    )
    task: Task = field(default="auto", metadata=option("Type of the target; auto infers it from the values."))
    missing: Missing = field(
        default="auto",
        metadata=option("On missing values: fill in means and mark them, refuse the table, or drop their rows."),
    )
    categorical: tuple[str, ...] = field(
        default=(), metadata=option("Columns of numbers that are categories: a,b,c.", **_COLUMNS)
    )
    drop: tuple[str, ...] = field(default=(), metadata=option("Columns to ignore: a,b,c.", **_COLUMNS))
    held_back: float = field(
        default=0.2, metadata=option("Fraction of the rows held back for testing.", metavar="SHARE")
    )
    seed: int = field(default=0, metadata=option("Seed of all random numbers.", metavar="N", limits=(0, SEEDS - 1)))
    decimal: Decimal | None = field(
        default=None, metadata=option("Decimal mark of columns that may be read in two ways: is 1,200 large or small?")
    )
    encoding: str | None = field(
        default=None, metadata=option("Encoding of a CSV file that is not Unicode, such as latin-1.", metavar="NAME")
    )
    separator: Separator | None = field(
        default=None, metadata=option("Separator of a CSV file; by default what splits its header.")
    )
    keep: tuple[str, ...] = field(
        default=(),
        metadata=option("Columns to use although they look like identifiers or free text: a,b,c.", **_COLUMNS),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.held_back < 1:
            raise RangeError(f"held_back must lie in [0, 1); got {self.held_back!r}.")


def tuples(given: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return arguments in which lists of columns are tuples, also of a single name."""
    several = {each.name for each in fields(Reading) if isinstance(each.default, tuple)}
    return {k: ((v,) if isinstance(v, str) else tuple(v)) if k in several else v for k, v in given}
