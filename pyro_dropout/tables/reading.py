"""Read a table as data to fit: encode its columns, handle missing values, and hold back a part."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from pyro_dropout.errors import PyroDropoutError, RangeError, ShapeError
from pyro_dropout.tables.column_selection import Chosen, Task, choose_columns
from pyro_dropout.tables.csv_file import Separator
from pyro_dropout.tables.encoding import Dataset, Encoding, Remarks, told
from pyro_dropout.tables.files import read_file, read_pieces
from pyro_dropout.tables.learning import learn
from pyro_dropout.tables.notation import Decimal
from pyro_dropout.tables.precision import stand_in
from pyro_dropout.tables.table import Table

Missing = Literal["auto", "refuse", "drop"]

_FEWEST = 10


@dataclass(frozen=True)
class Reading:
    """How a table is read.

    Attributes:
        target: the name of the column to predict; None for the last one.
        task: "regression", "classification", or "auto": a class if the target is text or 0 and 1.
        missing: "auto" fills in the mean of the training rows, for categories the share of each, with a feature that
            says where; "refuse" missing values, or "drop" their rows. Rows without a target are left out, or refused.
        categorical: numeric columns to treat as categories.
        drop: columns to leave out.
        held_back: the share of rows, chosen at random, that is kept for testing; 0 for none.
        seed: of that choice.
        decimal: the decimal mark, "point" or "comma", of columns that may be read in two ways, such as 1,200.
        encoding: of a CSV file, if it is neither UTF-8 nor declared by the file's first bytes.
        separator: of a CSV file, "comma", "semicolon", "tab" or "pipe"; by default the one that splits the header.
        keep: columns to use although they look like identifiers, free text or constants.
    """

    target: str | None = None
    task: Task = "auto"
    missing: Missing = "auto"
    categorical: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    held_back: float = 0.2
    seed: int = 0
    decimal: Decimal | None = None
    encoding: str | None = None
    separator: Separator | None = None
    keep: tuple[str, ...] = ()

    def read(self, path: str | Path | Table) -> Dataset:
        """Return the data in a file, or in a table that was read from one."""
        if not 0 <= self.held_back < 1:
            raise RangeError(f"held_back must lie in [0, 1); got {self.held_back!r}.")
        how = {"encoding": self.encoding, "separator": self.separator}
        table = path if isinstance(path, Table) else read_file(path, **how)
        target = list(table.columns)[-1] if self.target is None else self.target
        chosen = choose_columns(table, target, self.task, self.categorical, self.drop, self.keep, self.decimal)
        table, said = _complete(chosen, self.missing)
        if len(table) < _FEWEST:
            raise ShapeError(f"{table.file} has {len(table)} rows{said}; at least {_FEWEST} are needed.")
        test, train = _split(table, self.held_back, self.seed)
        learned, left = learn(chosen, table, train.numpy(), self.task)
        left = chosen.left_out | left
        learned = replace(learned, left_out=(*self.drop, *left))
        (x, remarks), y = learned.inputs_of(table), learned.targets_of(table)
        known = x.index_select(0, train)
        learned = learned.seen(known)
        remarks.update(_stand_ins(table, learned))
        held = f" and {len(test)} test rows, chosen at random" if len(test) else ""
        without = ["left out: " + ", ".join(f"{name} ({why})" for name, why in left.items())] if left else []
        notes = [*table.notes, f"{len(train)} training rows{held}{said}", *without, *told(remarks), *learned.remarks]
        return Dataset(
            Path(table.file).stem,
            (known, y[train]),
            (x[test], y[test]),
            ", ".join(column.axis for column in learned.inputs),
            learned.outcome.axis,
            f"{table.file}: " + "; ".join(notes) + ".",
            learned,
        )


def read_table(path: str | Path | Table, **how: Any) -> Dataset:
    r"""Return a file as data for regression or classification.

    Columns that cannot be used (identifiers, free text, constants) are left out, and gaps are filled in. What was done
    is said in the note of the result. About the target, nothing is guessed: rows without one are left out.

    Args:
        path: the file, or its table.
        how: the attributes of ``Reading``, such as target="price", drop=["id"] or held_back=0.0.

    Example:
        >>> import pathlib, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "trees.csv")
        ...     _ = path.write_text("age,kind\n" + "12,oak\n30,elm\n,elm\n" * 10)
        ...     data = read_table(path)
        >>> data.classes, data.train[0].shape, data.test[1].shape
        (('elm', 'oak'), torch.Size([24, 2]), torch.Size([6]))
        >>> data.note.split("; ")[1]
        'missing values filled in, with an indicator: age (10)'
    """
    fields: Any = {name: tuple(value) if isinstance(value, list) else value for name, value in how.items()}
    return Reading(**fields).read(path)


def _stand_ins(table: Table, learned: Encoding) -> Remarks:
    """Return remarks about numbers that may stand for missing values."""
    remarks = Remarks()
    for column in (*learned.inputs, learned.outcome):
        if column.categories is None and column.notation.kind == "number":
            values = column.numbers(table)
            found = stand_in(values[~np.isnan(values)])
            if found is not None:
                what = f"{found[0]:.12g} is far from all other values (leave such cells empty if it means missing)"
                remarks[what, column.name] = found[1]
    return remarks


def _split(table: Table, held_back: float, seed: int) -> tuple[Tensor, Tensor]:
    """Return the rows for testing, chosen at random, and those for training."""
    rows = len(table)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed), device="cpu")
    cut = max(1, round(held_back * rows)) if held_back else 0
    if rows - cut < 2:
        raise RangeError(
            f"held_back={held_back:g} of the {rows} rows of {table.file} leaves {rows - cut} to train on, and at"
            " least 2 are needed; hold back fewer."
        )
    return order[:cut], order[cut:]


def read_input_pieces(
    path: str | Path | Table,
    encoding: Encoding,
    size: int | None,
    *,
    text_encoding: str | None = None,
    separator: str | None = None,
) -> Iterator[tuple[Table, Tensor]]:
    """Yield new data read with an encoding learned from the training data: tables, and inputs (N, Q).

    Columns may be in any order. The target and the columns that training left out may be among them, and are ignored;
    all other columns as well, and the notes of the tables say so. Those count what was filled in or read as something
    else, up to and including the piece.

    Args:
        path: a file, or a table.
        encoding: of the data that a network was trained on.
        size: rows in a piece, for files larger than memory; None for all at once.
        text_encoding: of a CSV file, as for ``read_table``.
        separator: of a CSV file, as for ``read_table``.
    """
    known = [column.name for column in encoding.inputs]
    remarks = Remarks()
    pieces = (
        read_pieces(path, size, encoding=text_encoding, separator=separator) if not isinstance(path, Table) else [path]
    )
    for table in pieces:
        absent = [name for name in known if name not in table.columns]
        if absent and absent[0] in table.unread:
            table.column(absent[0])
        if absent:
            which = f"column {absent[0]!r}" if len(absent) == 1 else f"columns {', '.join(map(repr, absent))}"
            raise PyroDropoutError(
                f"{table.file} has no {which}, which the run was trained with; its columns are"
                f" {', '.join(table.columns)}. Cells of {'it' if len(absent) == 1 else 'them'} may be empty."
            )
        usual = {*known, encoding.target, *encoding.left_out}
        extra = [name for name in (*table.columns, *table.unread) if name not in usual]
        x, done = encoding.inputs_of(table)
        remarks.update(done)
        ignored = (f"columns that training did not have, ignored: {', '.join(extra)}",) if extra else ()
        yield replace(table, notes=(*table.notes, *ignored, *told(remarks))), x


def _complete(chosen: Chosen, missing: Missing) -> tuple[Table, str]:
    """Return the table without the rows that ``missing`` leaves out, and what was done in words."""
    table, target = chosen.table, chosen.target
    gaps = {name: chosen.gaps(name) for name in chosen.found}
    first = {name: int(gap.argmax()) for name, gap in gaps.items() if gap.any()}
    if missing == "refuse" and first:
        name = min(first, key=lambda name: first[name])  # of one row, the first column
        raise RangeError(
            f"{table.where(first[name], name)}: the value is missing. Drop such rows with --missing drop, or fill in"
            " means with --missing auto."
        )
    lost = np.any(list(gaps.values()), axis=0) if missing == "drop" else gaps[target]
    why = "with missing values dropped" if missing == "drop" else f"without {target!r} left out"
    return (table.only(np.flatnonzero(~lost)), f" ({lost.sum()} {why})") if lost.any() else (table, "")
