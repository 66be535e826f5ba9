"""Data to compare on: what the package ships, and tables of one's own."""

import csv
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import torch
from torch import Tensor

from pyro_dropout.mathematics.errors import PyroDropoutError, RangeError, ShapeError

_GAP = (1968.0, 1971.0)  # years that are held back in the middle
_END = 1981.25  # the paper's last month; a few years after it are held back too
_AFTER = 1984.0


@dataclass(frozen=True)
class Dataset:
    """Inputs and targets for training and for testing, in their own units.

    Attributes:
        name: what it is called.
        train: (x, y), inputs (N, Q) and targets (N, D).
        test: the same, held back.
        x_name: the inputs in words, with their unit.
        y_name: the targets in words, with their unit.
        note: where it comes from, and what is held back.
    """

    name: str
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    x_name: str = "x"
    y_name: str = "y"
    note: str = ""


def co2() -> Dataset:
    """Return the monthly means of CO₂ at Mauna Loa, less their linear trend, as in the paper's first experiment.

    Trained on March 1958 to March 1981, without the years 1968 to 1970; those, and the years up to 1984, are the test:
    one part lies between training data and one outside it.

    Example:
        >>> import pyro_dropout as pd
        >>> data = pd.co2()
        >>> [tuple(part.shape) for part in (*data.train, *data.test)]
        [(236, 1), (236, 1), (69, 1), (69, 1)]
    """
    text = resources.files("pyro_dropout.faces").joinpath("data/co2.csv").read_text("utf-8")
    rows = [line.split(",") for line in text.splitlines() if line[:1].isdigit()]
    table = torch.tensor([[float(value) for value in row] for row in rows], dtype=torch.float64)
    year, ppm = table.T
    between = (year > _GAP[0]) & (year < _GAP[1])
    train = (year < _END) & ~between
    test = between | ((year >= _END) & (year < _AFTER))
    design = torch.stack([torch.ones_like(year), year - year.mean()], -1)
    trend = design @ torch.linalg.lstsq(design[train], ppm[train].unsqueeze(-1)).solution
    x, y = year.unsqueeze(-1).float(), (ppm.unsqueeze(-1) - trend).float()
    return Dataset(
        "CO₂ at Mauna Loa",
        (x[train], y[train]),
        (x[test], y[test]),
        "year",
        "CO₂ less its trend (ppm)",
        "Monthly means of Keeling and Whorf (2004), 1958 to 1981, less the linear trend of the training data. Held"
        " back: 1968 to 1970, between training data, and 1981 to 1983, after it.",
    )


def read_table(path: str | Path, *, target: str | None = None, held_back: float = 0.2, seed: int = 0) -> Dataset:
    """Return the numbers of a CSV file with a header as a regression data set.

    Args:
        path: the file.
        target: the name of the column to predict; the last one by default.
        held_back: the share of rows, chosen at random, that is kept for testing.
        seed: of that choice.
    """
    path = Path(path)
    if not path.is_file():
        raise PyroDropoutError(f"there is no file {str(path)!r}.")
    if not 0 < held_back < 1:
        raise RangeError(f"held_back must lie strictly between 0 and 1; got {held_back!r}.")
    with path.open(newline="", encoding="utf-8") as file:
        lines = [row for row in csv.reader(line for line in file if not line.startswith("#")) if row]
    header, rows = (lines[0], lines[1:]) if lines else ([], [])
    if len(header) < 2:
        raise ShapeError(
            f"{path.name} must have a header and at least two columns, separated by commas; it begins with"
            f" {','.join(header)!r}."
        )
    target = header[-1] if target is None else target
    if target not in header:
        raise PyroDropoutError(f"{path.name} has no column {target!r}; its columns are {', '.join(header)}.")
    values = _numbers(path, header, rows)
    if len(values) < 10:
        raise ShapeError(f"{path.name} has {len(values)} rows; at least 10 are needed to hold some back.")
    order = torch.randperm(len(values), generator=torch.Generator().manual_seed(seed))
    test, train = order.split([cut := max(1, round(held_back * len(values))), len(values) - cut])
    column = header.index(target)
    y = values[:, [column]]
    x = values[:, [i for i in range(len(header)) if i != column]]
    names = ", ".join(name for name in header if name != target)
    note = f"{path.name}: {len(train)} rows to train on and {len(test)}, chosen at random, to test with."
    return Dataset(path.stem, (x[train], y[train]), (x[test], y[test]), names, target, note)


def _numbers(path: Path, header: list[str], rows: list[list[str]]) -> Tensor:
    for number, row in enumerate(rows, 2):
        if len(row) != len(header):
            raise ShapeError(f"{path.name}, row {number}: {len(row)} values for {len(header)} columns.")
        for name, value in zip(header, row, strict=True):
            try:
                float(value)
            except ValueError:
                raise RangeError(f"{path.name}, row {number}, column {name!r}: {value!r} is not a number.") from None
    table = torch.tensor([[float(value) for value in row] for row in rows])
    if not bool(torch.isfinite(table).all()):
        first = int((~torch.isfinite(table)).any(1).nonzero()[0]) + 2
        raise RangeError(f"{path.name}, row {first}: a value is missing or infinite.")
    return table
