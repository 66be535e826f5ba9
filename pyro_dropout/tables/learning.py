"""Learn how the chosen columns of a table become numbers, in single precision.

Categories, cycles and gaps are learned from the training rows only. A clock that counts seconds since 1970 needs ten
digits, and float32 has seven: such a column is centred first, in float64, and only then rounded.
"""

import math
from dataclasses import replace

import numpy as np
import pandas
import torch

from pyro_dropout.errors import RangeError, ShapeError
from pyro_dropout.tables.column_selection import quoted
from pyro_dropout.tables.encoding import CYCLES, Column, Cycle, Encoding
from pyro_dropout.tables.notation import NUMBER
from pyro_dropout.tables.settings import Reading, Task
from pyro_dropout.tables.table import Floats, Ints, Table, brief

_MOST = 50  # categories of a column; with more, it probably identifies rows
_RARE, _SHARE = 10, 0.01  # what fewer rows have, and a smaller share of them, is rare
_ROUNDING = torch.finfo(torch.float32).eps / 2
_FINE = 1e-4  # of a standard deviation: errors of rounding that are not worth centring for
_FEW = 0.01  # of the values may become equal to another by rounding


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
