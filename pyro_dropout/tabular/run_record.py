"""``run.json``, the record of a run: its schema, its identity, and how it is read.

Everything is checked before anything is built from it: types, ranges and names. The identity is a SHA-256 of what the
answers depend on. It stands in the record, the posterior and every checkpoint, so that files of two runs never mix.
The path of the data and the version that made the run may change.
"""

import hashlib
import json
import re
from pathlib import Path

from pyro_dropout.comparison.standard_models import GUIDES
from pyro_dropout.errors import PyroDropoutError, RangeError
from pyro_dropout.protocols import Record
from pyro_dropout.tables.encoding import Encoding
from pyro_dropout.tables.plain_data import built
from pyro_dropout.tables.settings import Reading
from pyro_dropout.tabular.recipe import Recipe
from pyro_dropout.tabular.settings import Training
from pyro_dropout.training.checkpoints.regular_file import check_regular

FORMAT = 4
HELD_BACK = "held back"  # what the held-back rows say; not in a run without them
_SECTIONS = ("data", "encoding", "model", "training")
_LONGEST = 2**26  # bytes
_LONGEST_PATH = 4096  # characters


def identity_of(record: Record) -> str:
    """Return the SHA-256 of what a run's answers depend on.

    Example:
        >>> record = {"data": {"file": "a.csv"}, "encoding": {}, "model": {"width": 5}, "training": {"steps": 3}}
        >>> moved = record | {"data": {"file": "b.csv"}}
        >>> other = record | {"model": {"width": 6}}
        >>> identity_of(record) == identity_of(moved), identity_of(record) == identity_of(other)
        (True, False)
    """
    bound = {name: record[name] for name in (*_SECTIONS, HELD_BACK) if name in record}
    bound["data"] = {name: value for name, value in record["data"].items() if name != "file"}
    return hashlib.sha256(json.dumps(bound, sort_keys=True).encode()).hexdigest()


def read_record(path: Path) -> tuple[Record, Reading, Encoding, Recipe, Training]:
    """Return the record in a file, and what its sections say; raise if it is damaged."""
    check_regular(
        path, "a run's record is needed. Fit the run again.", f"{path.parent} is not a run: it has no run.json."
    )
    try:
        if path.stat().st_size > _LONGEST:
            raise ValueError
        record = json.loads(path.read_text("utf-8"))
        json.dumps(record, ensure_ascii=False).encode()  # raises for half a character
    except (ValueError, RecursionError):  # a number of thousands of digits is a ValueError, too
        raise _damaged(path, "it is not JSON, or too long") from None
    try:
        if record["format"] != FORMAT:
            raise PyroDropoutError(
                f"{path} has format {record['format']!r}; this version reads {FORMAT}. Fit the run again."
            )
        parts = _parts_of(record)
        if record["identity"] != identity_of(record):
            raise PyroDropoutError(
                f"{path} has been edited since the run started: its identity differs. Only the path of the data may"
                " change. Restore the file, or fit a new run."
            )
    except RangeError as cause:
        raise _damaged(path, str(cause).rstrip(".")) from None
    except (KeyError, TypeError, AttributeError, OverflowError) as cause:
        raise _damaged(path, f"{cause} is missing or wrong") from None
    return record, *parts


def _damaged(path: Path, what: str) -> PyroDropoutError:
    return PyroDropoutError(f"{path} is damaged: {what}. Fit the run again.")


def _parts_of(record: Record) -> tuple[Reading, Encoding, Recipe, Training]:
    """Return what the sections of a record say; raise ``KeyError`` or ``TypeError`` with the name of what is wrong."""
    for section in (*_SECTIONS, HELD_BACK):
        if not isinstance(record.get(section, {}), dict):
            raise TypeError(repr(section))
    data = dict(record["data"])
    path, digest = data.pop("file"), data.pop("sha256")
    if not isinstance(path, str) or not 0 < len(path) <= _LONGEST_PATH or "\0" in path:
        raise TypeError("'file'")
    for name, value in (("sha256", digest), ("identity", record["identity"])):
        if not isinstance(value, str) or not re.fullmatch("[0-9a-f]{64}", value):
            raise TypeError(repr(name))
    recipe = built(Recipe, record["model"])
    if recipe.guide not in GUIDES:
        raise TypeError("'guide'")
    encoding = Encoding.from_json(record["encoding"])
    return built(Reading, data), encoding, recipe, built(Training, record["training"])
