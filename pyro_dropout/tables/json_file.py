"""Read JSON files: a list of records, an object of columns, or one record a line (JSON Lines)."""

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from pyro_dropout.mathematics.errors import PyroDropoutError, ShapeError
from pyro_dropout.tables.csv_file import check_names, named
from pyro_dropout.tables.table import Table
from pyro_dropout.tables.values import table_from

_FORMS = "a list of records, [{...}, {...}], or an object of columns, {...: [...]}"


def read_json(path: Path, size: int | None, strict: bool = True) -> Iterator[Table]:
    """Yield tables of ``size`` rows from a list of records or an object of columns; None for all rows at once."""
    found = _parsed(path.name, path.read_bytes())
    if isinstance(found, list):
        records = [(row, _record(f"{path.name}, row {row}", each)) for row, each in enumerate(found, 1)]
        yield from _pieces(path.name, records, size, strict)
        return
    if not isinstance(found, dict):
        raise ShapeError(f"{path.name} is not a table: it must be {_FORMS}.")
    columns = {name: _cells(path.name, name, each) for name, each in found.items()}
    keys = list(dict.fromkeys(key for each in columns.values() for key in each))
    for name, each in columns.items():
        if list(each) != keys:
            raise ShapeError(
                f"{path.name}: the column {name!r} has other rows than the column {next(iter(columns))!r}."
            )
    records = [(row, {name: each[key] for name, each in columns.items()}) for row, key in enumerate(keys, 1)]
    yield from _pieces(path.name, records, size, strict)


def read_json_lines(path: Path, size: int | None, strict: bool = True) -> Iterator[Table]:
    """Yield tables of ``size`` rows from a file with one record a line; None for all rows at once."""
    names: list[str] = []
    with path.open("rb") as file:  # twice: a later record may have a column of its own
        for _, record in _lines(path.name, file):
            names += [name for name in record if name not in names]
    with path.open("rb") as file:
        yield from _pieces(path.name, _lines(path.name, file), size, strict, names)


def _lines(name: str, file: Iterable[bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
    for row, line in enumerate(file, 1):
        if line.strip():
            where = f"{name}, row {row}"
            yield row, _record(where, _parsed(where, line))


def _pieces(
    file: str,
    records: Iterable[tuple[int, dict[str, Any]]],
    size: int | None,
    strict: bool,
    keys: list[str] | None = None,
) -> Iterator[Table]:
    if keys is None:
        records = list(records)
        keys = list(dict.fromkeys(key for _, record in records for key in record))
    names = [key.strip() for key in keys]
    names = names if strict else named(names)
    check_names(file, names)
    records = iter(records)
    while True:
        some = list(islice(records, size))
        columns = {name: [record.get(key) for _, record in some] for name, key in zip(names, keys, strict=True)}
        yield table_from(file, columns, [row for row, _ in some])
        if size is None or len(some) < size:
            return


def _parsed(where: str, text: bytes) -> Any:
    try:
        return json.loads(text.removeprefix(b"\xef\xbb\xbf"), object_pairs_hook=_once)
    except (ValueError, RecursionError) as cause:  # text that is not Unicode is a ValueError, too
        what = str(cause).splitlines()[0] if isinstance(cause, ValueError) else "it is nested too deeply"
        hint = " If it has one record a line, let its name end in .jsonl." if what.startswith("Extra data") else ""
        raise PyroDropoutError(f"{where} is not valid JSON: {what}.{hint}") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} occurs twice in an object")
    return found


def _record(where: str, found: Any) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise ShapeError(f'{where} is not a record: an object such as {{"age": 12, "kind": "oak"}} is needed.')
    return found


def _cells(file: str, name: str, found: Any) -> dict[object, Any]:
    """Return the values of a column by row: a list, or an object as pandas writes it."""
    if isinstance(found, list):
        return dict(enumerate(found))
    if isinstance(found, dict):
        return dict(found)
    raise ShapeError(f"{file}, column {name!r}: it is not a list; the file must be {_FORMS}.")
