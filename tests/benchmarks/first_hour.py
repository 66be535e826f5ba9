"""The first hour with ten tables: ``python -m tests.benchmarks.first_hour``.

Beside us stand gradient boosting with conformal intervals, and a Gaussian process.
Scores are interval scores at 95 %, or log-losses of classes, on a quarter of the rows that nobody trains on, averaged
over repeats with other splits. ``--rivals FILE`` keeps the rivals' results in a file, since they do not change.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from pyro_dropout import fit_table
from tests.benchmarks.first_hour_rivals import LEVEL, boosting, interval_score, log_loss, process
from tests.benchmarks.first_hour_tables import TARGET, Raw, tables

Row = dict[str, float]  # "score", "coverage" and "seconds" of one way on one split
NEAR, LEAST, MOST = 1.05, 0.92, 0.98


def ours(train: pd.DataFrame, test: pd.DataFrame, classes: bool, seed: int) -> tuple[Row, str]:
    """Return what a table gets with no settings at all."""
    start = time.perf_counter()
    fitted = fit_table(train, TARGET, seed=seed, progress=False)
    found = fitted.predict(test.drop(columns=TARGET), level=LEVEL)
    seconds = time.perf_counter() - start
    if classes:
        label = test[TARGET].astype(str).to_numpy()
        names = np.array(fitted.encoding.classes)
        order = names.argsort()
        score = log_loss(found[[f"p={name}" for name in names[order]]].to_numpy(), names[order], label)
        inside = np.mean([name in row.split("; ") for name, row in zip(label, found["set"], strict=True)])
    else:
        low, high, y = found["lower"].to_numpy(), found["upper"].to_numpy(), test[TARGET].to_numpy(float)
        score, inside = interval_score(low, high, y), np.mean((low <= y) & (y <= high))
    return {"score": score, "coverage": float(inside), "seconds": seconds}, fitted.said


def rival(way: str, train: pd.DataFrame, test: pd.DataFrame, kind: str, seed: int) -> Row:
    """Return the score of a rival on one split."""
    start = time.perf_counter()
    one, two = (boosting if way == "boosting" else process)(train, test, kind, seed)
    seconds = time.perf_counter() - start
    target = test[TARGET].to_numpy()
    if kind == "classes":
        return {"score": log_loss(one, two, target), "coverage": float("nan"), "seconds": seconds}
    inside = float(((one <= target) & (target <= two)).mean())
    return {"score": interval_score(one, two, target), "coverage": inside, "seconds": seconds}


def measure(raw: Raw, splits: range, known: dict[str, Row]) -> tuple[dict[str, Row], str]:
    """Return the means over splits of all three ways, and what was chosen on the first."""
    found: dict[str, list[Row]] = {"ours": [], "boosting": [], "process": []}
    said = ""
    for repeat in splits:
        train, test = raw.split(repeat)
        for way in ("boosting", "process"):
            key = f"{raw.name}/{repeat}/{way}"
            known[key] = known.get(key) or rival(way, train, test, raw.kind, repeat)
            found[way].append(known[key])
        row, line = ours(train, test, raw.kind == "classes", repeat)
        found["ours"].append(row)
        said = said or line
    return {
        way: {key: float(np.mean([row[key] for row in rows])) for key in rows[0]} for way, rows in found.items()
    }, said


def main(argv: list[str] | None = None) -> int:
    """Print the table; return whether it is as good as promised."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", help="some of them, separated by commas", default="")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--first", type=int, help="number of the first split; settings were found on 0 to 302", default=400
    )
    parser.add_argument("--rivals", type=Path, help="a file that keeps the results of the rivals")
    asked = parser.parse_args(argv)
    torch.set_num_threads(1)
    chosen = [raw for raw in tables() if not asked.tables or raw.name in asked.tables.split(",")]
    known = json.loads(asked.rivals.read_text()) if asked.rivals and asked.rivals.exists() else {}
    print("| table | rows | score | boosting | process | to the better | coverage | seconds | chosen |")
    print("|---|---|---|---|---|---|---|---|---|")
    near = held = 0
    for raw in chosen:
        means, said = measure(raw, range(asked.first, asked.first + asked.repeats), known)
        if asked.rivals:
            asked.rivals.write_text(json.dumps(known))
        mine, better = means["ours"], min(means[way]["score"] for way in ("boosting", "process"))
        near += mine["score"] <= NEAR * better
        held += LEAST <= mine["coverage"] <= MOST
        numbers = [f"{means[way]['score']:.4g}" for way in ("ours", "boosting", "process")]
        cells = [raw.name, str(len(raw.frame)), *numbers, f"{mine['score'] / better:.3f}", f"{mine['coverage']:.3f}"]
        print("|", " | ".join([*cells, f"{mine['seconds']:.0f}", said.split(":")[0]]), "|", flush=True)
    print(f"{near} of {len(chosen)} within 5 % of the better rival; coverage of 92 to 98 % on {held} of {len(chosen)}.")
    return 0 if near >= 0.8 * len(chosen) and held >= 0.9 * len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
