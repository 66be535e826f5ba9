"""``run.json``, the record of a run: its schema, its identity, and how it is read.

Everything is checked before anything is built from it: types, ranges and names. The identity is a SHA-256 of what the
answers depend on. It stands in the record, the posterior and every checkpoint, so that files of two runs never mix.
The path of the data, the number of steps and the version that made the run may change.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import get_args

from pyro_dropout.comparison.standard_models import GUIDES
from pyro_dropout.mathematics.errors import PyroDropoutError
from pyro_dropout.protocols import Record
from pyro_dropout.tables.csv_file import SEPARATORS
from pyro_dropout.tables.learning import Task
from pyro_dropout.tables.notation import Decimal
from pyro_dropout.tables.reading import Missing
from pyro_dropout.tabular.limits import LARGEST, SEEDS
from pyro_dropout.tabular.recipe import Activation, Noise, Scale, Widths
from pyro_dropout.training.checkpoints.regular_file import check_regular

FORMAT = 2
LATER = "held back, later"  # what the held-back rows said after more steps; not part of the identity
_BEFORE = 1  # the format without an identity
_SECTIONS = ("data", "encoding", "model", "training")
_FREE = {"data": "file", "training": "steps"}  # what is not part of the identity
_LONGEST = 2**26  # bytes
_LONGEST_PATH = 4096  # characters

Rule = Callable[[object], bool]  # whether a value is allowed


def identity_of(record: Record) -> str:
    """Return the SHA-256 of what a run's answers depend on.

    Example:
        >>> record = {"data": {"file": "a.csv"}, "encoding": {}, "model": {"width": 5}, "training": {"steps": 3}}
        >>> moved = record | {"data": {"file": "b.csv"}}
        >>> other = record | {"model": {"width": 6}}
        >>> identity_of(record) == identity_of(moved), identity_of(record) == identity_of(other)
        (True, False)
    """
    bound = {name: {k: v for k, v in record[name].items() if k != _FREE.get(name)} for name in _SECTIONS}
    bound |= {name: record[name] for name in ("held back",) if name in record}
    return hashlib.sha256(json.dumps(bound, sort_keys=True).encode()).hexdigest()


def seal_of(identity: str | None, later: Record) -> str:
    """Return the SHA-256 that binds what the held-back rows said later, after more steps, to its run."""
    bound = [identity, {key: value for key, value in later.items() if key != "seal"}]
    return hashlib.sha256(json.dumps(bound, sort_keys=True).encode()).hexdigest()


def read_record(path: Path) -> Record:
    """Return the record in a file, with every section but "encoding" checked; raise if it is damaged.

    A record of an earlier version has no identity, and gets None.
    """
    check_regular(
        path, "a run's record is needed. Fit the run again.", f"{path.parent} is not a run: it has no run.json."
    )
    if path.stat().st_size > _LONGEST:
        raise _damaged(path, "it is too long")
    try:
        record = json.loads(path.read_text("utf-8"))
        json.dumps(record, ensure_ascii=False).encode()  # raises for half a character
    except (ValueError, RecursionError):  # a number of thousands of digits is a ValueError, too
        raise _damaged(path, "it is not JSON") from None
    if not isinstance(record, dict):
        raise _damaged(path, "the record is missing or wrong")
    try:
        if record["format"] not in (_BEFORE, FORMAT):
            raise PyroDropoutError(f"{path} has format {record['format']!r}; this version reads {FORMAT}.")
        for section in _SECTIONS:
            if not isinstance(record[section], dict):
                raise TypeError(repr(section))
        for section in ("held back", LATER):
            if not isinstance(record.get(section, {}), dict):
                raise TypeError(repr(section))
        for section, rules in _RULES.items():
            _check(record[section], rules)
        identity = record["identity"] if record["format"] == FORMAT else None
        if record["format"] == FORMAT and not _is_sha256(identity):
            raise TypeError("'identity'")
    except (KeyError, TypeError) as cause:
        raise _damaged(path, f"{cause} is missing or wrong") from None
    if identity is not None and identity != identity_of(record):
        raise PyroDropoutError(
            f"{path} has been edited since the run started: its identity differs. Only the path of the data and the"
            " number of steps may change. Restore the file, or fit a new run."
        )
    later = record.get(LATER, {})
    if later and (set(later) != {"found", "seal"} or later["seal"] != seal_of(identity, later)):
        raise _damaged(path, f"{LATER!r} is wrong")
    return record | {"identity": identity}


def _damaged(path: Path, what: str) -> PyroDropoutError:
    return PyroDropoutError(f"{path} is damaged: {what}. Fit the run again.")


def _check(found: Record, rules: Mapping[str, Rule]) -> None:
    """Raise a ``TypeError`` that names a wrong key of a section."""
    whole = {**{key: None for key in _OPTIONAL if key in rules}, **found}
    for key in (*whole, *rules):
        if key not in rules or not rules[key](whole[key]):
            raise TypeError(repr(key))


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_path(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= _LONGEST_PATH and "\0" not in value


def _is_sha256(value: object) -> bool:
    return isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef")


def _is_count(value: object, least: int = 1, most: int = LARGEST) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_seed(value: object) -> bool:
    return _is_count(value, 0, SEEDS - 1)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _or_none(rule: Rule) -> Rule:
    return lambda value: value is None or rule(value)


def _one_of(*allowed: str) -> Rule:
    return lambda value: isinstance(value, str) and value in allowed


# Keys that a record need not have.
_OPTIONAL = (
    *(
        "members",
        "noise",
        "scale",
        "activation",
        "prior",
        "temperature",
        "decay",
        "decimal",
        "encoding",
        "separator",
        "keep",
        "strict",
    ),
    *("conformal", "groups"),
)
_RULES: dict[str, dict[str, Rule]] = {
    "data": {
        "file": _is_path,
        "sha256": _is_sha256,
        "target": _or_none(_is_text),
        "task": _one_of(*get_args(Task)),
        "missing": _one_of(*get_args(Missing)),
        "categorical": _are_texts,
        "drop": _are_texts,
        "held_back": lambda value: _is_number(value) and value < 1,  # type: ignore[operator]
        "seed": _is_seed,
        "decimal": _or_none(_one_of(*get_args(Decimal))),
        "encoding": _or_none(_is_text),
        "separator": _or_none(_one_of(*SEPARATORS)),
        "keep": _or_none(_are_texts),
        "strict": lambda value: value is None or isinstance(value, bool),
    },
    "model": {
        "guide": _one_of(*GUIDES),
        "width": _is_count,
        "members": _or_none(_is_count),
        "noise": _or_none(_one_of(*get_args(Noise))),
        "scale": _or_none(_one_of(*get_args(Scale))),
        "activation": _or_none(_one_of(*get_args(Activation))),
        "prior": _or_none(_one_of(*get_args(Widths))),
        "temperature": _or_none(_is_number),
        "decay": lambda value: value is None or isinstance(value, bool),
    },
    "training": {
        "steps": _is_count,
        "lr": lambda value: _is_number(value) and value != 0,
        "batch_size": _or_none(_is_count),
        "seed": _is_seed,
        "compile": lambda value: isinstance(value, bool) or value == "auto",
        "conformal": lambda value: value is None or isinstance(value, bool),
        "groups": _or_none(_is_text),
    },
}
