"""A whole comparison from a cold cache: ``python -m tests.benchmarks.comparison [--rows 500] [--columns 8]``.

``pyro-dropout compare`` runs in a process of its own, with four guides and nothing compiled before. The table says
where its time goes: the training of each guide, and all else (imports, reading, scores, figures). The seconds of the
processor are those of one quiet core; on a busy machine the others are more.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pandas as pd

from tests.benchmarks.low_rank import HELD_BACK, write_table
from tests.benchmarks.machine import cpu_model, moment
from tests.benchmarks.report import Row, table

AT_MOST, AT_MOST_LARGER = 60.0, 180.0  # seconds: 500 rows x 8 columns, and 2,000 x 12
GUIDES = ("dropout", "multiplicative", "mean-field", "low-rank")
COLUMNS = {"part": "part", "seconds": "seconds", "cpu": "of the processor", "us": "µs a step", "limit": "at most"}


def measured(rows: int, columns: int) -> list[Row]:
    """Return the seconds of each guide, of all else, and of all."""
    with tempfile.TemporaryDirectory() as folder:
        file, out = Path(folder) / "table.csv", Path(folder) / "out"
        write_table(file, round(rows * (1 - HELD_BACK)), columns)
        cold = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(Path(folder) / "cache")}
        limit = AT_MOST if rows <= 500 else AT_MOST_LARGER
        command = [sys.executable, "-m", "pyro_dropout", "compare", str(file), "--target", "y", "--device", "cpu"]
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run(
            [*command, "--guides", ",".join(GUIDES), "--out", str(out), "--quiet", "--json"],
            env=cold, check=True, capture_output=True,
        )  # fmt: skip
        whole, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
        scores = pd.read_csv(out / "table.csv")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return parts(scores.set_index("posterior"), whole, cpu, limit)


def parts(scores: pd.DataFrame, whole: float, cpu: float, limit: float) -> list[Row]:
    """Return the rows of the table from the scores of the command, and the seconds of the clock and the processor."""
    missing = [guide for guide in GUIDES if guide not in scores.index or not scores.loc[guide, "seconds"] > 0]
    if missing:
        raise RuntimeError(f"the command did not train {', '.join(missing)}: {scores['note'].dropna().to_dict()}")
    blank = {"cpu": "", "us": "", "limit": ""}
    found: list[Row] = [
        {"part": guide, **blank, "seconds": float(scores.loc[guide, "seconds"]), "us": float(scores.loc[guide, "us"])}
        for guide in GUIDES
    ]
    rest = whole - sum(row["seconds"] for row in found)
    return [
        *found,
        {"part": "all else", **blank, "seconds": rest},
        {"part": "in all", **blank, "seconds": whole, "cpu": cpu, "limit": limit},
    ]


def main(argv: list[str] | None = None) -> int:
    """Print the table; return 1 if the comparison takes longer than it may."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--columns", type=int, default=8)
    given = parser.parse_args(argv)
    print(f"{given.rows} rows x {given.columns} columns, {cpu_model()}, {moment()}", flush=True)
    found = measured(given.rows, given.columns)
    print(table(COLUMNS, found))
    return int(found[-1]["seconds"] > found[-1]["limit"])


if __name__ == "__main__":
    sys.exit(main())
