"""Learn how the chosen columns of a table become numbers.

Categories, cycles and gaps are learned from the training rows only.
"""

import math
from collections import Counter
from dataclasses import replace

import numpy as np

from pyro_dropout.errors import RangeError
from pyro_dropout.tables.cells import Floats, Ints
from pyro_dropout.tables.column import CYCLES, Column, Cycle
from pyro_dropout.tables.column_selection import Chosen, Task, labels_in, number_column, outcome_column
from pyro_dropout.tables.encoding import Encoding
from pyro_dropout.tables.notation import PLAIN, Notation
from pyro_dropout.tables.precision import known_numbers, some_different
from pyro_dropout.tables.recognition import quoted
from pyro_dropout.tables.table import Table

_MOST = 50  # categories of a column; with more, it probably identifies rows
_RARE, _SHARE = 10, 0.01  # what fewer rows have, and a smaller share of them, is rare


def learn(chosen: Chosen, table: Table, train: Ints, task: Task, indicates: bool) -> tuple[Encoding, dict[str, str]]:
    """Return the encoding of chosen columns, and why some of them are left out after all.

    Args:
        chosen: the columns.
        table: the rows that are used.
        train: which of them are for training; rare categories and gaps are counted there.
        task: "regression" or "classification"; "auto" infers it from the target's values.
        indicates: whether gaps get a feature of their own.
    """
    training, least = table.only(train), min(_RARE, math.ceil(_SHARE * len(train)))
    left: dict[str, str] = {}
    inputs: list[Column] = []
    for name in chosen.names:
        notation = chosen.found[name].notation
        if notation is None or notation.kind == "boolean":
            column = _categories(table, training, name, notation or PLAIN, least)
        else:
            column = number_column(table, name, notation)
            if notation.kind == "date":
                column = replace(column, cycles=_cycles(known_numbers(column.measured(training))))
        cells = training.column(name)
        missing = int(cells.missing.sum()) + (0 if column.other else int(column.strangers(cells).sum()))
        column = replace(column, gaps=indicates and missing >= least)
        why = _unlearned(column, training)
        if why and name in chosen.asked:
            raise RangeError(f"{table.file}, column {name!r}: {why}; leave the column out (--drop {quoted(name)}).")
        if why:
            left[name] = why
        else:
            inputs.append(column)
    replace(chosen, left_out=chosen.left_out | left).check_some(inputs)
    outcome = outcome_column(table, chosen.target, task, chosen.found[chosen.target].notation)
    classes, written = outcome.categories or (), outcome.notation
    return Encoding(tuple(inputs), chosen.target, classes, (), (), written, outcome.centre), left


def _categories(table: Table, counted: Table, name: str, notation: Notation, least: int) -> Column:
    """Return a column with a feature for each category that is not rare, and one for the rest if they are many."""
    labels_in(table, name, notation)  # raises if a label has two meanings
    counts: Counter[str] = Counter()
    distinct = counted.column(name).distinct
    for cell, count in zip(distinct.cells, distinct.counts.tolist(), strict=True):
        counts[notation.label(cell)] += count
    common = tuple(sorted(label for label, count in counts.items() if count >= least))
    rest = sum(count for count in counts.values() if count < least)
    return Column(name, common, notation, other=rest >= least)


def _cycles(found: Floats) -> tuple[Cycle, ...]:
    """Return the cycles that dates go through at least twice, and of which they see more than one part."""
    days = np.unique(found).tolist()
    if not days:
        return ()
    whole = {cycle: each for cycle, each in CYCLES.items() if days[-1] - days[0] >= 2 * each}
    return tuple(cycle for cycle, each in whole.items() if len({round(day % each, 4) for day in days}) > 1)


def _unlearned(column: Column, training: Table) -> str:
    """Return why a network can learn nothing from a column; "" if it can."""
    count = len(column.categories or ())
    if count > _MOST:
        return f"{count} different texts are too many for categories (at most {_MOST})"
    different = some_different(column.measured(training)) if column.categories is None else count + column.other
    if column.categories is None and not different:
        return "no values in the training rows"
    if column.categories is not None and not count:
        return "no category is common enough to learn from"
    return "constant in the training rows" if different + column.gaps < 2 else ""
