"""Read a table as data to fit: encode its columns, handle missing values, and hold back a part."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pyro_dropout.errors import PyroDropoutError, RangeError, ShapeError, warn_caller
from pyro_dropout.tables.encoding import Column, Dataset, Encoding, Remarks, told
from pyro_dropout.tables.files import read_file
from pyro_dropout.tables.learning import choose_columns, learn
from pyro_dropout.tables.settings import Missing, Reading
from pyro_dropout.tables.table import Floats, Table

_FEWEST = 10
_LEAST, _SHARE, _DIFFERENT = 3, 0.01, 10  # rows that stand for missing values, their share, and other numbers
_CODES = {-1.0, 0.0, *(sign * (10.0**k - 1) for k in range(2, 10) for sign in (-1, 1))}
_FAR, _NEAR = 2.0, 0.5  # spreads between a number and the next one: of any number, and of one that is often a code


def read(path: str | Path | Table, how: Reading) -> Dataset:
    r"""Return the data in a file, or in a table that was read from one.

    Columns that cannot be used (identifiers, free text, constants) are left out, and gaps are filled in. What was done
    is said in the note of the result. About the target, nothing is guessed: rows without one are left out.

    Example:
        >>> import pathlib, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "trees.csv")
        ...     _ = path.write_text("age,kind\n" + "12,oak\n30,elm\n,elm\n" * 10)
        ...     data = read(path, Reading())
        >>> data.classes, data.train[0].shape, data.test[1].shape
        (('elm', 'oak'), torch.Size([24, 2]), torch.Size([6]))
        >>> data.note.split("; ")[1]
        'missing values filled in, with an indicator: age (10)'
    """
    table = path if isinstance(path, Table) else read_file(path, encoding=how.encoding, separator=how.separator)
    names = [*table.columns, *table.unread]
    if len(names) < 2 or not table.columns:
        raise ShapeError(
            f"{table.file} must have at least two columns, one to predict and one to predict from; its header is"
            f" {', '.join(map(repr, names))}. The columns of a CSV file are separated by commas, semicolons, tabs or"
            " pipes."
        )
    target = list(table.columns)[-1] if how.target is None else how.target
    columns, left = choose_columns(table, target, how)
    table, said = _complete(table, columns, target, how.missing)
    if len(table) < _FEWEST:
        raise ShapeError(f"{table.file} has {len(table)} rows{said}; at least {_FEWEST} are needed.")
    test, train = _split(table, how.held_back, how.seed)
    learned, left = learn(table, columns, target, train.numpy(), left, how)
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


def _stand_ins(table: Table, learned: Encoding) -> Remarks:
    """Return remarks about numbers and dates that may stand for missing values."""
    remarks = Remarks()
    for column in (*learned.inputs, learned.outcome):
        if column.categories is None:
            values = column.numbers(table)
            found = stand_in(values[~np.isnan(values)])
            if found is not None:
                what = "is far from all other values (leave such cells empty if it means missing)"
                remarks[f"{column.told(found[0])} {what}", column.name] = found[1]
    outcome = learned.outcome
    y = outcome.numbers(table) if outcome.categories is None else np.empty(0)
    zeros = int((y == 0).sum())
    if zeros >= max(_LEAST, _SHARE * len(y)) and y.min() == 0 and bool((y % 1 != 0).any()):  # whole numbers are counts
        what = (
            "0 in a part of the rows and never less, so that intervals may reach below it, and how probable more than"
        )
        remarks[f"{what} 0 is is not known (fit apart whether it is 0)", outcome.name] = zeros
    return remarks


def stand_in(numbers: Floats) -> tuple[float, int] | None:
    """Return a number that may stand for a missing value, and in how many rows it is; None if there is none.

    It is repeated, at one end, and far from the others, as -999, 9999 or 0 may be.
    """
    for value in (numbers.min(), numbers.max()) if len(numbers) else ():
        others = numbers[numbers != value]
        count = len(numbers) - len(others)
        different = 2 if value in _CODES and value != 0 else _DIFFERENT  # whole numbers from 1 to 8 have few values
        if count < max(_LEAST, _SHARE * len(numbers)) or len(np.unique(others)) < different:
            continue
        low, high = np.quantile(others, (0.1, 0.9))
        limit = _NEAR if value in _CODES else _FAR
        limit = 0.0 if value in _CODES and value < 0 <= others.min() else limit  # a quantity that is never negative
        if np.abs(others - value).min() > limit * max(high - low, others.std()):
            return float(value), count
    return None


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


def read_inputs(path: str | Path | Table, encoding: Encoding) -> tuple[Table, Tensor]:
    """Return new data read with an encoding learned from the training data: their table, and inputs (N, Q).

    Columns may be in any order. The target and the columns that training left out may be among them, and are ignored;
    all other columns as well, and the notes of the table say so.
    """
    table = path if isinstance(path, Table) else read_file(path)
    known = [column.name for column in encoding.inputs]
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
    # Gaps only, and not as a row or two of those of training may have.
    many = [column for column in encoding.inputs if len(table) >= (_FEWEST if column.gaps else 1)]
    if empty := [column.name for column in many if column.gaps_in(table).all()]:
        which = f"column {empty[0]!r} has" if len(empty) == 1 else f"columns {', '.join(map(repr, empty))} have"
        warn_caller(
            f"{table.file}: {which} no value in any row, unlike in training; all predictions are made without.",
        )
    ignored = (f"columns that training did not have, ignored: {', '.join(extra)}",) if extra else ()
    return replace(table, notes=(*table.notes, *ignored, *told(done))), x


def _complete(table: Table, columns: dict[str, Column], target: str, missing: Missing) -> tuple[Table, str]:
    """Return the table without the rows that ``missing`` leaves out, and what was done in words."""
    gaps = {name: column.gaps_in(table) for name, column in columns.items()}
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
