"""One experiment as a script: its options, its tables, figures and verdicts, and a record of the run."""

import argparse
import json
import math
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import pyro
import torch
from matplotlib.figure import Figure

from pyro_dropout.errors import PyroDropoutError, RangeError
from pyro_dropout.mathematics.checks import check_device

Verdict = Literal["holds", "holds in part", "does not hold"]
VERDICTS: tuple[Verdict, ...] = ("holds", "holds in part", "does not hold")
_PACKAGES = ("pyro-dropout", "torch", "pyro-ppl", "numpy")


class Experiment:
    """The common part of all experiments: ``--quick``, ``--seed``, ``--device``, ``--out`` and a record of the run.

    Tables, figures and verdicts are printed or saved immediately; ``finish`` writes them all to ``results.json`` and
    ``results.md`` in the folder of ``--out``.

    Args:
        name: the experiment's name; results go to ``out/NAME`` by default.
        about: the script's docstring; its first line describes the command.

    Attributes:
        args: the options, after ``start``.
        device: where to compute, after ``start``.

    Example:
        >>> import tempfile
        >>> from experiments.experiment import Experiment
        >>> experiment = Experiment("coin", "How often does a coin show heads?")
        >>> experiment.option("--throws", type=int, default=1000, quick=10, help="of the coin")
        >>> args = experiment.start(["--quick", "--quiet", "--out", tempfile.mkdtemp()])
        >>> args.throws
        10
        >>> experiment.claim("the coin is fair", "holds in part", "4 heads in 10 throws")
        <BLANKLINE>
        HOLDS IN PART: the coin is fair (4 heads in 10 throws)
    """

    def __init__(self, name: str, about: str) -> None:
        self.name = name
        self._parser = argparse.ArgumentParser(
            prog=f"pyro-dropout reproduce {name}", description=about.strip().split("\n")[0]
        )
        self._quick: dict[str, Any] = {}
        self.args = argparse.Namespace()
        self.device = torch.device("cpu")
        self._tables: list[dict[str, Any]] = []
        self._figures: list[dict[str, str]] = []
        self._claims: list[dict[str, str]] = []
        self._command: list[str] = []
        self._started = 0.0
        self.option("--quick", action="store_true", help="a small version, to check that it runs")
        self.option("--seed", type=int, default=0, help="seed of all random numbers (0)")
        self.option("--device", help="cpu or cuda; by default a GPU if there is one")
        self.option(
            "--out", type=Path, default=Path("out") / name, metavar="FOLDER", help=f"results folder (out/{name})"
        )
        self.option("--quiet", action="store_true", help="hide the progress bar")

    def option(self, flag: str, *, quick: Any = None, **settings: Any) -> None:
        """Add an option as in argparse; ``quick`` is its default under ``--quick``."""
        action = self._parser.add_argument(flag, **settings)
        if quick is not None:
            self._quick[action.dest] = quick

    def start(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """Parse the options, seed the generators, choose a device and create the folder; return the options."""
        given = list(sys.argv[1:] if argv is None else argv)
        if self._parser.parse_args(given).quick:
            self._parser.set_defaults(**self._quick)
        self.args = self._parser.parse_args(given)
        self._command = ["pyro-dropout", "reproduce", self.name, *given]
        best = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = check_device("--device", best if self.args.device is None else self.args.device)
        try:
            self.args.out.mkdir(parents=True, exist_ok=True)
        except OSError as cause:
            raise PyroDropoutError(
                f"--out: the folder {str(self.args.out)!r} cannot be created: {cause.strerror}."
            ) from None
        pyro.set_rng_seed(self.args.seed)
        pyro.clear_param_store()
        self._started = time.perf_counter()
        return self.args

    def options_but(self, *names: str) -> list[str]:
        """Return the given options without those named, as a list of words, for another process of the same script."""
        found: list[str] = []
        leave = False
        for word in self._command[3:]:
            if word.startswith("--"):
                leave = word[2:].split("=")[0].replace("-", "_") in names
            if not leave:
                found.append(word)
        return found

    def processes(self, script: str | Path, flag: str, values: Sequence[str], jobs: int) -> list[Path]:
        """Run the script once for each value of an option, ``jobs`` at a time; return the folders of their results.

        Args:
            script: the file to run.
            flag: the option that gets one value in each process; every other option is passed on.
            values: its values.
            jobs: number of parallel processes.
        """
        options = self.options_but(flag.lstrip("-").replace("-", "_"), "jobs", "out")
        waiting, running = list(values), dict[str, subprocess.Popen[bytes]]()
        while waiting or running:
            while waiting and len(running) < jobs:
                value = waiting.pop(0)
                words = [sys.executable, script, *options, flag, value, "--out", self.args.out / value]
                running[value] = subprocess.Popen([str(word) for word in words])
            for value in [value for value, process in running.items() if process.poll() is not None]:
                if running.pop(value).returncode:
                    print(f"{flag} {value} failed; see its output above.", file=sys.stderr, flush=True)
            time.sleep(0.2)
        return [self.args.out / value for value in values]

    # --- what is found --------------------------------------------------------------------------------------------

    def table(self, title: str, rows: Sequence[Mapping[str, Any]], note: str = "") -> None:
        """Print a table and record it; every row has the same columns, with unformatted numbers."""
        self._tables.append({"title": title, "rows": [dict(row) for row in rows], "note": note})
        print(f"\n{title}\n{_aligned(rows)}" + (f"\n{note}" if note else ""), flush=True)

    def figure(self, name: str, figure: Figure, caption: str) -> None:
        """Save a figure as ``NAME.png``."""
        figure.savefig(self.args.out / f"{name}.png", dpi=120)
        self._figures.append({"file": f"{name}.png", "caption": caption})

    def claim(self, text: str, verdict: Verdict, number: str) -> None:
        """Print and record whether a claim holds, and the number that decides it."""
        if verdict not in VERDICTS:
            raise RangeError(f"verdict must be one of {', '.join(VERDICTS)}; got {verdict!r}.")
        self._claims.append({"claim": text, "verdict": verdict, "number": number})
        print(f"\n{verdict.upper()}: {text} ({number})", flush=True)

    # --- the record -----------------------------------------------------------------------------------------------

    def finish(self) -> Path:
        """Write ``results.json`` and ``results.md``, and return the path of the first."""
        record: dict[str, Any] = {
            "experiment": self.name,
            "how": self._how(),
            "tables": self._tables,
            "claims": self._claims,
            "figures": self._figures,
        }
        path: Path = self.args.out / "results.json"
        path.write_text(json.dumps(record, indent=1, ensure_ascii=False, default=_plain) + "\n", "utf-8")
        (self.args.out / "results.md").write_text(_markdown(record), "utf-8")
        print(f"\n{record['how']['seconds']} s in total. Results: {path.parent}", flush=True)
        return path

    def _how(self) -> dict[str, Any]:
        versions = {"python": platform.python_version()}
        for package in _PACKAGES:
            try:
                versions[package] = version(package)
            except PackageNotFoundError:
                versions[package] = "from source"
        return {
            "command": shlex.join(self._command),
            "seed": self.args.seed,
            "device": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else str(self.device),
            "seconds": round(time.perf_counter() - self._started, 1),
            "versions": versions,
        }


def read_rows(page: Path) -> list[dict[str, Any]]:
    r"""Return the rows of the first table that an experiment wrote to ``page``, with its numbers as floats.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from experiments.experiment import read_rows
        >>> page = Path(tempfile.mkdtemp(), "results.md")
        >>> _ = page.write_text("**Coins**\n\n| coin | heads |\n|---|---|\n| penny | 0.5 |\n")
        >>> read_rows(page)
        [{'coin': 'penny', 'heads': 0.5}]
    """
    lines = page.read_text("utf-8").splitlines()
    table = next((list(group) for inside, group in groupby(lines, lambda line: line.startswith("|")) if inside), [])
    if not table:
        raise PyroDropoutError(f"{str(page)!r} has no table; give the results.md of an earlier run.")
    names, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in table)
    return [dict(zip(names, map(_number, row), strict=True)) for row in rows]


def _number(cell: str) -> float | str:
    try:
        return float(cell)
    except ValueError:
        return cell


def _plain(value: Any) -> Any:
    """Return a tensor or numpy number as a plain number for JSON."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _said(value: Any) -> str:
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, float):
        return f"{value:.4g}" if math.isfinite(value) else str(value)
    return str(value)


def _aligned(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return "(no rows)"
    lines = [list(rows[0]), *([_said(value) for value in row.values()] for row in rows)]
    widths = [max(len(line[k]) for line in lines) for k in range(len(lines[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def _markdown(record: Mapping[str, Any]) -> str:
    parts = []
    for table in record["tables"]:
        rows = table["rows"]
        lines = [f"**{table['title']}**", ""]
        if rows:
            lines += ["| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
            lines += ["| " + " | ".join(_said(value) for value in row.values()) + " |" for row in rows]
        parts.append("\n".join(lines) + (f"\n\n{table['note']}" if table["note"] else ""))
    if record["claims"]:
        lines = ["| claim | verdict | number |", "|---|---|---|"]
        lines += [f"| {each['claim']} | **{each['verdict']}** | {each['number']} |" for each in record["claims"]]
        parts.append("\n".join(lines))
    parts += [f"![{each['caption']}]({each['file']})" for each in record["figures"]]
    how = record["how"]
    versions = ", ".join(f"{name} {number}" for name, number in how["versions"].items())
    parts.append(f"`{how['command']}`, seed {how['seed']}: {how['seconds']} s on {how['device']}; {versions}.")
    return "\n\n".join(parts) + "\n"
