"""How the columns of a table become numbers: inputs as they are or one-hot, a target as a number or a class.

An encoding is learned from the training table and then applied to every other table. It is plain data, which a record
can hold.
"""

import contextlib
import functools
import itertools
import math
from collections import Counter
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Literal

import numpy as np
import pandas
import torch
from torch import Tensor

from pyro_dropout.errors import PyroDropoutError, RangeError
from pyro_dropout.tables.notation import NUMBER, Notation, without_blanks
from pyro_dropout.tables.table import Bools, Floats, Ints, Table, brief, number_text

Cycle = Literal["day", "week", "year"]
CYCLES: dict[Cycle, float] = {"day": 1.0, "week": 7.0, "year": 365.2425}  # in days
Remarks = Counter[tuple[str, str]]  # {(what was done, column): cells}

_LARGEST = torch.finfo(torch.float32).max


def told(remarks: Remarks) -> list[str]:
    """Return what was done in words, one text for each kind."""
    kinds = dict.fromkeys(what for what, _ in remarks)
    return [
        f"{what}: " + ", ".join(f"{name} ({count})" for (each, name), count in remarks.items() if each == what)
        for what in kinds
    ]


@dataclass(frozen=True)
class Column:
    """One column of a table, as a network reads it.

    Attributes:
        name: the column's.
        categories: its values; None for numbers.
        notation: how its values are written.
        centre: subtracted from numbers before they are rounded to single precision.
        rare: the further categories of the training rows, which have no feature of their own.
        other: whether all further categories share one feature.
        gaps: whether the last feature says that the value is missing.
        cycles: of dates, "day", "week" or "year": two features each, a sine and a cosine.
        fill: what replaces a missing value: means of numbers and their cycles, the share of each category.
    """

    name: str
    categories: tuple[str, ...] | None = None
    notation: Notation = NUMBER
    centre: float = 0.0
    rare: tuple[str, ...] = ()
    other: bool = False
    gaps: bool = False
    cycles: tuple[Cycle, ...] = ()
    fill: tuple[float, ...] = ()

    @property
    def features(self) -> list[str]:
        """The names of the features that the column becomes."""
        if self.categories is None:
            waves = [f"{self.name} ({wave} of the {cycle})" for cycle in self.cycles for wave in ("sine", "cosine")]
            names = [self.name, *waves]
        else:
            names = [f"{self.name}={label}" for label in self.categories] + [f"{self.name}=(other)"] * self.other
        return names + [f"{self.name} is missing"] * self.gaps

    @property
    def axis(self) -> str:
        """The name of the column's numbers after centring, with their unit."""
        if self.notation.kind == "date":
            return f"{self.name} (days since {self.origin})"
        unit = f" ({self.notation.unit})" if self.notation.unit else ""
        return f"{self.name} - {self.origin}{unit}" if self.centre else f"{self.name}{unit}"

    @property
    def origin(self) -> str:
        """What a centred number is counted from, in words."""
        return self.told(self.centre)

    def told(self, number: float) -> str:
        """Return a number of the column, or the date that it stands for, in words."""
        if self.notation.kind != "date":
            return number_text(number)
        day = datetime(1970, 1, 1) + timedelta(seconds=round(86400 * number, 3))  # a day is a rounded number
        return day.isoformat(" ").removesuffix(" 00:00:00") + (" UTC" if self.notation.zoned else "")

    def coded(self, table: Table) -> tuple[Ints, list[str]]:
        """Return for each row the place of its label among the different ones, -1 for gaps, and these."""

        def compute() -> tuple[Ints, list[str]]:
            rows, cells = table.different(self.name)
            # Words for missing values may be names.
            usable = without_blanks(cells) if self.notation.kind == "truth" else cells
            labels = pandas.Series(self.notation.labels(cells), dtype="str").where(usable.notna().to_numpy(bool))
            places, different = labels.factorize()
            return np.append(places, -1)[rows], list(different)

        found: tuple[Ints, list[str]] = table.once((self.name, "labels", self.notation.kind), compute)
        return found

    def places(self, table: Table) -> Ints:
        """Return the place of each cell among the categories and then the rare ones; -1 for gaps, -2 for numbers."""

        def compute() -> Ints:
            if self.categories is None:
                return np.where(np.isnan(self.numbers(table)), -1, -2)
            known = {label: place for place, label in enumerate((*self.categories, *self.rare))}
            codes, labels = self.coded(table)
            return np.array([*(known.get(label, len(known)) for label in labels), -1], np.int64)[codes]

        found: Ints = table.once(self, compute)
        return found

    def gaps_in(self, table: Table) -> Bools:
        """Return which cells are missing, or words that mean it."""
        return np.equal(self.places(table), -1)

    def strangers(self, table: Table) -> Bools:
        """Return which cells are categories that have no feature of their own."""
        return np.greater_equal(self.places(table), len(self.categories or ()))

    def unseen(self, table: Table) -> Bools:
        """Return which cells are categories that no training row had."""
        return np.greater_equal(self.places(table), len(self.categories or ()) + len(self.rare))

    def numbers(self, table: Table) -> Floats:
        """Return the column's numbers before centring; NaN for missing values."""
        found: Floats = table.once((self.name, self.notation), lambda: self._parsed(table))
        return found

    def _parsed(self, table: Table) -> Floats:
        cells = table.column(self.name)
        numbers = self.notation.values(cells)
        wrong, large = np.isnan(numbers) & cells.notna().to_numpy(bool), np.abs(numbers) > _LARGEST
        if wrong.any():
            wrong &= without_blanks(cells).notna().to_numpy(bool)
        for bad in (wrong, large):
            if bad.any():
                row = int(bad.argmax())
                what = "is too large; change the unit" if np.isfinite(numbers[row]) else "is not finite"
                if wrong.any():
                    kind = "date" if self.notation.kind == "date" else "number"
                    what = f"is not a {kind} such as {self.notation.example}; write it like that"
                raise RangeError(f"{table.where(row, self.name)}: {brief(cells[row])} {what}.")
        return numbers

    def waves(self, days: Floats) -> Floats:
        """Return centred numbers and the place of dates in their cycles, (1 + 2 cycles, N)."""
        turns = [math.tau * (days % CYCLES[cycle]) / CYCLES[cycle] for cycle in self.cycles]
        return np.stack([days - self.centre, *(wave(turn) for turn in turns for wave in (np.sin, np.cos))])

    def encoded(self, table: Table) -> Floats:
        """Return the features of each row, (N, features), gaps filled in; categories are one-hot."""
        missing = self.gaps_in(table) | (self.strangers(table) & (not self.other))
        if self.categories is None:
            features = self.waves(self.numbers(table)).T
        else:
            places = np.minimum(self.places(table), len(self.categories))
            features = np.eye(1 + len(self.fill))[np.where(missing, -1, places)][:, :-1]
        if self.categories is None or not self.gaps:  # gaps among categories are one of their own
            features[missing] = self.fill
        return np.column_stack([features, missing]) if self.gaps else features


@dataclass(frozen=True)
class Encoding:
    """How a network reads each column of a table.

    Attributes:
        inputs: the columns to predict from.
        target: the column to predict.
        classes: the target's values in the order of the network's outputs; () for a number.
        ranges: the least and the greatest value of each feature in training.
        target_notation: how the target is written.
        target_centre: subtracted from the target before training, and added to predictions.
        left_out: columns of the training table that are not inputs.
    """

    inputs: tuple[Column, ...]
    target: str
    classes: tuple[str, ...] = ()
    ranges: tuple[tuple[float, float], ...] = ()
    target_notation: Notation = NUMBER
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

    @functools.cached_property
    def places(self) -> dict[str, list[int]]:
        """The places of each column's features among the network's inputs."""
        ends = itertools.accumulate((len(column.features) for column in self.inputs), initial=0)
        pairs = zip(self.inputs, itertools.pairwise(ends), strict=True)
        return {column.name: list(range(*span)) for column, span in pairs}

    def inputs_of(self, table: Table) -> tuple[Tensor, Remarks]:
        """Return the inputs of a table, (N, Q), missing values filled in, and what was done with its cells."""
        remarks, gaps = Remarks(), Remarks()
        for column in self.inputs:
            given, missing, strange = table.column(column.name), column.gaps_in(table), column.strangers(table)
            for text, count in given[missing].dropna().value_counts(sort=False).items() if missing.any() else ():
                remarks[f"{brief(text)} read as missing", column.name] += count
            unseen, what = column.unseen(table), "(other)" if column.other else "missing"
            for kind, cells in (("rare in training", strange & ~unseen), ("not seen in training", unseen)):
                if cells.any():
                    remarks[f"{kind}, read as {what}", column.name] += int(cells.sum())
            if count := int(missing.sum()) + (0 if column.other else int(strange.sum())):
                gaps["missing values filled in" + ", with an indicator" * column.gaps, column.name] = count
        x = np.column_stack([column.encoded(table).astype(np.float32) for column in self.inputs])
        return torch.from_numpy(x), remarks + gaps

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

    def seen(self, x: Tensor) -> "Encoding":
        """Return the encoding with the ranges of the training inputs."""
        return replace(self, ranges=tuple(zip(x.numpy().min(0).tolist(), x.numpy().max(0).tolist(), strict=True)))

    def beyond(self, x: Tensor, table: Table | None = None) -> list[list[str]]:
        """Return for each row of inputs the features outside their training range.

        With the table that the inputs are from, also the columns with a category or a gap that training did not have.
        """
        found: list[list[str]] = [[] for _ in range(len(x))]
        if self.ranges:
            names, (low, high) = self.features, torch.tensor(self.ranges, dtype=x.dtype).T
            for row, feature in ((x < low) | (x > high)).nonzero().tolist():
                found[row].append(names[feature])
        for mine, new in zip(found, self.unseen(table) if table else (), strict=False):
            mine += new
        return found

    def unseen(self, table: Table) -> list[list[str]]:
        """Return for each row of a table the columns with a category that training did not have, or with such a gap."""
        found: list[list[str]] = [[] for _ in range(len(table))]
        for column in self.inputs:
            for row in np.flatnonzero(column.unseen(table) | (column.gaps_in(table) & (not column.gaps))).tolist():
                found[row].append(column.name)
        return found

    def targets_of(self, table: Table) -> Tensor:
        """Return the targets of a table: class indices (N,), or numbers (N, 1)."""
        cells, outcome = table.column(self.target), self.outcome
        missing = cells.isna().to_numpy(bool) if self.classes else np.isnan(outcome.numbers(table))
        if missing.any():
            row = int(missing.argmax())
            raise RangeError(f"{table.where(row, self.target)}: {brief(cells[row])} is no value to predict.")
        if not self.classes:
            return torch.from_numpy((outcome.numbers(table) - self.target_centre).astype(np.float32)).unsqueeze(-1)
        strange = outcome.strangers(table)
        if strange.any():
            row = int(strange.argmax())
            raise RangeError(f"{table.where(row, self.target)}: {brief(cells[row])} is none of the known classes.")
        return torch.from_numpy(outcome.places(table).astype(np.int64))

    def known_targets(self, table: Table) -> tuple[list[int], Tensor]:
        """Return the rows of a table that have a target, and these targets; none if they cannot be read."""
        rows = np.flatnonzero(table.columns[self.target].notna()).tolist() if self.target in table.columns else []
        with contextlib.suppress(PyroDropoutError):
            return rows, self.targets_of(table.only(rows))
        return [], torch.empty(0, 1)


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
