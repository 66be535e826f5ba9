"""Learn from a training table how its columns become numbers; stop where a column may be read in two ways."""

from collections.abc import Collection
from typing import Literal

from pyro_dropout.mathematics.errors import PyroDropoutError, RangeError, ShapeError
from pyro_dropout.tables.cells import Cell, as_number, as_text, brief
from pyro_dropout.tables.column import Column
from pyro_dropout.tables.encoding import Encoding
from pyro_dropout.tables.notation import PLAIN, Decimal, Notation
from pyro_dropout.tables.precision import centre_of, known_numbers, some_different
from pyro_dropout.tables.recognition import Recognised, as_range_errors, quoted, recognise, settle
from pyro_dropout.tables.table import Table

Task = Literal["auto", "regression", "classification"]

MOST = 50  # categories of a column; with more, it probably identifies rows


def learn(
    table: Table,
    target: str,
    task: Task = "auto",
    categorical: Collection[str] = (),
    drop: Collection[str] = (),
    decimal: Decimal | None = None,
) -> Encoding:
    """Return the encoding for a table: text is a category, and a target of text or of 0 and 1 is a class.

    Args:
        table: the training table; it must contain all categories.
        target: the column to predict.
        task: "regression" or "classification"; "auto" infers it from the target's values.
        categorical: numeric columns to treat as categories.
        drop: columns to leave out.
        decimal: the decimal mark, "point" or "comma", of columns that may be read in two ways.
    """
    for name in (target, *categorical, *drop, *table.unread):
        if name not in drop or name not in table.unread:
            table.column(name)
    if target in drop:
        raise PyroDropoutError(f"the column {target!r} cannot be both the target and left out.")
    names = [name for name in table.columns if name != target and name not in drop]
    if not names:
        raise ShapeError(f"{table.file}: no column is left to predict {target!r} from.")
    for name in names:
        if table.column(name).missing.all():
            raise ShapeError(f"{table.file}, column {name!r}: every value is missing; leave the column out (--drop).")
    instead = {name: f"declare the column as categories (--categorical {quoted(name)})" for name in names}
    instead[target] = "predict classes (--task classification)"
    asked = [name for name in names if name not in categorical] + [target] * (task != "classification")
    with as_range_errors():
        found = {name: recognise(table, name, decimal, instead[name]) for name in asked}
        settle(table, found, decimal, instead)
    inputs = tuple(input_column(table, name, found.get(name, Recognised(None)).notation) for name in names)
    outcome = outcome_column(table, target, task, found.get(target, Recognised(None)).notation)
    return Encoding(
        inputs,
        target,
        outcome.categories or (),
        target_notation=outcome.notation,
        target_centre=outcome.centre,
    )


def input_column(table: Table, name: str, notation: Notation | None) -> Column:
    """Return a column to predict from; raise if it has too many categories."""
    if notation is not None and notation.kind != "boolean":
        return number_column(table, name, notation)
    column = Column(name, labels_in(table, name, notation or PLAIN), notation or PLAIN)
    if len(column.categories or ()) > MOST:
        raise RangeError(
            f"{table.file}, column {name!r}: {len(column.categories or ())} different texts are too many for categories"
            f" (at most {MOST}); leave the column out (--drop {quoted(name)})."
        )
    return column


def outcome_column(table: Table, name: str, task: Task, notation: Notation | None) -> Column:
    """Return the column to predict, as a number or as classes; raise if there is nothing to predict."""
    known = ~table.column(name).missing
    kind = None if notation is None else notation.kind
    if kind == "date":
        raise RangeError(
            f"{table.file}, column {name!r}: a date cannot be the target; predict a number, such as the days until it,"
            " or classes (--task classification)."
        )
    notation = notation or PLAIN
    if task == "regression" or (kind == "number" and not notation.binary):
        column = number_column(table, name, notation if kind == "number" else PLAIN)
        count = some_different(column.measured(table))
    else:
        labels = labels_in(table, name, notation)
        labels = tuple(sorted(labels, key=lambda label: (as_number(label) is None, as_number(label) or 0.0, label)))
        column, count = Column(name, labels, notation), len(labels)
    if count < 2:
        only = f"only one value, {brief(table.columns[name][int(known.argmax())])}" if known.any() else "no value"
        raise RangeError(f"{table.file}, column {name!r}: the target has {only}; there is nothing to predict.")
    rows = int(known.sum())
    most = max(2, min(MOST, rows // 2))
    if column.categories is not None and count > most:
        raise RangeError(
            f"{table.file}, column {name!r}: {count} different values in {rows} rows are too many for classes (at"
            f" most {most})."
        )
    return column


def number_column(table: Table, name: str, notation: Notation) -> Column:
    """Return a column of numbers or dates, centred if single precision needs it."""
    values = known_numbers(Column(name, None, notation).measured(table))
    return Column(name, None, notation, centre_of(values, f"{table.file}, column {name!r}"))


def labels_in(table: Table, name: str, notation: Notation) -> tuple[str, ...]:
    """Return the labels of a column; raise if one stands for 1.1 and 1.10, which may be a number or two versions."""
    met: dict[str, tuple[int, Cell]] = {}
    distinct = table.column(name).distinct
    for row, cell in zip(distinct.rows.tolist(), distinct.cells, strict=True):
        label = notation.label(cell)
        other = met.setdefault(label, (row, cell))[1]
        if as_text(cell) != as_text(other) and "." in label and as_number(label) is not None:
            raise RangeError(
                f"{table.where(row, name)}: {brief(cell)} and {brief(other)} are one number, and may be two names."
                " Write one of them everywhere, or put a letter before each."
            )
    return tuple(sorted(met))
