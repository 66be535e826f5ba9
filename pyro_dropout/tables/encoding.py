"""How the columns of a table become numbers: inputs as they are or one-hot, a target as a number or a class.

An encoding is learned from the training table and then applied to every other table.
"""

from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from pyro_dropout.mathematics.errors import RangeError
from pyro_dropout.protocols import Record
from pyro_dropout.tables.cells import Number
from pyro_dropout.tables.column import Column, finite, labels_of, name_of
from pyro_dropout.tables.notation import PLAIN, Notation
from pyro_dropout.tables.table import Table


@dataclass(frozen=True)
class Encoding:
    """How a network reads each column of a table.

    Attributes:
        inputs: the columns to predict from, in the network's order.
        target: the column to predict.
        classes: the target's values in the order of the network's outputs; () for a number.
        fill: the number that replaces a missing value, for each feature; None if missing values are an error.
        ranges: the least and the greatest value of each feature in training; None if unknown.
        target_notation: how the target is written.
        target_centre: subtracted from the target before training, and added to predictions.
    """

    inputs: tuple[Column, ...]
    target: str
    classes: tuple[str, ...] = ()
    fill: tuple[float, ...] | None = None
    ranges: tuple[tuple[float, float], ...] | None = None
    target_notation: Notation = PLAIN
    target_centre: Number = 0

    @property
    def outcome(self) -> Column:
        """The column to predict."""
        return Column(self.target, self.classes or None, self.target_notation, self.target_centre)

    @property
    def features(self) -> list[str]:
        """The names of the network's inputs."""
        return [name for column in self.inputs for name in column.features]

    @property
    def network_inputs(self) -> tuple[object, ...]:
        """What must be the same in two encodings for one network to serve both."""
        columns = tuple((column.name, column.categories, column.centre) for column in (*self.inputs, self.outcome))
        return columns, self.fill

    @property
    def remarks(self) -> list[str]:
        """How the columns were interpreted, in words."""
        coded = [f"{column.name} ({len(column.categories)})" for column in self.inputs if column.categories is not None]
        numbers = [column for column in (*self.inputs, self.outcome) if column.categories is None]
        written = [f"{each.name} ({each.notation.described})" for each in numbers if each.notation.described]
        centred = [f"{each.name} (at {each.origin})" for each in numbers if each.centre]
        parts = {"one-hot encoded": coded, "read as numbers": written, "centred for single precision": centred}
        kind = f"one of {len(self.classes)} classes" if self.classes else "a number"
        said = [f"{what}: {', '.join(names)}" for what, names in parts.items() if names]
        return [*said, f"{self.target!r} is read as {kind}"]

    def inputs_of(self, table: Table) -> Tensor:
        """Return the inputs of a table, (N, Q); missing values are filled, or NaN without ``fill``."""
        x = torch.cat([column.encoded(table) for column in self.inputs], 1)
        return x if self.fill is None else torch.where(x.isnan(), torch.tensor(self.fill, dtype=x.dtype), x)

    def seen(self, x: Tensor) -> "Encoding":
        """Return the encoding with the ranges of the training inputs."""
        return replace(self, ranges=tuple(zip(x.amin(0).tolist(), x.amax(0).tolist(), strict=True)))

    def beyond(self, x: Tensor) -> list[list[str]]:
        """Return for each row of inputs the features outside their training range."""
        found: list[list[str]] = [[] for _ in range(len(x))]
        if self.ranges is not None:
            names, (low, high) = self.features, torch.tensor(self.ranges, dtype=x.dtype).T
            for row, feature in ((x < low) | (x > high)).nonzero().tolist():
                found[row].append(names[feature])
        return found

    def targets_of(self, table: Table) -> Tensor:
        """Return the targets of a table: class indices (N,), or numbers (N, 1)."""
        for row, cell in enumerate(table.column(self.target)):
            if cell is None:
                raise RangeError(f"{table.where(row, self.target)}: the value is missing.")
        if not self.classes:
            return self.outcome.numbers(table).unsqueeze(-1)
        return torch.tensor(self.outcome.places(table))

    def as_json(self) -> Record:
        """Return the argument of ``from_json``."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: Record) -> "Encoding":
        """Return the encoding in a record; raise ``KeyError`` or ``TypeError`` if it is invalid."""
        inputs = tuple(map(Column.from_json, found["inputs"]))
        target = name_of(found["target"])
        notation = Notation.from_json(found["target_notation"]) if "target_notation" in found else PLAIN
        classes = labels_of(found["classes"], notation)
        gaps = found["fill"]
        fill = None if gaps is None else tuple(float(finite(each, "what fills gaps")) for each in gaps)
        ranges = None if found.get("ranges") is None else tuple(map(_range, found["ranges"]))  # older runs have none
        centre = finite(found.get("target_centre", 0), "the centre of the target")
        made = cls(inputs, target, classes, fill, ranges, notation, centre)
        if len({column.name for column in inputs} | {target}) <= len(inputs):
            raise TypeError("a column that occurs twice")
        if not inputs or any(each is not None and len(each) != len(made.features) for each in (fill, ranges)):
            raise TypeError("inputs, and what fills and bounds them, do not fit together")
        return made


def _range(value: object) -> tuple[float, float]:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise TypeError(f"the range of an input, {value!r},")
    low, high = (finite(end, "the range of an input") for end in value)
    return float(low), float(high)
