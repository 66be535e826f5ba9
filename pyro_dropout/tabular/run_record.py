"""``run.json``, the record of a run: its schema, its identity, and how it is read.

Everything is checked before anything is built from it: types, ranges and names. The identity is a SHA-256 of what the
answers depend on. It stands in the record, the posterior and every checkpoint, so that files of two runs never mix.
The path of the data, the number of steps and the version that made the run may change.
"""

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from pyro_dropout.comparison.standard_models import GUIDES
from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.protocols import Record
from pyro_dropout.tables.encoding import Encoding
from pyro_dropout.tables.plain_data import built
from pyro_dropout.tables.reading import Reading
from pyro_dropout.tabular.limits import LARGEST, SEEDS
from pyro_dropout.tabular.recipe import Recipe
from pyro_dropout.training.checkpoints.regular_file import check_regular

FORMAT = 3
LATER = "held back, later"  # what the held-back rows said after more steps; not part of the identity
_SECTIONS = ("data", "encoding", "model", "training")
_FREE = {"data": "file", "training": "steps"}  # what is not part of the identity
_LONGEST = 2**26  # bytes
_LONGEST_PATH = 4096  # characters
_RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("width", "members", "steps", "batch_size"), (1, LARGEST)),
    "seed": (0, SEEDS - 1),
    "held_back": (0, math.nextafter(1, 0)),
    "lr": (math.ulp(0.0), math.inf),
    "temperature": (0, math.inf),
}


@dataclass(frozen=True)
class Training:
    """How long and how a guide was trained, and what is made of the held-back rows.

    Attributes:
        steps: an argument of ``fit``, as the next four are.
        lr: learning rate.
        batch_size: rows in a step; None for all.
        seed: of all random numbers.
        compile: whether steps are compiled.
        conformal: whether intervals are calibrated on the held-back rows.
    """

    steps: int
    lr: float
    batch_size: int | None
    seed: int
    compile: bool | Literal["auto"] = "auto"
    conformal: bool = True

    def options(self) -> Record:
        """Return the arguments of ``fit``."""
        return {k: v for k, v in asdict(self).items() if k != "conformal"}


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


def seal_of(identity: str, later: Record) -> str:
    """Return the SHA-256 that binds what the held-back rows said later, after more steps, to its run."""
    bound = [identity, {key: value for key, value in later.items() if key != "seal"}]
    return hashlib.sha256(json.dumps(bound, sort_keys=True).encode()).hexdigest()


def read_record(path: Path) -> Record:
    """Return the record in a file, with every section checked; raise if it is damaged."""
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
        if record["format"] != FORMAT:
            raise PyroDropoutError(
                f"{path} has format {record['format']!r}; this version reads {FORMAT}. Fit the run again."
            )
        for section in _SECTIONS:
            if not isinstance(record[section], dict):
                raise TypeError(repr(section))
        for section in ("held back", LATER):
            if not isinstance(record.get(section, {}), dict):
                raise TypeError(repr(section))
        parts_of(record)
        identity = record["identity"]
        if not _is_sha256(identity):
            raise TypeError("'identity'")
    except PyroDropoutError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as cause:
        raise _damaged(path, f"{cause} is missing or wrong") from None
    if identity != identity_of(record):
        raise PyroDropoutError(
            f"{path} has been edited since the run started: its identity differs. Only the path of the data and the"
            " number of steps may change. Restore the file, or fit a new run."
        )
    later = record.get(LATER, {})
    if later and (set(later) != {"found", "seal"} or later["seal"] != seal_of(identity, later)):
        raise _damaged(path, f"{LATER!r} is wrong")
    return record


def _damaged(path: Path, what: str) -> PyroDropoutError:
    return PyroDropoutError(f"{path} is damaged: {what}. Fit the run again.")


def parts_of(record: Record) -> tuple[Reading, Encoding, Recipe, Training]:
    """Return what the sections of a record say; raise ``KeyError`` or ``TypeError`` with the name of what is wrong."""
    data = dict(record["data"])
    path, digest = data.pop("file"), data.pop("sha256")
    if not isinstance(path, str) or not 0 < len(path) <= _LONGEST_PATH or "\0" in path:
        raise TypeError("'file'")
    if not _is_sha256(digest):
        raise TypeError("'sha256'")
    reading, recipe = built(Reading, data), built(Recipe, record["model"])
    training = built(Training, record["training"])
    if recipe.guide not in GUIDES:
        raise TypeError("'guide'")
    for part in (reading, recipe, training):
        for name, value in asdict(part).items():
            low, high = _RANGES.get(name, (0, 0))
            if name in _RANGES and value is not None and not low <= value <= high:
                raise TypeError(repr(name))
    return reading, Encoding.from_json(record["encoding"]), recipe, training


def _is_sha256(value: object) -> bool:
    return isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef")
