"""Read CSV and Parquet files into named columns.

Nothing is guessed here. Errors name the file, the row (the line of a CSV file, header included) and the column.
"""

from collections.abc import Iterator
from pathlib import Path

from pyro_dropout.mathematics.errors import ShapeError
from pyro_dropout.tables.cells import MISSING, Cell, as_label, as_number, brief
from pyro_dropout.tables.csv_file import read_csv
from pyro_dropout.tables.parquet_file import read_parquet
from pyro_dropout.tables.table import Table
from pyro_dropout.training.checkpoints.regular_file import check_regular

__all__ = ["MISSING", "Cell", "Table", "as_label", "as_number", "brief", "read_file", "read_pieces"]

_PARQUET = b"PAR1"


def read_file(path: str | Path, *, encoding: str | None = None, separator: str | None = None) -> Table:
    r"""Return the table in a CSV file with a header, or in a Parquet file.

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
        >>> table.columns, table.rows
        ({'age': ['12', None], 'kind': ['#1 oak', 'elm']}, [3, 4])
        >>> table.notes
        ('separated by semicolons', '1 comment line before the header skipped')
    """
    (table,) = read_pieces(path, encoding=encoding, separator=separator)
    return table


def read_pieces(
    path: str | Path, size: int | None = None, *, encoding: str | None = None, separator: str | None = None
) -> Iterator[Table]:
    """Yield tables of ``size`` rows each, for files larger than memory; with None, one table of all rows."""
    path = Path(path)
    check_regular(path, "give a CSV or Parquet file.")
    with path.open("rb") as file:
        begins = file.read(len(_PARQUET))
    if not begins:
        raise ShapeError(f"{path.name} is empty; a header and rows are needed.")
    binary = begins == _PARQUET or path.suffix.lower() in (".parquet", ".pq")
    rows = 0
    for table in read_parquet(path, size) if binary else read_csv(path, size, encoding, separator):
        rows += len(table)
        if len(table):
            yield table
    if not rows:
        raise ShapeError(f"{path.name} has a header and no rows.")
