"""Choose the columns of a table that can be used; what cannot is left out by name, or refused.

The choice is made from all rows. Nothing is decided about the target: it is recognised, or refused.
"""

import re
import shlex
from dataclasses import dataclass

import numpy as np

from pyro_dropout.errors import PyroDropoutError, RangeError, ShapeError
from pyro_dropout.tables.encoding import Column
from pyro_dropout.tables.notation import NUMBER, MisfitError, Notation, Written, recognise, settled
from pyro_dropout.tables.settings import Reading
from pyro_dropout.tables.table import Bools, Floats, Table, brief

# Names such as id, ID, house_id, id_house, houseId and key; not paid, and not idea.
_IDENTIFIER = re.compile(
    r"(?:.*[\W_])?(?:id|uid|uuid|guid|key|no|nr|serial|barcode)\.?|.*[\W_](?:num|number)|id[\W_].*|index|row|row.?id"
    r"|rownum(?:ber)?|record|#|unnamed.*|(?-i:.*[a-z](?:I[dD]|No|Nr|Num|Number))",
    re.IGNORECASE,
)
_TIME = re.compile(
    r"(?:.*[\W_])?(?:t|x|time|age|step|second|minute|hour|day|week|month|quarter|year|period)s?(?:[\W_].*)?"
)


@dataclass(frozen=True)
class Chosen:
    """The columns of a table that can be used.

    Attributes:
        table: the same table.
        target: the column to predict.
        found: how the target and each column to predict from is written, in the order of the table; None for text.
        asked: columns that are used because somebody said so.
        left_out: {name: why} of the columns that cannot be used.
    """

    table: Table
    target: str
    found: dict[str, Notation | None]
    asked: frozenset[str]
    left_out: dict[str, str]

    @property
    def names(self) -> list[str]:
        """The columns to predict from."""
        return [name for name in self.found if name != self.target]

    def gaps(self, name: str) -> Bools:
        """Return which cells of a column are missing, or words that mean it."""
        notation = self.found[name]
        if name == self.target or notation is None:
            return np.asarray(self.table.column(name).isna(), np.bool_)
        return _read_as(name, notation).gaps_in(self.table)


def choose_columns(table: Table, target: str, how: Reading) -> Chosen:
    """Return the columns that can be used, and why the others cannot.

    Columns are left out if they have no values or one value, identify the rows, or hold free text. Those that are named
    in ``how.categorical`` or ``how.keep`` are used or refused.
    """
    asked = frozenset({*how.categorical, *how.keep})
    for name in (target, *asked, *(name for name in how.drop if name not in table.unread)):
        table.column(name)
    for name in {target, *asked} & set(how.drop):
        what = "the target" if name == target else "used"
        raise PyroDropoutError(f"the column {name!r} cannot be both {what} and left out.")
    left = {name: f"its type is {kind}" for name, kind in table.unread.items() if name not in how.drop}
    names = [name for name in table.columns if name not in (target, *how.drop)]
    instead = {name: f"declare the column as categories (--categorical {quoted(name)})" for name in names}
    instead[target] = "predict classes (--task classification)"
    every: dict[str, Written] = {}
    for name in (*names, target):
        if name != target and table.column(name).isna().all():
            if name in asked:
                raise ShapeError(f"{table.file}, column {name!r}: every value is missing; leave it out (--drop).")
            left[name] = "no values"
            continue
        given = name in how.categorical if name != target else how.task == "classification"
        try:
            written = Written() if given else recognise(table, name, mixed=name != target)
        except MisfitError as wrong:
            if wrong.cell.strip().lstrip("+-").lower() in ("inf", "infinity"):
                raise RangeError(f"{_place(table, name, wrong.cell)}: {brief(wrong.cell)} is not finite.") from None
            raise RangeError(f"{_place(table, name, wrong.cell)}: {wrong}. Fix it, or {instead[name]}.") from None
        if written.unknown and (name == target or name in asked):
            raise RangeError(f"{_place(table, name, written.cell)}: {written.unknown}, or {instead[name]}.")
        if written.unknown:
            left[name] = written.unknown
        else:
            every[name] = written
    free = [name for name in every if name != target and name not in asked]
    useless = {name: why for name in free if (why := _useless(table, name, every[name].notation))}
    left |= useless
    used = {name: each for name, each in every.items() if name not in useless}
    found, unclear = settled(used, every, how.decimal, table.separator == ";")
    if unclear is not None:
        raise _two_readings(table, unclear, used[unclear], instead[unclear])
    counting = [name for name in found if name in free and _counts_rows(table, name, found[name])]
    for name in counting if len(counting) < len(found) - 1 else counting[1:]:
        del found[name]
        left[name] = f"counts the rows; --keep {quoted(name)} uses it"
    return Chosen(table, target, found, asked, left)


def quoted(name: str) -> str:
    """Return a column's name as the command line takes it."""
    return shlex.quote('"' + name.replace('"', '""') + '"' if set(name) & set('",') else name)


def _place(table: Table, name: str, cell: str) -> str:
    return table.where(int((table.column(name) == cell).argmax()), name)


def _two_readings(table: Table, name: str, written: Written, instead: str) -> RangeError:
    both = (written.notation, written.comma)
    point, comma = (f"{each.value(written.cell):g}" for each in both if each is not None)
    return RangeError(
        f"{_place(table, name, written.cell)}: {brief(written.cell)} may mean {point} or {comma}, and so may the whole"
        f" column. Say which: --decimal point for {point}, --decimal comma for {comma} (in Python decimal='point' or"
        f" decimal='comma'); or {instead}."
    )


def _read_as(name: str, notation: Notation) -> Column:
    return Column(name, () if notation.kind == "truth" else None, notation)


def _useless(table: Table, name: str, notation: Notation | None) -> str:
    """Return why a column cannot be used; "" if it can."""
    if notation is not None and notation.kind != "truth":
        values = _read_as(name, notation).numbers(table)
        known = values[~np.isnan(values)]
        if len(known) and known.min() == known.max():
            return "constant" if len(known) == len(values) else ""
        whole = _whole(table, name, notation) if _IDENTIFIER.fullmatch(name) else known[:0]
        unique = len(whole) > 0 and len(np.unique(whole)) == len(whole)
        return f"an identifier; --keep {quoted(name)} uses it" if unique else ""
    rows, cells = table.different(name)
    known = cells if notation is None else _read_as(name, notation).usable(cells)
    found = int(np.append(known.notna(), False)[rows].sum())
    different = len(set((notation or NUMBER).labels(known.dropna())))
    if different == 1:
        return "constant" if found == len(table) else ""
    if notation is None and 2 * different > found:
        what = "codes with zeros before them" if cells.str.fullmatch("0[0-9]+").any() else "text"
        return f"{what}, all different" if different == found else f"free {what}, {different} different values"
    return ""


def _whole(table: Table, name: str, notation: Notation | None) -> Floats:
    """Return the numbers in a column if all are whole and plain, else none."""
    values = _read_as(name, NUMBER).numbers(table) if notation == NUMBER else np.empty(0)
    values = values[~np.isnan(values)]
    return values if (np.trunc(values) == values).all() else np.empty(0)


def _counts_rows(table: Table, name: str, notation: Notation | None) -> bool:
    """Return whether a column counts the rows of the file from 0 or 1, and its name says nothing of time."""
    values = np.empty(0) if _TIME.fullmatch(name.lower()) else _whole(table, name, notation)
    start = values[0] if len(values) == len(table) else -1
    return start in (0, 1) and bool((values == start + np.arange(len(values))).all())
