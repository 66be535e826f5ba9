"""The map of defaults: every guide with all defaults, beside plain torch and the best constant prediction.

    python -m tests.benchmarks.defaults --device cuda --minutes 30
    python -m tests.benchmarks.defaults --guides dropout --tables wine --widths 50 200 --steps 2000
    python -m tests.benchmarks.defaults --tables new --depths 1 --widths 50 200 --steps 2000
    python -m tests.benchmarks.defaults --guides estimator-auto fit_table --depths 1 --widths 50 --steps 2000
    python -m tests.benchmarks.defaults --page           # write docs/results/defaults.md anew

Networks of 1 to 3 hidden layers of 50 to 1,024 units are trained on six tables for 2,000 and 20,000 steps, with three
seeds as one fleet (ensembles and ``AutoLaplace`` with one). Cells are visited in a random order, so that a run
that ends early (``--minutes``) is a sample of the map; what was measured is kept in out/defaults.json, and a later run
goes on from there. ``--workers 8`` shares the cells out among eight processes, each with a file of its own beside it.

A cell is *level* with plain torch if the mean difference of the test log-likelihood is no less than minus one standard
error (over test rows and over seeds, paired). It is *at chance* if it is within 0.02 nats of the best constant while
plain torch is better than that by more than 0.1.
"""

import argparse
import itertools
import json
import random
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import pyro_dropout as pd
from pyro_dropout.guides.dropout import KEEP
from pyro_dropout.guides.summary import ignored_inputs
from pyro_dropout.registry import guides
from pyro_dropout.training.collapse import note_learned
from tests.benchmarks import defaults_page
from tests.benchmarks.defaults_doors import DOORS, log_prob_of
from tests.benchmarks.defaults_tables import (
    BATCH,
    CHOSEN_ON,
    DEPTHS,
    NEW,
    REPORTED,
    SEEDS,
    WIDTHS,
    PlainTorch,
    Rows,
    network,
    rows_of,
)  # fmt: skip

KEPT = Path(__file__).parents[2] / "out/defaults.json"
STEPS = (2_000, 20_000)
SAMPLES = 100
SMALL = 50  # units
WHOLE_MATRIX = 4_000  # weights up to which a guide with a matrix of all of them is trained
PRIORS = {"default": None, "paper": pd.Prior()}
ON_NEW = ("dropout", "mean-field", "low-rank", "ensemble", *DOORS)  # what is trained on the new tables


def built(rows: Rows, depth: int, width: int, guide: str, prior: str, seed: int) -> tuple[Any, Any]:
    """Return a model and a guide with all defaults."""
    torch.manual_seed(seed)
    device = rows.train[0].device
    net = network(rows.train[0].shape[1], depth, width, rows.outputs).to(device)
    likelihood = pd.Categorical() if rows.classes else None
    model = pd.BayesianNet(net, PRIORS[prior], likelihood)
    entry = guides()[guide]
    return model, entry.make(model, lambda name: KEEP).to(device)


def trained(rows: Rows, depth: int, width: int, guide: str, prior: str, steps: list[int]) -> Any:
    """Yield (steps, model and guide of each seed) after each number of steps."""
    x, y = rows.train
    # On a GPU small networks take their steps in CUDA C; for others torch's compiler would take longer than it saves.
    how: Any = {"batch_size": BATCH, "compile": "auto" if not x.is_cuda else True if width <= SMALL else "traced"}
    build = lambda seed: built(rows, depth, width, guide, prior, seed)  # noqa: E731 - a fleet names the argument
    if not guides()[guide].per_site:
        for count in steps:
            pair = build(0)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", pd.errors.IgnoredInputsWarning)
                pd.fit(*pair, x, y, steps=count, progress=False, seed=0, **how)
            yield count, [pair]
        return
    fleet = pd.Fleet(build, {"seed": list(SEEDS)})
    torch.manual_seed(0)
    run, done = fleet.prepare(x, y, steps=max(steps), **how), 0
    for count in steps:
        while done < count:
            done += len(run.advance(count - done))
        run.publish()
        yield count, list(fleet)


def measured(cell: list[Any], device: str, steps: list[int]) -> list[dict[str, Any]]:
    """Return what a cell gives after each number of steps: test log-likelihoods, and whether it warned."""
    name, depth, width, guide, prior = cell
    rows = rows_of(name).to(device)
    found = []
    if guide == "torch":
        plain, done = PlainTorch(rows, depth, width), 0
        for count in steps:
            plain.advance(count - done)
            done = count
            noisy = _rounded(plain.log_prob(noise=True))
            found.append(_kept(cell, rows, count, plain.log_prob(), [], 0.0) | {"with_noise": noisy})
        return found
    if guide in DOORS:  # they choose their own number of steps
        start = time.perf_counter()
        each = log_prob_of(guide, rows, depth, width)
        return [_kept(cell, rows, count, each, [], time.perf_counter() - start) for count in steps[:1]]
    start, call = time.perf_counter(), pd.generative.model_call.ModelCall(None, rows.train)
    for count, pairs in trained(rows, depth, width, guide, prior, steps):
        spent = time.perf_counter() - start
        learned = [note_learned(model, own, call)[0] for model, own in pairs]  # from which to choose the check's limits
        told = [ignored_inputs(own) for _, own in pairs]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", pd.errors.IgnoredInputsWarning)
            how: Any = {"samples": SAMPLES, "method": guides()[guide].method, "seed": 0}
            answers = [pd.predict(model, own, rows.test[0], **how) for model, own in pairs]
        each = torch.stack([answer.log_prob(rows.test[1]).double().cpu() for answer in answers])
        row = _kept(cell, rows, count, each, [bool(sentence) for sentence in told], spent)
        found.append(row | {"learned": [None if one is None else asdict(one) for one in learned]})
        start = time.perf_counter()
    return found


def _kept(cell: list[Any], rows: Rows, steps: int, each: Tensor, told: list[bool], spent: float) -> dict[str, Any]:
    known = {"cell": cell, "steps": steps, "constant": rows.constant(), "told": told, "seconds": spent}
    return known | {"each": _rounded(each)}


def _rounded(each: Tensor) -> list[list[float]]:
    return [[round(float(value), 4) for value in row] for row in each.clamp(min=-1e4)]


def cells(names: list[str], depths: list[int], widths: list[int], chosen: list[str], priors: list[str]) -> list[Any]:
    """Return all cells in a random order, plain torch first."""
    nets = list(itertools.product(names, depths, widths))
    found = [[*net, guide, prior] for net in nets for guide in chosen for prior in priors]
    known = {name: rows_of(name) for name in names}
    for name, depth, width in nets:
        x = known[name].train[0]
        if sum(p.numel() for p in network(x.shape[1], depth, width, known[name].outputs).parameters()) > WHOLE_MATRIX:
            found = [c for c in found if c[:4] != [name, depth, width, "full-rank"]]
    random.Random(0).shuffle(found)
    return [[*net, "torch", "default"] for net in nets] + found


def main() -> None:
    """Measure what is not measured yet, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tables = "names, and new for those on which nothing was chosen"
    parser.add_argument("--tables", nargs="*", default=[*CHOSEN_ON, *REPORTED], help=tables)
    parser.add_argument("--depths", nargs="*", type=int, default=list(DEPTHS))
    parser.add_argument("--widths", nargs="*", type=int, default=list(WIDTHS))
    parser.add_argument("--guides", nargs="*", help="names, or fit_table, estimator-auto, estimator; all guides")
    parser.add_argument("--priors", nargs="*", default=["default"], help="default, paper")
    parser.add_argument("--steps", nargs="*", type=int, default=list(STEPS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no cell after so long")
    parser.add_argument("--kept", type=Path, default=KEPT, help="where what was measured is kept")
    parser.add_argument("--workers", type=int, default=1, help="processes that share the cells")
    parser.add_argument("--worker", type=int, help="measure the cells of this one only")
    parser.add_argument("--page", action="store_true", help="write the page from what was measured, and stop")
    given = parser.parse_args()
    given.guides = given.guides or list(ON_NEW if given.tables == ["new"] else guides())
    given.tables = [name for each in given.tables for name in (NEW if each == "new" else (each,))]
    own = given.kept if given.worker is None else given.kept.with_suffix(f".{given.worker}.json")
    known = [row for file in sorted(given.kept.parent.glob(f"{given.kept.stem}*.json")) for row in _read(file)]
    if given.workers > 1 and given.worker is None:
        given.kept.parent.mkdir(exist_ok=True)
        mine = [sys.executable, "-m", "tests.benchmarks.defaults", *sys.argv[1:], "--worker"]
        running = [subprocess.Popen([*mine, str(k)]) for k in range(given.workers)]
        sys.exit(max(each.wait() for each in running))
    if not given.page:
        given.kept.parent.mkdir(exist_ok=True)
        done = {json.dumps([row["cell"], row["steps"]]) for row in known if "each" in row}
        todo = cells(given.tables, given.depths, given.widths, given.guides, given.priors)
        todo = [cell for cell in todo if any(json.dumps([cell, steps]) not in done for steps in given.steps)]
        mine = _read(own)
        for rows in _measured_in_turn(todo[given.worker or 0 :: given.workers], given):
            known += rows
            mine += rows
            own.write_text("[\n" + ",\n".join(json.dumps(row) for row in mine) + "\n]\n", "utf-8")
    if given.worker is not None:
        return
    for row in known:
        if "failed" in row:
            print(f"failed: {' '.join(map(str, row['cell']))}: {row['failed']}")
    judged = defaults_page.read() if given.page and not known else defaults_page.judged(known)
    print(defaults_page.text(judged))
    if given.kept == KEPT:
        defaults_page.write(judged)


def _read(file: Path) -> list[dict[str, Any]]:
    return json.loads(file.read_text("utf-8")) if file.exists() else []


def _measured_in_turn(todo: list[Any], given: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    """Yield what each cell gives; begin none when the time is up."""
    start = time.perf_counter()
    for cell in todo:
        if time.perf_counter() - start > 60 * given.minutes:
            return
        try:
            rows = measured(cell, given.device, sorted(given.steps))
            told = "  ".join(f"{row['steps']}: {_mean(row):.3f}" for row in rows)
        except Exception as cause:  # a cell that fails is a row that says so
            told = f"{type(cause).__name__}: {cause}"
            rows = [{"cell": cell, "failed": told}]
        print(f"{time.perf_counter() - start:6.0f} s  {' '.join(map(str, cell))}  {told}", flush=True)
        yield rows


def _mean(row: dict[str, Any]) -> float:
    return sum(map(sum, row["each"])) / sum(map(len, row["each"]))


if __name__ == "__main__":
    main()
