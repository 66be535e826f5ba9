"""Read CSV, Parquet, Excel and JSON files, and standard input, into named columns.

Nothing is guessed here. Errors name the file, the row (the line of a CSV file, header included) and the column.
"""

import atexit
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pyro_dropout.mathematics.errors import PyroDropoutError, ShapeError
from pyro_dropout.tables.csv_file import read_csv
from pyro_dropout.tables.other_files import read_excel, read_json, read_json_lines, read_parquet
from pyro_dropout.tables.table import Table
from pyro_dropout.training.checkpoints.regular_file import check_regular

_KINDS = {".parquet": "parquet", ".pq": "parquet", ".xlsx": "excel", ".xlsm": "excel", ".json": "json"}
_KINDS |= {".jsonl": "lines", ".ndjson": "lines"}
_MARKS = {b"PAR1": "parquet", b"PK\x03\x04": "excel"}  # how files begin, whatever their names
_LOOK = 2**20  # bytes


def read_file(
    path: str | Path, *, encoding: str | None = None, separator: str | None = None, strict: bool = True
) -> Table:
    r"""Return the table in a CSV file with a header, or in a Parquet, Excel or JSON file.

    JSON files hold a list of records or an object of columns; those that end in .jsonl, one record a line. The path "-"
    is standard input, in any of these formats.

    Missing values are an empty cell, NA, N/A, n.a., #N/A, NaN, <NA>, null, None and ?, in upper or lower case. Lines of
    a CSV file that begin with # are comments if they stand before the header; after it, they are rows.

    Args:
        path: the file.
        encoding: of a CSV file; by default UTF-8, or UTF-16 or UTF-32 if the file begins with their mark.
        separator: of a CSV file, "comma", "semicolon", "tab" or "pipe"; by default the one that splits the header.
        strict: whether each column must have a name; if not, a column without one is called after its place.

    Example:
        >>> import pathlib, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "trees.csv")
        ...     _ = path.write_text("# by hand\nage;kind\n12;#1 oak\n?;elm\n")
        ...     table = read_file(path)
        >>> table.columns, table.rows
        ({'age': ['12', None], 'kind': ['#1 oak', 'elm']}, [3, 4])
        >>> table.notes
        ('separated by semicolons', '1 comment line before the header skipped')
    """
    (table,) = read_pieces(path, encoding=encoding, separator=separator, strict=strict)
    return table


def read_pieces(
    path: str | Path,
    size: int | None = None,
    *,
    encoding: str | None = None,
    separator: str | None = None,
    strict: bool = True,
    least: int = 2,
) -> Iterator[Table]:
    """Yield tables of ``size`` rows each, for files larger than memory; with None, one table of all rows.

    A file with fewer than ``least`` columns is refused.
    """
    path = arrived(path)
    check_regular(path, "give a CSV or Parquet file.")
    with path.open("rb") as file:
        begins = file.read(_LOOK)
    if not begins:
        raise ShapeError(f"{path.name} is empty; a header and rows are needed.")
    rows = 0
    for table in _tables(path, begins, size, encoding, separator, strict):
        names = [*table.columns, *table.unread]
        if len(names) < least:
            raise ShapeError(
                f"{path.name} must have at least two columns, one to predict and one to predict from; its header is"
                f" {', '.join(map(repr, names)) or 'empty'}. The columns of a CSV file are separated by commas,"
                " semicolons, tabs or pipes."
            )
        rows += len(table)
        if len(table):
            yield table
    if not rows:
        raise ShapeError(f"{path.name} has a header and no rows.")


def _tables(
    path: Path, begins: bytes, size: int | None, encoding: str | None, separator: str | None, strict: bool
) -> Iterator[Table]:
    kind = _MARKS.get(begins[:4]) or _KINDS.get(path.suffix.lower()) or _guessed(path, begins)
    if kind == "csv":
        return read_csv(path, size, encoding, separator, strict)
    if kind == "parquet":
        return read_parquet(path, size, strict)
    table = {"excel": read_excel, "json": read_json, "lines": read_json_lines}[kind](path, strict)
    step = size or max(1, len(table))
    return (table.only(range(at, min(at + step, len(table)))) for at in range(0, max(1, len(table)), step))


def _guessed(path: Path, begins: bytes) -> str:
    """Return the format of a file whose name and first bytes do not tell it: JSON begins with a bracket."""
    begins = begins.removeprefix(b"\xef\xbb\xbf").lstrip()
    if path.suffix or not begins.startswith((b"{", b"[")):
        return "csv"
    first, *more = begins.split(b"\n", 1)
    return "lines" if begins.startswith(b"{") and first.rstrip().endswith(b"}") and more else "json"


def arrived(path: str | Path) -> Path:
    """Return the path of a file; for "-", that of a copy of standard input, which exists until the program ends.

    Standard input can be read once, so a program that needs its table again keeps this path.

    Example:
        >>> arrived("houses.csv")
        PosixPath('houses.csv')
    """
    return _standard_input() if str(path) == "-" else Path(path)


def _standard_input() -> Path:
    if sys.stdin is None or sys.stdin.isatty():
        raise PyroDropoutError("standard input is a terminal; send a table through it, or give a file.")
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = Path(folder, "standard input")
    with path.open("wb") as copy:
        shutil.copyfileobj(sys.stdin.buffer, copy)
    return path
