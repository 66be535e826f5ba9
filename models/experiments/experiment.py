"""One experiment as a script: its options, its tables, figures and verdicts, and a record of the run."""

import argparse
import json
import platform
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import pyro
import torch
from matplotlib.figure import Figure

import pyro_dropout as pdrop
from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.mathematics.checks import check_device

Verdict = Literal["holds", "holds in part", "does not hold"]
VERDICTS: tuple[Verdict, ...] = ("holds", "holds in part", "does not hold")
Row = Mapping[str, Any]


class Experiment:
    """The common part of all experiments: ``--quick``, ``--seed``, ``--device``, ``--out`` and a record of the run.

    Tables, figures and verdicts are printed or saved immediately; ``finish`` writes them all to ``results.json`` and
    ``results.md`` in the folder of ``--out``, by default ``out/NAME``. ``args`` and ``device`` are there after
    ``start``.
    """

    def __init__(self, name: str, about: str) -> None:
        self.name = name
        self._parser = argparse.ArgumentParser(f"pyro-dropout reproduce {name}", description=about.split("\n")[0])
        self._quick: dict[str, Any] = {}
        self.args = argparse.Namespace()
        self.device = torch.device("cpu")
        self._found: dict[str, list[dict[str, Any]]] = {"tables": [], "claims": [], "figures": []}
        self._words: list[str] = []
        self._started = 0.0
        self.option("--quick", action="store_true", help="a small version, to check that it runs")
        self.option("--seed", type=int, default=0, help="seed of all random numbers (0)")
        self.option("--device", help="cpu or cuda; by default a GPU if there is one")
        place = Path("out") / name
        self.option("--out", type=Path, default=place, metavar="FOLDER", help=f"results folder ({place})")
        self.option("--quiet", action="store_true", help="hide the progress bar")

    def option(self, flag: str, *, quick: Any = None, **settings: Any) -> None:
        """Add an option as in argparse; ``quick`` is its default under ``--quick``."""
        action = self._parser.add_argument(flag, **settings)
        if quick is not None:
            self._quick[action.dest] = quick

    def start(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """Parse the options, seed the generators, choose a device and create the folder; return the options."""
        self._words = list(sys.argv[1:] if argv is None else argv)
        if self._parser.parse_args(self._words).quick:
            self._parser.set_defaults(**self._quick)
        self.args = self._parser.parse_args(self._words)
        best = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = check_device("--device", best if self.args.device is None else self.args.device)
        try:
            self.args.out.mkdir(parents=True, exist_ok=True)
        except OSError as cause:
            raise PyroDropoutError(f"--out: {str(self.args.out)!r} cannot be created: {cause.strerror}.") from None
        pyro.set_rng_seed(self.args.seed)
        pyro.clear_param_store()
        self._started = time.perf_counter()
        return self.args

    # --- what is found --------------------------------------------------------------------------------------------

    def table(self, title: str, rows: Sequence[Row], note: str = "") -> None:
        """Print a table and record it; every row has the same columns, with unformatted numbers."""
        self._found["tables"].append({"title": title, "rows": [dict(row) for row in rows], "note": note})
        lines = _cells(rows)
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        shown = ["  ".join(map(str.ljust, line, widths)) for line in lines] or ["(no rows)"]
        print("\n" + "\n".join([title, *shown, *([note] if note else [])]), flush=True)

    def figure(self, name: str, figure: Figure, caption: str) -> None:
        """Save a figure as ``NAME.png``."""
        figure.savefig(self.args.out / f"{name}.png", dpi=120)
        self._found["figures"].append({"file": f"{name}.png", "caption": caption})

    def claim(self, text: str, held: Verdict | Sequence[bool], number: str) -> None:
        """Print and record whether a claim holds (in all cases, in some, or in none), and the number that decides."""
        verdict = held if isinstance(held, str) else VERDICTS[(not all(held)) + (not any(held))]
        self._found["claims"].append({"claim": text, "verdict": verdict, "number": number})
        print(f"\n{verdict.upper()}: {text} ({number})", flush=True)

    def finish(self) -> Path:
        """Write ``results.json`` and ``results.md``, and return the path of the first."""
        versions = {"python": platform.python_version(), "pyro-dropout": pdrop.__version__}
        versions |= {package: version(package) for package in ("torch", "pyro-ppl", "numpy")}
        how = {
            "command": shlex.join(["pyro-dropout", "reproduce", self.name, *self._words]),
            "seed": self.args.seed,
            "device": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else str(self.device),
            "seconds": round(time.perf_counter() - self._started, 1),
            "versions": versions,
        }
        path: Path = self.args.out / "results.json"
        record = {"experiment": self.name, "how": how, **self._found}
        path.write_text(json.dumps(record, indent=1, ensure_ascii=False, default=_plain) + "\n", "utf-8")
        parts = []
        for table in self._found["tables"]:
            parts += [f"**{table['title']}**", _markdown(_cells(table["rows"])), table["note"]]
        if claims := [{**claim, "verdict": f"**{claim['verdict']}**"} for claim in self._found["claims"]]:
            parts.append(_markdown(_cells(claims)))
        parts += [f"![{each['caption']}]({each['file']})" for each in self._found["figures"]]
        said = ", ".join(f"{name} {number}" for name, number in versions.items())
        parts.append(f"`{how['command']}`, seed {how['seed']}: {how['seconds']} s on {how['device']}; {said}.")
        (self.args.out / "results.md").write_text("\n\n".join(filter(None, parts)) + "\n", "utf-8")
        print(f"\n{how['seconds']} s in total. Results: {path.parent}", flush=True)
        return path


def _plain(value: Any) -> Any:
    """Return a tensor or numpy number as a plain number."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _cells(rows: Sequence[Row]) -> list[list[str]]:
    """Return the titles of a table and its cells as text; nothing if there are no rows."""

    def said(value: Any) -> str:
        value = value.item() if hasattr(value, "item") else value
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    return [list(rows[0]), *([said(value) for value in row.values()] for row in rows)] if rows else []


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    titles, *cells = (f"| {' | '.join(line)} |" for line in lines)
    return "\n".join([titles, "|" + "---|" * len(lines[0]), *cells])
