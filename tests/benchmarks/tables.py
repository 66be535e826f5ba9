"""Seconds to read and encode a large CSV file, beside pandas with scikit-learn's ColumnTransformer, in one process.

``python -m tests.benchmarks.tables [--rows N] [--quoted]``; on one core with OMP_NUM_THREADS=1.
"""

import argparse
import csv
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
from sklearn.compose import ColumnTransformer
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from pyro_dropout.tables.reading import read_input_pieces, read_table

TARGET = "price"
PIECE = 8388  # rows that `pyro-dropout predict` reads at once, with its 500 draws


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
    table = pd.read_csv(path)
    x = table.drop(columns=TARGET)
    numbers = x.select_dtypes("number").columns
    made = ColumnTransformer(
        [
            ("numbers", make_pipeline(SimpleImputer(), StandardScaler()), numbers),
            ("categories", OneHotEncoder(), x.columns.difference(numbers)),
        ]
    )
    made.fit_transform(x)


def timed(what: str, do: Callable[[], object]) -> None:
    """Print seconds, and those of the processor: on a busy machine they are fewer."""
    start, busy = time.perf_counter(), time.process_time()
    do()
    seconds, busy = time.perf_counter() - start, time.process_time() - busy
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB
    print(f"{what:48} {seconds:6.1f} s, of which {busy:6.1f} s of the processor; peak {peak:.1f} GiB", flush=True)


def main() -> None:
    """Print the seconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--quoted", action="store_true", help="put texts in quotes")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "houses.csv")
        quoting = csv.QUOTE_NONNUMERIC if asked.quoted else csv.QUOTE_MINIMAL
        frame(asked.rows).to_csv(path, index=False, quoting=quoting)
        encoding = read_table(path, target=TARGET).encoding  # warms up, too
        assert encoding is not None
        print(f"{asked.rows:,} rows, {path.stat().st_size / 2**20:.0f} MiB")
        timed("pyro_dropout: read and encode to fit", lambda: read_table(path, target=TARGET))
        timed("pyro_dropout: read and encode to predict", lambda: list(read_input_pieces(path, encoding, None)))
        timed("pyro_dropout: the same in pieces", lambda: [0 for _ in read_input_pieces(path, encoding, PIECE)])
        timed("pandas.read_csv and ColumnTransformer", lambda: theirs(path))


if __name__ == "__main__":
    main()
