"""Learn from a table which of its columns can be used, and how they become numbers in single precision.

The columns are chosen from all rows: what cannot be used is left out by name, or refused. Nothing is decided about the
target: it is recognised, or refused. Categories, cycles and gaps are learned from the training rows only.

A clock that counts seconds since 1970 needs ten digits, and float32 has seven: such a column is centred first, in
float64, and only then rounded.
"""

import math
import re
import shlex
from dataclasses import replace

import numpy as np
import pandas
import torch

from pyro_dropout.errors import PyroDropoutError, RangeError, ShapeError
from pyro_dropout.tables.encoding import CYCLES, Column, Cycle, Encoding
from pyro_dropout.tables.notation import NUMBER, MisfitError, Written, recognise, settled
from pyro_dropout.tables.settings import Reading, Task
from pyro_dropout.tables.table import Floats, Ints, Table, brief

_MOST = 50  # categories of a column; with more, it probably identifies rows
_RARE, _SHARE = 10, 0.01  # what fewer rows have, and a smaller share of them, is rare
_ROUNDING = torch.finfo(torch.float32).eps / 2
_FINE = 1e-4  # of a standard deviation: errors of rounding that are not worth centring for
_FEW = 0.01  # of the values may become equal to another by rounding
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
        doubt = used[unclear]
        point, comma = (f"{each.value(doubt.cell):g}" for each in (doubt.notation, doubt.comma) if each is not None)
        said = (
            f"{brief(doubt.cell)} may mean {point} or {comma}, and so may the whole column. Say which: --decimal point"
            f" for {point}, --decimal comma for {comma} (in Python decimal='point' or decimal='comma'); or"
        )
        raise _refused(table, unclear, doubt.cell, said, target)
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


# --- what they become -------------------------------------------------------------------------------------------------


def learn(
    table: Table, columns: dict[str, Column], target: str, train: Ints, left: dict[str, str], how: Reading
) -> tuple[Encoding, dict[str, str]]:
    """Return the encoding of chosen columns, and why others are left out; ``left`` are those that already are."""
    outcome = _outcome(table, columns[target], how.task)
    least = min(_RARE, math.ceil(_SHARE * len(train)))
    inputs: list[Column] = []
    for name in (name for name in columns if name != target):
        kind = _numbers if columns[name].categories is None else _categories
        column, why = kind(table, train, columns[name], least)
        if why and name in (*how.categorical, *how.keep):
            raise RangeError(f"{table.file}, column {name!r}: {why}; leave the column out (--drop {quoted(name)}).")
        if why:
            left = left | {name: why}
        else:
            inputs.append(column)
    if not inputs:
        why = "".join(f"; {name!r} is left out ({why})" for name, why in left.items())
        raise ShapeError(f"{table.file}: no column is left to predict {target!r} from{why}.")
    out = (*how.drop, *left)
    classes = outcome.categories or ()
    return Encoding(tuple(inputs), target, classes, (), outcome.notation, outcome.centre, out), left


def _categories(table: Table, train: Ints, column: Column, least: int) -> tuple[Column, str]:
    """Return a column with a feature for each category that is not rare, and one for the rest if they are many."""
    codes, labels = column.coded(table)
    numbers = np.bincount(codes[train][codes[train] >= 0], minlength=len(labels))
    counts = pandas.Series(numbers, pandas.Index(labels, dtype=object)).sort_index()
    common, rare = counts[counts >= least], counts[(counts > 0) & (counts < least)]
    others = int(rare.sum())
    other = others >= least
    gaps = len(train) - int(counts.sum()) + (0 if other else others)
    sizes = np.append(common, others) if other else common.to_numpy()
    shares = tuple((sizes / max(1, sizes.sum())).tolist())
    column = replace(column, categories=tuple(common.index), rare=tuple(rare.index), other=other)
    column = replace(column, gaps=gaps >= least, fill=shares)
    if len(common) > _MOST:
        return column, f"{len(common)} different texts are too many for categories (at most {_MOST})"
    if not len(common):
        return column, "no category is common enough to learn from"
    return column, "" if len(column.features) > 1 else "constant in the training rows"


def _numbers(table: Table, train: Ints, column: Column, least: int) -> tuple[Column, str]:
    """Return a column of numbers or dates with the means that fill its gaps; gaps that are not rare are marked."""
    column = _centred(table, column)
    values = column.numbers(table)[train]
    known = values[~np.isnan(values)]
    if not len(known):
        return column, "no values in the training rows"
    gaps = len(values) - len(known) >= least
    column = replace(column, gaps=gaps, cycles=_cycles(known) if column.notation.kind == "date" else ())
    column = replace(column, fill=tuple(np.nanmean(column.waves(values), 1).tolist()))
    return column, "" if gaps or known.min() < known.max() else "constant in the training rows"


def _cycles(found: Floats) -> tuple[Cycle, ...]:
    """Return the cycles that dates go through at least twice, and of which they see more than one part."""
    days = np.unique(found)
    whole = {cycle: each for cycle, each in CYCLES.items() if days[-1] - days[0] >= 2 * each}
    return tuple(cycle for cycle, each in whole.items() if len(np.unique((days % each).round(4))) > 1)


def _outcome(table: Table, column: Column, task: Task) -> Column:
    """Return the column to predict, as a number or as classes; raise if there is nothing to predict."""
    name, notation, known = column.name, column.notation, table.column(column.name).dropna()
    place = f"{table.file}, column {name!r}"
    if notation.kind == "date":
        raise RangeError(
            f"{place}: a date cannot be the target; predict a number, such as the days until it, or classes"
            " (--task classification)."
        )
    number = column.categories is None
    numbers = table.numbers(name) if number and notation == NUMBER else None
    binary = numbers is not None and bool(np.isin(numbers[~np.isnan(numbers)], (0, 1)).all())
    if task == "regression" or (number and not binary):
        column = _centred(table, Column(name, None, notation if number else NUMBER))
        different = len(np.unique(column.numbers(table)[known.index]))
    else:
        column = Column(name, tuple(sorted(column.coded(table)[1], key=_in_order)), notation)
        different = len(column.categories or ())
    if different < 2:
        only = f"only one value, {brief(known.iloc[0])}" if len(known) else "no value"
        raise RangeError(f"{place}: the target has {only}; there is nothing to predict.")
    most = max(2, min(_MOST, len(known) // 2))
    if column.categories and different > most:
        raise RangeError(
            f"{place}: {different} different values in {len(known)} rows are too many for classes (at most {most})."
        )
    return column


def _in_order(label: str) -> tuple[float, str]:
    """Return what classes are sorted by: numbers by their size, and then texts."""
    value = NUMBER.value(label)
    return (math.inf if value is None or math.isnan(value) else value), label


# --- single precision -------------------------------------------------------------------------------------------------


def _centred(table: Table, column: Column) -> Column:
    """Return a column of numbers or dates, centred if single precision needs it."""
    values = column.numbers(table)
    return replace(column, centre=centre_of(values[~np.isnan(values)], f"{table.file}, column {column.name!r}"))


def centre_of(values: Floats, where: str = "the column") -> float:
    """Return the number to subtract from a column before rounding: its median if that is needed, else 0.

    Raise if rounding makes most of the different values of the column equal to another even then.
    """
    if not len(values):
        return 0.0
    different, middle = np.unique(values), float(np.sort(values)[len(values) // 2])
    lost, left = _merged(different), _merged(different - middle)
    spread = float(values.std()) or 1.0  # a constant is not scaled
    whole = bool((np.trunc(different) == different).all())  # identifiers and clocks: all of them stay apart
    coarse = _ROUNDING * float(np.abs(different[[0, -1]]).max()) > _FINE * spread
    centred = coarse or left < lost > (0 if whole else _FEW * len(different))
    if 2 * (left if centred else lost) > len(different):
        raise RangeError(
            f"{where}: single precision cannot tell most of its values from their neighbours, or from zero; change the"
            " unit, take logarithms, or drop the column."
        )
    return middle if centred else 0.0


def _merged(different: Floats) -> int:
    """Return how many of different, ordered numbers single precision takes for another one, or for zero."""
    short = different.astype(np.float32)
    return int((short[1:] == short[:-1]).sum()) + int(((short == 0) & (different != 0)).sum())
