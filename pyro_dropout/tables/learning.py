"""Learn how the chosen columns of a table become numbers.

Categories, cycles and gaps are learned from the training rows only.
"""

import math
from dataclasses import replace

import numpy as np
import pandas

from pyro_dropout.errors import RangeError
from pyro_dropout.tables.column_selection import Chosen, number_column, outcome_column, quoted
from pyro_dropout.tables.encoding import CYCLES, Column, Cycle, Encoding
from pyro_dropout.tables.notation import NUMBER
from pyro_dropout.tables.settings import Task
from pyro_dropout.tables.table import Floats, Ints, Table

_MOST = 50  # categories of a column; with more, it probably identifies rows
_RARE, _SHARE = 10, 0.01  # what fewer rows have, and a smaller share of them, is rare


def learn(chosen: Chosen, table: Table, train: Ints, task: Task) -> tuple[Encoding, dict[str, str]]:
    """Return the encoding of chosen columns, and why some of them are left out after all."""
    least = min(_RARE, math.ceil(_SHARE * len(train)))
    left: dict[str, str] = {}
    inputs: list[Column] = []
    for name in chosen.names:
        notation = chosen.found[name]
        if notation is None or notation.kind == "truth":
            column, why = _categories(table, train, Column(name, (), notation or NUMBER), least)
        else:
            column, why = _numbers(table, train, number_column(table, name, notation), least)
        if why and name in chosen.asked:
            raise RangeError(f"{table.file}, column {name!r}: {why}; leave the column out (--drop {quoted(name)}).")
        if why:
            left[name] = why
        else:
            inputs.append(column)
    replace(chosen, left_out=chosen.left_out | left).check_some(inputs)
    outcome = outcome_column(table, chosen.target, task, chosen.found[chosen.target])
    classes, written = outcome.categories or (), outcome.notation
    return Encoding(tuple(inputs), chosen.target, classes, (), written, outcome.centre), left


def _categories(table: Table, train: Ints, column: Column, least: int) -> tuple[Column, str]:
    """Return a column with a feature for each category that is not rare, and one for the rest if they are many."""
    rows, cells = table.different(column.name)
    known = np.append(column.usable(cells).notna(), False)
    numbers = np.bincount(rows[train][known[rows[train]]], minlength=len(cells))
    counts = pandas.Series(numbers).groupby(np.array(column.notation.labels(cells), object)).sum()
    counts = counts[counts > 0]
    common = sorted(counts.index[counts >= least])
    others = int(counts[counts < least].sum())
    column = replace(column, categories=tuple(common), other=others >= least)
    gaps = len(train) - int(counts.sum()) + (0 if column.other else others)
    column = replace(column, gaps=gaps >= least)
    if len(common) > _MOST:
        return column, f"{len(common)} different texts are too many for categories (at most {_MOST})"
    if not common:
        return column, "no category is common enough to learn from"
    codes = replace(column, gaps=False).codes(table)[train]
    sizes = np.bincount(codes[codes >= 0], minlength=len(common) + column.other)
    column = replace(column, fill=tuple((sizes / max(1, sizes.sum())).tolist()))
    return column, "" if len(column.features) > 1 else "constant in the training rows"


def _numbers(table: Table, train: Ints, column: Column, least: int) -> tuple[Column, str]:
    """Return a column of numbers or dates with the means that fill its gaps; gaps that are not rare are marked."""
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
