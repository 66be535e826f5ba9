"""Choose the columns of a table that can be used; what cannot is left out by name, or refused.

The choice is made from all rows. Nothing is decided about the target: it is recognised, or refused.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Literal

import numpy as np

from pyro_dropout.errors import PyroDropoutError, RangeError, ShapeError
from pyro_dropout.tables.cells import Cell, Cells, Floats, as_label, as_moment, as_number, as_text, brief, is_blank
from pyro_dropout.tables.column import Column
from pyro_dropout.tables.encoding import Remarks
from pyro_dropout.tables.notation import PLAIN, Decimal, Notation, is_number
from pyro_dropout.tables.precision import centre_of, known_numbers, some_different
from pyro_dropout.tables.recognition import Recognised, marks_in, quoted, recognise, settle
from pyro_dropout.tables.table import Table

_TEXTS = 0.1  # of the cells that are no numbers make a column of text; fewer are mistakes
# Names such as id, ID, house_id, id_house, houseId and key; not paid, and not idea.
_IDENTIFIER = re.compile(
    r"(?:.*[\W_])?(?:id|uid|uuid|guid|key|no|nr|serial|barcode)\.?|.*[\W_](?:num|number)|id[\W_].*|index|row|row.?id"
    r"|rownum(?:ber)?|record|#|unnamed.*",
    re.IGNORECASE,
)
_CAMEL = re.compile(r".*[a-z](?:I[dD]|No|Nr|Num|Number)")
_TIME = re.compile(
    r"(?:.*[\W_])?(?:t|x|time|age|step|second|minute|hour|day|week|month|quarter|year|period)s?(?:[\W_].*)?"
)

Task = Literal["auto", "regression", "classification"]

_MOST = 50  # categories of a target; with more, it probably identifies rows


@dataclass(frozen=True)
class Chosen:
    """The columns of a table that can be used.

    Attributes:
        table: the same table; in columns of numbers, words for a missing value are missing.
        target: the column to predict.
        found: how the target and each column to predict from is written, in the order of the table.
        asked: columns that are used because somebody said so.
        left_out: {name: why} of the columns that cannot be used.
        remarks: which words were taken for missing values.
    """

    table: Table
    target: str
    found: dict[str, Recognised]
    asked: frozenset[str]
    left_out: dict[str, str]
    remarks: Remarks

    @property
    def names(self) -> list[str]:
        """The columns to predict from."""
        return [name for name in self.found if name != self.target]

    def check_some(self, used: Sequence[object]) -> None:
        """Raise unless there is a column to predict from."""
        if not used:
            why = "".join(f"; {name!r} is left out ({why})" for name, why in self.left_out.items())
            raise ShapeError(f"{self.table.file}: no column is left to predict {self.target!r} from{why}.")


def choose_columns(
    table: Table,
    target: str,
    task: Task = "auto",
    categorical: Collection[str] = (),
    drop: Collection[str] = (),
    keep: Collection[str] = (),
    decimal: Decimal | None = None,
) -> Chosen:
    """Return the columns that can be used, and why the others cannot.

    Columns are left out if they have no values or one value, identify the rows, or hold free text. Those that are named
    in ``categorical`` or ``keep`` are used or refused.

    Args:
        table: all rows, as they stand in the file.
        target: the column to predict.
        task: "regression" or "classification"; "auto" infers it from the target's values.
        categorical: columns to treat as categories.
        drop: columns to leave out.
        keep: columns to use although they look useless.
        decimal: the decimal mark, "point" or "comma", of columns that may be read in two ways.
    """
    asked = frozenset({*categorical, *keep})
    for name in (target, *asked, *(name for name in drop if name not in table.unread)):
        table.column(name)
    for name in drop:
        if name == target or name in asked:
            raise PyroDropoutError(
                f"the column {name!r} cannot be both {'the target' * (name == target) or 'used'} and left out."
            )
    left = {name: f"its type is {kind}" for name, kind in table.unread.items() if name not in drop}
    names = [name for name in table.columns if name not in (target, *drop)]
    table, remarks = _blanked(table, [name for name in names if name not in categorical])
    instead = {name: f"declare the column as categories (--categorical {quoted(name)})" for name in names}
    instead[target] = "predict classes (--task classification)"
    found: dict[str, Recognised] = {}
    for name in (*names, target):
        cells = table.column(name)
        given = name in categorical if name != target else task == "classification"
        if name != target and cells.missing.all():
            if name in asked:
                raise ShapeError(f"{table.file}, column {name!r}: every value is missing; leave it out (--drop).")
            left[name] = "no values"
            continue
        as_text = given or (name != target and _mixed(cells))
        each = Recognised(None) if as_text else recognise(table, name, instead[name])
        if each.unknown and (name == target or name in asked):
            raise RangeError(f"{table.where(each.row, name)}: {each.unknown}, or {instead[name]}.")
        if each.unknown:
            left[name] = each.unknown
        else:
            found[name] = each
    seen = marks_in(found)
    for name in [name for name in found if name != target and name not in asked]:
        why = _useless(name, table.column(name), found[name].notation)
        if why:
            del found[name]
            left[name] = why
    settle(table, found, seen, decimal, instead)
    counting = [name for name in found if name not in (target, *asked) and _counts_rows(table, name, found[name])]
    for name in counting if len(counting) < len(found.keys() - {target}) else counting[1:]:
        del found[name]
        left[name] = f"counts the rows; --keep {quoted(name)} uses it"
    chosen = Chosen(table, target, found, asked, left, remarks)
    if names:
        outcome_column(table, target, task, found[target].notation)  # raises if there is nothing to predict
    chosen.check_some(chosen.names)
    return chosen


def _blanked(table: Table, names: Collection[str]) -> tuple[Table, Remarks]:
    """Return the table without words for missing values in columns whose other cells are numbers, dates or truths."""
    columns, remarks = dict(table.columns), Remarks()
    for name in names:
        cells = table.column(name)
        if cells.numbers is not None:
            continue
        distinct = cells.distinct
        blank = [is_blank(cell) for cell in distinct.cells]
        if (
            any(blank)
            and not all(blank)
            and all(gone or _is_value(cell) for gone, cell in zip(blank, distinct.cells, strict=True))
        ):
            for cell, count in compress(zip(distinct.cells, distinct.counts.tolist(), strict=True), blank):
                remarks[f"{brief(cell)} read as missing", name] += count
            columns[name] = cells.without(distinct.spread(blank))
    return replace(table, columns=columns), remarks


def _is_value(cell: Cell) -> bool:
    if not isinstance(cell, str):
        return True
    written = is_number(cell) or as_moment(cell) is not None
    return written or as_label(cell) in ("true", "false")


def _mixed(cells: Cells) -> bool:
    """Return whether a column holds texts some of which happen to be numbers, such as the numbers of tickets."""
    if cells.numbers is not None:
        return False
    counts, known = cells.distinct.counts, int(cells.distinct.counts.sum())
    texts = int(counts[[not _is_value(cell) for cell in cells.distinct.cells]].sum())
    return _TEXTS * known < texts < known


def _useless(name: str, cells: Cells, notation: Notation | None) -> str:
    """Return why a column cannot be used; "" if it can."""
    named = notation is not None and (notation.padded or _IDENTIFIER.fullmatch(name) or _CAMEL.fullmatch(name))
    if notation is not None and not named and cells.numbers is not None and some_different(cells.numbers) > 1:
        return ""
    found, different = int((~cells.missing).sum()), _different(cells)
    if different == 1:
        return "constant" if found == len(cells) else ""
    if notation is None and different == found:
        return "text, all different"
    if notation is None and 2 * different > found:
        return f"free text, {different} different values"
    if named and notation is not None and different == found and len(_whole(notation, cells)):
        return f"an identifier; --keep {quoted(name)} uses it"
    return ""


def _different(cells: Cells) -> int:
    """Return how many different labels a column has."""
    if cells.numbers is not None:
        known = known_numbers(cells.numbers)
        if len(np.unique(known)) == len(known):  # different numbers have different labels
            return len(known)
    return len({as_label(cell) for cell in cells.distinct.cells})


def _whole(notation: Notation, cells: Cells) -> Floats:
    """Return the numbers in a column if all are whole and have no unit, else none."""
    if not notation.plain or cells.numbers is None:
        return np.empty(0)
    known = known_numbers(cells.numbers)
    with np.errstate(invalid="ignore"):  # infinity has no remainder
        return known if bool((known % 1 == 0).all()) else np.empty(0)


def _counts_rows(table: Table, name: str, found: Recognised) -> bool:
    """Return whether a column counts the rows of the file from 0 or 1, and its name says nothing of time."""
    if found.notation is None or _TIME.fullmatch(name.lower()):
        return False
    values = _whole(found.notation, table.column(name))
    if len(values) < len(table) or values[0] not in (0, 1):
        return False
    return bool((values == values[0] + np.arange(len(values))).all())


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
    numbers = table.column(name).numbers
    binary = kind == "number" and numbers is not None and bool(np.isin(numbers[known], (0, 1)).all())
    if task == "regression" or (kind == "number" and not binary):
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
    most = max(2, min(_MOST, rows // 2))
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
