"""Reading a large CSV file, and finding holes in the rows of small ones."""

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from sklearn.compose import make_column_transformer
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from torch import Tensor

from pyro_dropout.judging import Support
from pyro_dropout.tables.reading import read_inputs
from pyro_dropout.tables.table import table_of
from tests.benchmarks.figures import Asked, Figure, benchmark
from tests.benchmarks.first_hour_tables import TARGET
from tests.benchmarks.first_hour_tables import tables as ten_tables
from tests.cli.command import read_table

ENOUGH = 400  # rows held back, over all repeats
MANY = 16  # values from which a column can have a hole


def frame(rows: int) -> pd.DataFrame:
    """Return ten columns of numbers, of which one has gaps, three of categories, and the target."""
    rng = np.random.default_rng(0)
    columns = {f"full {k}": rng.normal(size=rows) * 10**k for k in range(3)}
    columns |= {f"short {k}": rng.normal(50, 20, rows).round(2) for k in range(3)}
    columns |= {"rooms": rng.integers(1, 9, rows), "year": rng.integers(1900, 2024, rows)}
    columns |= {"distance": rng.gamma(2, 4, rows).round(3)}
    columns |= {"gaps": np.where(rng.random(rows) < 0.05, np.nan, rng.normal(size=rows).round(4))}
    columns |= {"town": rng.choice(["north", "south", "east", "west", "old town"], rows)}
    columns |= {"state": rng.choice(["poor", "fair", "good", "new"], rows), "garden": rng.choice(["yes", "no"], rows)}
    return pd.DataFrame(columns | {TARGET: columns["full 0"] + columns["rooms"] + rng.normal(size=rows)})


def theirs(path: Path) -> None:
    """Impute, scale and encode one-hot, as people do."""
    x = pd.read_csv(path).drop(columns=TARGET)
    numbers = x.select_dtypes("number").columns
    scaled = make_pipeline(SimpleImputer(), StandardScaler())
    make_column_transformer((scaled, numbers), (OneHotEncoder(), x.columns.difference(numbers))).fit_transform(x)


@benchmark("tables", "cpu")
def reading(asked: Asked) -> Iterator[Figure]:
    """A table of a million rows, beside pandas with scikit-learn; seconds are those of the processor."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "houses.csv")
        frame(asked.pick(1_000_000, 20_000)).to_csv(path, index=False)
        encoding = read_table(path, target=TARGET).encoding  # warms up, too
        assert encoding is not None

        def busy(do: Callable[[], object]) -> float:
            start = time.process_time()
            do()
            return time.process_time() - start

        base = busy(lambda: theirs(path))
        yield Figure("pandas.read_csv and a column transformer", base, "s")
        taken = {
            "to fit": busy(lambda: read_table(path, target=TARGET)),
            "to predict": busy(lambda: read_inputs(path, encoding)),
        }
        for what, seconds in taken.items():
            yield Figure(f"read and encode {what}, {seconds:.1f} s, over pandas", seconds / base, most=1.5)


def middle(column: Tensor, share: float) -> Tensor:
    """Return which values lie in the middle of a column."""
    low, high = torch.quantile(column, torch.tensor([0.5 - share / 2, 0.5 + share / 2]))
    return (column > low) & (column < high)


def holes_in(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the holes of a table, and which rows are inside.

    They are the middle fifth of a column (each of up to three), a box in two columns, and the middle of a column within
    one category.
    """
    distinct = [len(column.unique()) for column in x.T]
    numbers = sorted((k for k, count in enumerate(distinct) if count >= MANY), key=lambda k: -distinct[k])
    flags = [k for k, count in enumerate(distinct) if count == 2]
    for k in numbers[:3]:
        yield f"column {k}", middle(x[:, k], 0.2)
    if len(numbers) > 1:
        a, b = numbers[:2]
        yield f"box {a}, {b}", middle(x[:, a], 0.4) & middle(x[:, b], 0.4)
    if flags and numbers:
        k = max(flags, key=lambda k: -abs(x[:, k].mean().item() - 0.4))
        yield f"{numbers[0]} within {k}", (x[:, k] == x[:, k].max()) & middle(x[:, numbers[0]], 0.4)


@benchmark("holes")
def holes(asked: Asked) -> Iterator[Figure]:
    """Rows in a hole cut into ten tables: how many are flagged, and how many of the others.

    The rows inside are left out of training; of the others a quarter is held back, in small tables several times over.
    """
    for raw in ten_tables()[: asked.pick(10, 1)]:
        x = read_table(table_of(raw.frame), target=TARGET, held_back=0.0).train[0]
        for kind, inside in holes_in(x):
            rows, parts = x[~inside], []
            if int(inside.sum()) < 10:
                continue
            cut = len(rows) // 4
            for repeat in range(-(-ENOUGH // cut)):
                outside = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(repeat))]
                support = Support.of(outside[cut:])
                parts.append([support.flag(each).double().mean().item() for each in (x[inside], outside[:cut])])
            found, others = (sum(part) / len(part) for part in zip(*parts, strict=True))
            promised = kind.startswith("column")
            case = f"{raw.name}, {len(x)} rows, {kind}, {int(inside.sum())} rows inside"
            yield Figure(f"{case}: flagged", found, least=0.9 if promised else None)
            yield Figure(f"{case}: flagged outside", others, most=0.05 if promised else None)
