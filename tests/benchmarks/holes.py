"""A hole cut into each of ten tables: how many of its rows are flagged, and how many of the others.

    python -m tests.benchmarks.holes

Three kinds of hole: the middle fifth of a column (each of up to three, in turn), a box in two columns, and the middle
of a column within one category. The rows inside are left out of training; of the others a quarter is held back, in
small tables several times over, until 400 rows were.
"""

import argparse
import time
from collections.abc import Iterator

import torch
from torch import Tensor

import pyro_dropout as pd
from pyro_dropout.tables.reading import read_table
from pyro_dropout.tables.table import table_of
from tests.benchmarks.first_hour_tables import TARGET, tables

_ENOUGH = 400  # rows held back, over all repeats
_MANY = 16  # values from which a column can have a hole


def inputs() -> Iterator[tuple[str, Tensor]]:
    """Yield the inputs of each of the ten tables, as a network reads them."""
    for raw in tables():
        data = read_table(table_of(raw.frame), target=TARGET, held_back=0.0)
        yield raw.name, data.train[0]


def middle(column: Tensor, share: float) -> Tensor:
    """Return which values lie in the middle of a column."""
    low, high = torch.quantile(column, torch.tensor([0.5 - share / 2, 0.5 + share / 2]))
    return (column > low) & (column < high)


def holes(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the holes of a table: the kind, and which rows are inside."""
    distinct = [len(column.unique()) for column in x.T]
    numbers = sorted((k for k, count in enumerate(distinct) if count >= _MANY), key=lambda k: -distinct[k])
    flags = [k for k, count in enumerate(distinct) if count == 2]
    for k in numbers[:3]:
        yield f"column {k}", middle(x[:, k], 0.2)
    if len(numbers) > 1:
        a, b = numbers[:2]
        yield f"box {a}, {b}", middle(x[:, a], 0.4) & middle(x[:, b], 0.4)
    if flags and numbers:
        k = max(flags, key=lambda k: -abs(x[:, k].mean().item() - 0.4))
        yield f"column {numbers[0]} within {k}", (x[:, k] == x[:, k].max()) & middle(x[:, numbers[0]], 0.4)


def main() -> None:
    """Print a line for each hole."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="tables; all by default")
    names = parser.parse_args().names
    print(f"{'table':14}{'rows':>6}{'columns':>9}  {'hole':22}{'inside':>7}{'flagged':>9}{'outside':>9}{'seconds':>9}")
    slabs = []
    for name, x in inputs():
        if names and name not in names:
            continue
        for kind, inside in holes(x):
            if int(inside.sum()) < 10:
                continue
            begun, rows, parts = time.perf_counter(), x[~inside], []
            cut = len(rows) // 4
            for repeat in range(-(-_ENOUGH // cut)):
                outside = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(repeat))]
                support = pd.judging.Support.of(outside[cut:])
                parts.append([support.flag(each).double().mean().item() for each in (x[inside], outside[:cut])])
            shares = [sum(part) / len(part) for part in zip(*parts, strict=True)]
            if kind.startswith("column") and "within" not in kind:
                slabs.append(shares)
            took = (time.perf_counter() - begun) / len(parts)
            print(
                f"{name:14}{len(x):6}{x.shape[1]:9}  {kind:22}{int(inside.sum()):7}{shares[0]:9.0%}{shares[1]:9.1%}"
                f"{took:9.1f}",
                flush=True,
            )
    flagged, others = zip(*slabs, strict=True)
    print(
        f"{len(slabs)} holes in a column: of the rows inside at least {min(flagged):.0%} are flagged (at least 90%), of"
        f" the rows outside at most {max(others):.1%} (at most 5%)"
    )


if __name__ == "__main__":
    main()
