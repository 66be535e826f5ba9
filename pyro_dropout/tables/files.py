"""Read CSV and Parquet files, and standard input, as tables; errors name the file, the row and the column."""

import atexit
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pyro_dropout.errors import PyroDropoutError, ShapeError
from pyro_dropout.tables.csv_file import read_csv
from pyro_dropout.tables.table import Table, from_arrow, named
from pyro_dropout.training.checkpoints.regular_file import check_regular

_OTHERS = {".xlsx": "an Excel", ".xlsm": "an Excel", ".xls": "an Excel", ".ods": "a spreadsheet"}
_OTHERS |= dict.fromkeys((".json", ".jsonl", ".ndjson"), "a JSON")


def read_file(path: str | Path, *, encoding: str | None = None, separator: str | None = None) -> Table:
    r"""Return the table in a CSV file with a header, or in a Parquet file; the path "-" is standard input.

    Missing values are an empty cell, NA, N/A, n.a., #N/A, NaN, <NA>, null, None and ?, in upper or lower case. Lines of
    a CSV file that begin with # are comments if they stand before the header; after it, they are rows.

    Args:
        path: the file.
        encoding: of a CSV file; by default UTF-8, or UTF-16 or UTF-32 if the file begins with their mark.
        separator: of a CSV file, "comma", "semicolon", "tab" or "pipe"; by default the one that splits the header.

    Example:
        >>> import pathlib, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "trees.csv")
        ...     _ = path.write_text("# by hand\nage;kind\n12;#1 oak\n?;elm\n")
        ...     table = read_file(path)
        >>> table.columns["kind"].tolist(), table.rows.tolist()
        (['#1 oak', 'elm'], [3, 4])
        >>> table.notes
        ('separated by semicolons', '1 comment line before the header skipped')
    """
    (table,) = read_pieces(path, encoding=encoding, separator=separator)
    names = [*table.columns, *table.unread]
    if len(names) < 2:
        raise ShapeError(
            f"{table.file} must have at least two columns, one to predict and one to predict from; its header is"
            f" {', '.join(map(repr, names))}. The columns of a CSV file are separated by commas, semicolons, tabs or"
            " pipes."
        )
    return table


def read_pieces(
    path: str | Path, size: int | None = None, *, encoding: str | None = None, separator: str | None = None
) -> Iterator[Table]:
    """Yield tables of ``size`` rows each, for files larger than memory; with None, one table of all rows."""
    path = arrived(path)
    check_regular(path, "give a CSV or Parquet file.")
    with path.open("rb") as file:
        begins = file.read(4)
    if not begins:
        raise ShapeError(f"{path.name} is empty; a header and rows are needed.")
    ending = path.suffix.lower()
    if begins == b"PK\x03\x04" or ending in _OTHERS:
        raise PyroDropoutError(
            f"{path.name} is {_OTHERS.get(ending, 'an Excel')} file; CSV and Parquet files are read. Save it as CSV, or"
            " read it with pandas and give the data frame to pyro_dropout.fit_table."
        )
    parquet = begins == b"PAR1" or ending in (".parquet", ".pq")
    rows = 0
    for table in _read_parquet(path, size) if parquet else read_csv(path, size, encoding, separator):
        rows += len(table)
        if len(table):
            yield table
    if not rows:
        raise ShapeError(f"{path.name} has a header and no rows.")


def arrived(path: str | Path) -> Path:
    """Return the path of a file; for "-", that of a copy of standard input, which exists until the program ends.

    Standard input can be read once, so a program that needs its table again keeps this path.

    Example:
        >>> arrived("houses.csv")
        PosixPath('houses.csv')
    """
    if str(path) != "-":
        return Path(path)
    if sys.stdin is None or sys.stdin.isatty():
        raise PyroDropoutError("standard input is a terminal; send a table through it, or give a file.")
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    copied = Path(folder, "standard input")
    with copied.open("wb") as copy:
        shutil.copyfileobj(sys.stdin.buffer, copy)
    return copied


def _read_parquet(path: Path, size: int | None) -> Iterator[Table]:
    """Yield tables of ``size`` rows; None for all rows at once."""
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ModuleNotFoundError:
        raise PyroDropoutError(
            f'{path.name}: reading Parquet files needs the package pyarrow; pip install "pyro-dropout[parquet]".'
        ) from None
    done = 0
    try:
        with ParquetFile(path) as file:  # not as a data set, which would also read columns from the path
            names = named(path.name, file.schema_arrow.names)
            for found in [file.read()] if size is None else file.iter_batches(batch_size=size):
                columns = {name: from_arrow(found.column(k)) for k, name in enumerate(names)}
                yield Table.of(path.name, columns, range(done + 1, done + found.num_rows + 1))
                done += found.num_rows
    except (pyarrow.ArrowException, OSError) as cause:
        raise PyroDropoutError(f"{path.name} is not a valid Parquet file: {str(cause).splitlines()[0]}") from None
