"""How the columns of a table become numbers: inputs as they are or one-hot, a target as a number or a class.

An encoding is learned from the training table and then applied to every other table.
"""

import contextlib
import itertools
from collections import Counter
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch
from torch import Tensor

from pyro_dropout.errors import PyroDropoutError, RangeError
from pyro_dropout.protocols import Record
from pyro_dropout.tables.cells import Cells, brief
from pyro_dropout.tables.column import Column
from pyro_dropout.tables.notation import PLAIN, Notation
from pyro_dropout.tables.plain_data import built
from pyro_dropout.tables.table import Table

Remarks = Counter[tuple[str, str]]  # {(what was done, column): cells}


def told(remarks: Remarks) -> list[str]:
    """Return what was done in words, one text for each kind.

    Example:
        >>> told(Counter({("filled in", "age"): 3, ("filled in", "size"): 1}))
        ['filled in: age (3), size (1)']
    """
    kinds = dict.fromkeys(what for what, _ in remarks)
    return [
        f"{what}: " + ", ".join(f"{name} ({count})" for (each, name), count in remarks.items() if each == what)
        for what in kinds
    ]


@dataclass(frozen=True)
class Encoding:
    """How a network reads each column of a table.

    Attributes:
        inputs: the columns to predict from, in the network's order.
        target: the column to predict.
        classes: the target's values in the order of the network's outputs; () for a number.
        fill: the number that replaces a missing value, for each feature.
        ranges: the least and the greatest value of each feature in training.
        target_notation: how the target is written.
        target_centre: subtracted from the target before training, and added to predictions.
        left_out: columns of the training table that are not inputs.
    """

    inputs: tuple[Column, ...]
    target: str
    classes: tuple[str, ...] = ()
    fill: tuple[float, ...] = ()
    ranges: tuple[tuple[float, float], ...] = ()
    target_notation: Notation = PLAIN
    target_centre: float = 0.0
    left_out: tuple[str, ...] = ()

    @property
    def outcome(self) -> Column:
        """The column to predict."""
        return Column(self.target, self.classes or None, self.target_notation, self.target_centre)

    @property
    def features(self) -> list[str]:
        """The names of the network's inputs."""
        return [name for column in self.inputs for name in column.features]

    @property
    def places(self) -> dict[str, list[int]]:
        """The places of each column's features among the network's inputs."""
        ends = itertools.accumulate((len(column.features) for column in self.inputs), initial=0)
        pairs = zip(self.inputs, itertools.pairwise(ends), strict=True)
        return {column.name: list(range(*span)) for column, span in pairs}

    @property
    def network_inputs(self) -> tuple[object, ...]:
        """What must be the same in two encodings for one network to serve both."""
        columns = tuple(replace(column, notation=PLAIN) for column in (*self.inputs, self.outcome))
        return columns, self.fill

    @property
    def remarks(self) -> list[str]:
        """How the columns were interpreted, in words."""
        coded = [f"{column.name} ({len(column.categories)})" for column in self.inputs if column.categories is not None]
        numbers = [column for column in (*self.inputs, self.outcome) if column.categories is None]
        written = [f"{each.name} ({each.notation.described})" for each in numbers if each.notation.described]
        centred = [f"{each.name} (at {each.origin})" for each in numbers if each.centre]
        waves = [f"{each.name} ({', '.join(each.cycles)})" for each in numbers if each.cycles]
        parts = {"one-hot encoded": coded, "read as numbers": written, "with the time of": waves}
        parts |= {"centred for single precision": centred}
        kind = f"one of {len(self.classes)} classes" if self.classes else "a number"
        said = [f"{what}: {', '.join(names)}" for what, names in parts.items() if names]
        return [*said, f"{self.target!r} is read as {kind}"]

    def cleaned(self, table: Table) -> tuple[Table, Remarks]:
        """Return a table in which what cannot be used is missing, and what becomes of it, counted."""
        remarks, gaps = Remarks(), Remarks()
        columns = dict(table.columns)
        for column in self.inputs:
            columns[column.name] = cells = self._usable(column, table.column(column.name), remarks)
            count = int(cells.missing.sum())
            if count:
                gaps["missing values filled in" + ", with an indicator" * column.gaps, column.name] = count
        return replace(table, columns=columns), remarks + gaps

    def _usable(self, column: Column, cells: Cells, remarks: Remarks) -> Cells:
        if column.categories is None and cells.numbers is not None:
            return cells
        distinct = cells.distinct
        gone = np.zeros(len(distinct.cells), np.bool_)
        for place, (cell, count) in enumerate(zip(distinct.cells, distinct.counts.tolist(), strict=True)):
            if column.blank(cell):
                remarks[f"{brief(cell)} read as missing", column.name] += count
                gone[place] = True
            elif column.strange(cell):
                what = "(other)" if column.other else "missing"
                remarks[f"rare or not seen in training, read as {what}", column.name] += count
                gone[place] = not column.other
        return cells.without(distinct.spread(gone))

    def inputs_of(self, table: Table) -> Tensor:
        """Return the inputs of a table, (N, Q); missing values are filled, or NaN if ``fill`` is ()."""
        return self.filled(self.encoded(self.cleaned(table)[0]))

    def encoded(self, table: Table) -> Tensor:
        """Return the inputs of a table that is ``cleaned``, (N, Q), with NaN for missing values."""
        return torch.cat([column.encoded(table) for column in self.inputs], 1)

    def filled(self, x: Tensor) -> Tensor:
        """Return inputs with ``fill`` in place of NaN."""
        return x if not self.fill else torch.where(x.isnan(), torch.tensor(self.fill, dtype=x.dtype), x)

    def seen(self, x: Tensor) -> "Encoding":
        """Return the encoding with the ranges of the training inputs."""
        return replace(self, ranges=tuple(zip(x.amin(0).tolist(), x.amax(0).tolist(), strict=True)))

    def beyond(self, x: Tensor, table: Table | None = None) -> list[list[str]]:
        """Return for each row of inputs the features outside their training range.

        With the table that the inputs are from, also the columns with a category that training did not have.
        """
        found: list[list[str]] = [[] for _ in range(len(x))]
        if self.ranges:
            names, (low, high) = self.features, torch.tensor(self.ranges, dtype=x.dtype).T
            for row, feature in ((x < low) | (x > high)).nonzero().tolist():
                found[row].append(names[feature])
        for column in self.inputs:
            if table and not column.other:
                for row in np.flatnonzero(column.strangers(table.column(column.name))).tolist():
                    found[row].append(column.name)
        return found

    def targets_of(self, table: Table) -> Tensor:
        """Return the targets of a table: class indices (N,), or numbers (N, 1)."""
        missing = table.column(self.target).missing
        if missing.any():
            raise RangeError(f"{table.where(int(missing.argmax()), self.target)}: the value is missing.")
        if not self.classes:
            return self.outcome.numbers(table).unsqueeze(-1)
        return torch.from_numpy(self.outcome.places(table))

    def known_targets(self, table: Table) -> tuple[list[int], Tensor]:
        """Return the rows of a table that have a target, and these targets; none if they cannot be read."""
        rows = np.flatnonzero(~table.column(self.target).missing).tolist() if self.target in table.columns else []
        with contextlib.suppress(PyroDropoutError):
            return rows, self.targets_of(table.only(rows))
        return [], torch.empty(0, 1)

    def as_json(self) -> Record:
        """Return the argument of ``from_json``."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: Record) -> "Encoding":
        """Return the encoding in a record; raise ``KeyError`` or ``TypeError`` if it is invalid."""
        made = built(cls, found)
        columns = (*made.inputs, made.outcome)
        for names in ([column.name for column in columns], *(column.categories or () for column in columns)):
            if len(set(names)) < len(names):
                raise TypeError("a column or a category that occurs twice")
        if not all(column.notation.known for column in columns):
            raise TypeError("the notation of a column")
        parts = [each for each in (made.fill, made.ranges) if each]
        if not made.inputs or any(len(each) != len(made.features) for each in parts):
            raise TypeError("inputs, and what fills and bounds them, do not fit together")
        return made


@dataclass(frozen=True)
class Dataset:
    """Inputs and targets for training and for testing, in their own units.

    Attributes:
        name: a title.
        train: (x, y), inputs (N, Q) and targets (N, D), or class indices (N,).
        test: the same, held back.
        x_name: the inputs in words, with their unit.
        y_name: the targets in words, with their unit.
        note: where it comes from, and what is held back.
        encoding: of the columns of its table, if it comes from one.

    Example:
        >>> import torch
        >>> from pyro_dropout.tables.encoding import Dataset
        >>> Dataset("line", (torch.zeros(2, 1), torch.ones(2, 1)), (torch.ones(1, 1), torch.ones(1, 1))).classes
        ()
    """

    name: str
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    x_name: str = "x"
    y_name: str = "y"
    note: str = ""
    encoding: Encoding | None = None

    @property
    def rows(self) -> tuple[Tensor, Tensor]:
        """All rows: those for training, and then those held back."""
        return torch.cat([self.train[0], self.test[0]]), torch.cat([self.train[1], self.test[1]])

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes; () for regression."""
        return () if self.encoding is None else self.encoding.classes
