"""Read a table as data to fit: encode its columns, handle missing values, and hold back a part."""

from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from pyro_dropout.mathematics.errors import PyroDropoutError, RangeError, ShapeError
from pyro_dropout.tables.dataset import Dataset
from pyro_dropout.tables.encoding import Encoding
from pyro_dropout.tables.files import read_file, read_pieces
from pyro_dropout.tables.learning import Task, learn
from pyro_dropout.tables.notation import Decimal
from pyro_dropout.tables.table import Table

Missing = Literal["refuse", "drop", "mean"]

_FEWEST = 10


def read_table(
    path: str | Path,
    *,
    target: str | None = None,
    task: Task = "auto",
    missing: Missing = "refuse",
    categorical: Collection[str] = (),
    drop: Collection[str] = (),
    decimal: Decimal | None = None,
    encoding: str | None = None,
    separator: str | None = None,
    held_back: float = 0.2,
    seed: int = 0,
) -> Dataset:
    r"""Return a CSV or Parquet file as data for regression or classification.

    Args:
        path: the file.
        target: the name of the column to predict; the last one by default.
        task: "regression", "classification", or "auto": a class if the target is text or 0 and 1.
        missing: "refuse" missing values, "drop" their rows, or fill in the "mean" of the training rows; for categories
            that is the share of each. A missing target is never filled in.
        categorical: numeric columns to treat as categories.
        drop: columns to leave out.
        decimal: the decimal mark, "point" or "comma", of columns that may be read in two ways, such as 1,200.
        encoding: of a CSV file, if it is neither UTF-8 nor declared by the file's first bytes.
        separator: of a CSV file, "comma", "semicolon", "tab" or "pipe"; by default the one that splits the header.
        held_back: the share of rows, chosen at random, that is kept for testing; 0 for none.
        seed: of that choice.

    Example:
        >>> import pathlib, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "trees.csv")
        ...     _ = path.write_text("age,kind\n" + "12,oak\n30,elm\n" * 10)
        ...     data = read_table(path)
        >>> data.classes, data.train[0].shape, data.test[1].shape
        (('elm', 'oak'), torch.Size([16, 1]), torch.Size([4]))
    """
    if not 0 <= held_back < 1:
        raise RangeError(f"held_back must lie in [0, 1); got {held_back!r}.")
    table = read_file(path, encoding=encoding, separator=separator)
    target = list(table.columns)[-1] if target is None else target
    table.column(target)
    table, said = _complete(table, target, missing, drop)
    if len(table) < _FEWEST:
        raise ShapeError(f"{table.file} has {len(table)} rows{said}; at least {_FEWEST} are needed.")
    learned = learn(table, target, task, categorical, drop, decimal)
    x, y = learned.inputs_of(table), learned.targets_of(table)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    cut = max(1, round(held_back * len(x))) if held_back else 0
    if len(x) - cut < 2:
        raise RangeError(
            f"held_back={held_back:g} of the {len(x)} rows of {table.file} leaves {len(x) - cut} to train on, and at"
            " least 2 are needed; hold back fewer."
        )
    test, train = order.split([cut, len(x) - cut])
    if missing == "mean":
        learned = replace(learned, fill=_means(table, learned, x[train]))
        x = learned.inputs_of(table)
    learned = learned.seen(x[train])
    rows = f"{len(train)} training rows" + (f" and {cut} test rows, chosen at random" if cut else "") + said
    return Dataset(
        Path(path).stem,
        (x[train], y[train]),
        (x[test], y[test]),
        ", ".join(column.axis for column in learned.inputs),
        learned.outcome.axis,
        f"{table.file}: " + "; ".join([*table.notes, rows, *learned.remarks]) + ".",
        learned,
    )


def read_input_pieces(
    path: str | Path,
    encoding: Encoding,
    size: int | None,
    *,
    ignore_extra: bool = False,
    text_encoding: str | None = None,
    separator: str | None = None,
) -> Iterator[tuple[Table, Tensor]]:
    """Yield new data read with an encoding learned from the training data: tables, and inputs (N, Q).

    Columns may be in any order; the target may be among them and is ignored.

    Args:
        path: a CSV or Parquet file.
        encoding: of the data that a network was trained on.
        size: rows in a piece, for files larger than memory; None for all at once.
        ignore_extra: whether columns that were not in the training data are ignored instead of an error.
        text_encoding: of a CSV file, as for ``read_table``.
        separator: of a CSV file, as for ``read_table``.
    """
    known = [column.name for column in encoding.inputs]
    for table in read_pieces(path, size, encoding=text_encoding, separator=separator):
        absent = [name for name in known if name not in table.columns]
        if absent and absent[0] in table.unread:
            table.column(absent[0])
        if absent:
            raise PyroDropoutError(
                f"{table.file} has no column {absent[0]!r}, which the run was trained with; its columns are"
                f" {', '.join(table.columns)}."
            )
        extra = [name for name in (*table.columns, *table.unread) if name not in known and name != encoding.target]
        if extra and not ignore_extra:
            raise PyroDropoutError(
                f"{table.file}: the column {extra[0]!r} was not in the training data. Remove it, or use --ignore-extra."
            )
        if encoding.fill is None:
            _refuse(table, known, "The run was trained on complete rows; fit it with --missing mean to fill gaps.")
        yield table, encoding.inputs_of(table)


def _complete(table: Table, target: str, missing: Missing, drop: Collection[str]) -> tuple[Table, str]:
    """Return the table with missing values handled as ``missing`` says, and what was done in words."""
    names = [name for name in table.columns if name not in drop]
    if missing == "drop":
        kept = [row for row in range(len(table)) if all(table.columns[name][row] is not None for name in names)]
        gone = len(table) - len(kept)
        return table.only(kept), f" ({gone} with missing values dropped)" if gone else ""
    if missing == "mean":
        _refuse(table, [target], "A target is not filled in; use --missing drop.")
        gaps = sum(cell is None for name in names for cell in table.columns[name])
        return table, f" ({gaps} missing values filled in)" if gaps else ""
    _refuse(table, names, "Drop such rows with --missing drop, or fill in means with --missing mean.")
    return table, ""


def _refuse(table: Table, names: Collection[str], remedy: str) -> None:
    for row in range(len(table)):
        for name in names:
            if table.columns[name][row] is None:
                raise RangeError(f"{table.where(row, name)}: the value is missing. {remedy}")


def _means(table: Table, encoding: Encoding, x: Tensor) -> tuple[float, ...]:
    means = x.nanmean(0)
    if bool(means.isnan().any()):
        name = encoding.features[int(means.isnan().nonzero()[0])]
        raise ShapeError(f"{table.file}, column {name!r}: all values are missing in the training rows.")
    return tuple(means.tolist())
