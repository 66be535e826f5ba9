"""Choose the columns of a table that can be used; what cannot is left out by name, or refused.

The choice is made from all rows. Nothing is decided about the target: it is recognised, or refused.
"""

import re
import shlex

import numpy as np

from pyro_dropout.errors import PyroDropoutError, RangeError, ShapeError
from pyro_dropout.tables.encoding import Column
from pyro_dropout.tables.notation import NUMBER, MisfitError, Written, recognise, settled
from pyro_dropout.tables.settings import Reading
from pyro_dropout.tables.table import Floats, Table, brief

# Names such as id, ID, house_id, id_house, houseId and key; not paid, and not idea.
_IDENTIFIER = re.compile(
    r"(?:.*[\W_])?(?:id|uid|uuid|guid|key|no|nr|serial|barcode)\.?|.*[\W_](?:num|number)|id[\W_].*|index|row|row.?id"
    r"|rownum(?:ber)?|record|#|unnamed.*|(?-i:.*[a-z](?:I[dD]|No|Nr|Num|Number))",
    re.IGNORECASE,
)
_TIME = re.compile(
    r"(?:.*[\W_])?(?:t|x|time|age|step|second|minute|hour|day|week|month|quarter|year|period)s?(?:[\W_].*)?"
)


def choose_columns(table: Table, target: str, how: Reading) -> tuple[dict[str, Column], dict[str, str]]:
    """Return the target and the columns to predict from, as they are written, and why the others cannot be used.

    Columns are left out if they have no values or one value, identify the rows, or hold free text. Those that are named
    in ``how.categorical`` or ``how.keep`` are used or refused.
    """
    asked = dict.fromkeys((target, *how.categorical, *how.keep))
    for name in (*asked, *(name for name in how.drop if name not in table.unread)):
        table.column(name)
    for name in filter(how.drop.__contains__, asked):
        what = "the target" if name == target else "used"
        raise PyroDropoutError(f"the column {name!r} cannot be both {what} and left out.")
    if target in how.categorical and how.task != "classification":
        raise PyroDropoutError(
            f"the column {target!r} is the target; predict its values as classes with --task classification, not with"
            " --categorical."
        )
    classes = {*how.categorical, *([target] if how.task == "classification" else [])}
    left = {name: f"its type is {kind}" for name, kind in table.unread.items() if name not in how.drop}
    every: dict[str, Written] = {}
    for name in table.columns:
        if name in how.drop:
            continue
        if name != target and table.column(name).isna().all():
            if name in asked:
                raise ShapeError(f"{table.file}, column {name!r}: every value is missing; leave it out (--drop).")
            left[name] = "no values"
            continue
        try:
            written = Written() if name in classes else recognise(table, name, mixed=name != target)
        except MisfitError as wrong:
            raise _refused(table, name, wrong.cell, f"{wrong}. Fix it, or", target) from None
        if written.unknown and name in asked:
            raise _refused(table, name, written.cell, f"{written.unknown}, or", target)
        if written.unknown:
            left[name] = written.unknown
        else:
            every[name] = written
    free = [name for name in every if name not in asked]
    useless = {name: why for name in free if (why := _useless(table, _read_as(name, every[name])))}
    used = {name: each for name, each in every.items() if name not in useless}
    found, unclear = settled(used, every, how.decimal, table.separator == ";")
    if unclear is not None:
        raise _refused(table, unclear, used[unclear].cell, _two_readings(used[unclear]), target)
    columns = {name: _read_as(name, each) for name, each in found.items()}
    counting = [name for name in free if name in columns and _counts_rows(table, columns[name])]
    for name in counting if len(counting) < len(columns) - 1 else counting[1:]:
        del columns[name]
        useless[name] = f"counts the rows; --keep {quoted(name)} uses it"
    return columns, left | useless


def quoted(name: str) -> str:
    """Return a column's name as the command line takes it."""
    return shlex.quote('"' + name.replace('"', '""') + '"' if set(name) & set('",') else name)


def _refused(table: Table, name: str, cell: str, said: str, target: str) -> RangeError:
    """Return the refusal of a cell, with the way out: to read the column as names."""
    place = table.where(int((table.column(name) == cell).argmax()), name)
    classes = f"declare the column as categories (--categorical {quoted(name)})"
    return RangeError(f"{place}: {said} {'predict classes (--task classification)' if name == target else classes}.")


def _two_readings(written: Written) -> str:
    """Say what a cell may mean, and how to tell."""
    point, comma = (f"{each.value(written.cell):g}" for each in (written.notation, written.comma) if each is not None)
    return (
        f"{brief(written.cell)} may mean {point} or {comma}, and so may the whole column. Say which: --decimal point"
        f" for {point}, --decimal comma for {comma} (in Python decimal='point' or decimal='comma'); or"
    )


def _read_as(name: str, written: Written) -> Column:
    texts = written.notation is None or written.notation.kind == "truth"
    return Column(name, () if texts else None, written.notation or NUMBER)


def _useless(table: Table, column: Column) -> str:
    """Return why a column cannot be used; "" if it can."""
    gaps = column.gaps_in(table)
    if column.categories is None:
        known = column.numbers(table)[~gaps]
        if len(known) and known.min() == known.max():
            return "" if gaps.any() else "constant"
        whole = _whole(table, column) if _IDENTIFIER.fullmatch(column.name) else known[:0]
        unique = len(whole) > 0 and len(np.unique(whole)) == len(whole)
        return f"an identifier; --keep {quoted(column.name)} uses it" if unique else ""
    found, different = int((~gaps).sum()), len(column.coded(table)[1])
    if different == 1:
        return "" if gaps.any() else "constant"
    if column.notation.kind != "truth" and 2 * different > found:
        codes = table.different(column.name)[1].str.fullmatch("0[0-9]+").any()
        what = "codes with zeros before them" if codes else "text"
        return f"{what}, all different" if different == found else f"free {what}, {different} different values"
    return ""


def _whole(table: Table, column: Column) -> Floats:
    """Return the numbers in a column if all are whole and plain, else none."""
    plain = column.categories is None and column.notation == NUMBER
    values = column.numbers(table) if plain else np.empty(0)
    values = values[~np.isnan(values)]
    return values if (np.trunc(values) == values).all() else np.empty(0)


def _counts_rows(table: Table, column: Column) -> bool:
    """Return whether a column counts the rows of the file from 0 or 1, and its name says nothing of time."""
    values = np.empty(0) if _TIME.fullmatch(column.name.lower()) else _whole(table, column)
    start = values[0] if len(values) == len(table) else -1
    return start in (0, 1) and bool((values == start + np.arange(len(values))).all())
