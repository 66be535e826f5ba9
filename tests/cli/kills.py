"""``fit`` and ``compare`` killed again and again: ``python -m tests.cli.kills fit 50``.

Children are forked from a process that has imported everything, run the command and are killed (SIGKILL) at a random
moment. After each kill the folder must be whole, or say that it is not; at the end the results must be those of a
command that nobody killed.
"""

import argparse
import csv
import json
import os
import random
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from tests.cli.command import houses, run, succeeded, trees, without_fsync, written
from tests.training.kills import survived

_FIT = ["--guide", "dropout", "--width", 5, "--steps", 20, "--checkpoint-every", 5, "--no-compile", "--quiet"]
_COMPARE = ["--guides", "dropout", "--seeds", 1, "--samples", 20, "--steps", 9, "--width", 5, "--no-compile", "-q"]


def fits(root: Path, kills: int, dice: random.Random) -> int:
    """Kill ``fit`` and ``resume`` this often; return how many runs came to their end."""
    data, ends = written(root, trees()), 0
    for name in ("first", "whole"):  # what the first imports is then imported for all children
        start = time.monotonic()
        assert run("fit", data, "--out", root / name, *_FIT).exit_code == 0
    leash, wanted = time.monotonic() - start, predicted(root / "whole", data)
    while kills > 0:
        out, whole = root / f"run-{ends}", False
        while not whole:
            started = (out / "run.json").exists()
            words = ["resume", out, "--checkpoint-every", 5, "-q"] if started else ["fit", data, "--out", out, *_FIT]
            whole = survived(partial(done, *words), dice.uniform(0, leash) if kills > 0 else None)
            kills -= not whole
            if (out / "posterior.safetensors").exists():
                assert predicted(out, data) == wanted
        left = [path for path in (*out.iterdir(), *(out / "checkpoints").iterdir()) if path.name.startswith(".")]
        assert not left, left
        ends += 1
    return ends


def predicted(folder: Path, data: Path) -> bytes:
    """Return the predictions of a run."""
    out = folder.parent / "predictions.csv"
    succeeded("predict", folder, data, "--out", out, "--samples", 5, "-q")
    return out.read_bytes()


def comparisons(root: Path, kills: int, dice: random.Random) -> int:
    """Kill ``compare`` this often, half of the time while it replaces an older comparison; return the complete ones."""
    data, ends, out = written(root, houses()), 0, root / "out"
    words = ["compare", data, "--out", out, *_COMPARE]
    for _ in range(2):  # what the first imports is then imported for all children
        start = time.monotonic()
        assert run(*words).exit_code == 0
    wanted, leash = scores(out), time.monotonic() - start
    while kills > 0:
        whole = survived(partial(done, *words), dice.uniform(0, 1.4) * leash)
        kills -= not whole
        ends += whole
        if (out / "comparison.json").exists():
            record = json.loads((out / "comparison.json").read_text("utf-8"))
            assert record.get("unfinished") or scores(out) == wanted
    assert survived(partial(done, *words), None)
    assert scores(out) == wanted
    assert sorted(os.listdir(out)) == ["comparison.json", "figures", "posteriors", "report.html", "table.csv"]
    assert sorted(os.listdir(root)) == ["out", "table.csv"]
    return ends


def scores(folder: Path) -> list[dict[str, str]]:
    """Return the table of a comparison whose files are all there, without times."""
    record = json.loads((folder / "comparison.json").read_text("utf-8"))
    assert all((folder / name).is_file() for name in record["files"])
    with (folder / "table.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [{key: value for key, value in row.items() if not key.startswith(("us", "seconds"))} for row in rows]


def done(*words: object) -> None:
    """Run a command in a child; the parent is told that it failed."""
    found = run(*words)
    if found.exit_code:
        os.write(2, found.stderr.encode())
        os._exit(found.exit_code)


KILLED: dict[str, Callable[[Path, int, random.Random], int]] = {"fit": fits, "compare": comparisons}


def main() -> None:
    """Kill a command as often as asked, and print how often it ended nevertheless."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=KILLED)
    parser.add_argument("kills", type=int)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as root, without_fsync():
        ends = KILLED[args.command](Path(root), args.kills, random.Random(args.seed))
    print(f"{args.command}: {args.kills} kills, {ends} complete results, all equal to those without kills")


if __name__ == "__main__":
    main()
