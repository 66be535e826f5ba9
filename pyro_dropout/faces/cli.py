"""The command ``pyro-dropout``: comparisons without writing Python."""

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from pyro_dropout.faces.comparison import compare
from pyro_dropout.faces.datasets import Dataset, co2, read_table
from pyro_dropout.faces.standard_models import DEFAULT, GUIDES, regression_model, wave_model
from pyro_dropout.mathematics.errors import PyroDropoutError


def parser() -> argparse.ArgumentParser:
    """Return the commands and what they take."""
    top = argparse.ArgumentParser(prog="pyro-dropout", description="Posterior approximations of neural networks.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    one = commands.add_parser(
        "compare",
        help="fit several guides to one data set, and write one page that compares them",
        description="Fit several guides to one data set, print the scores, and write one page with table and figures.",
    )
    one.add_argument("data", nargs="?", default="co2", metavar="DATA", help="'co2', or a CSV file with a header")
    one.add_argument("--target", metavar="COLUMN", help="of the file, to predict; the last one by default")
    one.add_argument("--guides", nargs="+", choices=GUIDES, default=list(DEFAULT), metavar="GUIDE", help=_guides())
    one.add_argument("--seeds", type=_count, default=3, help="trainings of each guide (3)")
    one.add_argument("--steps", type=_count, default=1500, help="of each training (1500)")
    one.add_argument("--lr", type=_positive, default=0.01, help="learning rate (0.01)")
    one.add_argument("--samples", type=_count, default=300, help="weight draws for each answer (300)")
    one.add_argument("--batch-size", type=_count, help="points in a mini-batch; all by default")
    one.add_argument("--reference", choices=["nuts"], help="sample the true posterior too; slow, for small networks")
    one.add_argument("--no-compile", action="store_true", help="run steps eagerly")
    one.add_argument("--out", type=Path, default=Path("comparison.html"), metavar="PAGE", help="(comparison.html)")
    one.add_argument("--quiet", action="store_true", help="show no progress")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; mistakes in what was asked are one line, without a traceback."""
    args = parser().parse_args(argv)
    try:
        return _compare(args)
    except (PyroDropoutError, OSError) as mistake:
        print(f"pyro-dropout: {mistake}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("pyro-dropout: interrupted; nothing was written.", file=sys.stderr)
        return 130


def _compare(args: argparse.Namespace) -> int:
    if not args.out.parent.is_dir():  # found out now, not when everything is trained
        raise PyroDropoutError(f"the folder of --out does not exist: {str(args.out.parent)!r}.")
    if args.out.is_dir():
        raise PyroDropoutError(f"--out must be a file; {str(args.out)!r} is a folder.")
    data = co2() if args.data == "co2" else read_table(args.data, target=args.target)
    model = wave_model(data.train) if args.data == "co2" else regression_model(data.train)
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        found = compare(
            model,
            {name: GUIDES[name] for name in args.guides},
            data.train,
            data.test,
            reference=args.reference,
            seeds=args.seeds,
            steps=args.steps,
            lr=args.lr,
            batch_size=args.batch_size,
            samples=args.samples,
            compile=False if args.no_compile else "auto",
            progress=not args.quiet,
            labels=_labels(data),
        )
    found.to_html(args.out)
    print(found)
    print(f"\n{found.seconds:.0f} s in all. The page: {os.path.relpath(args.out)}")
    return 0 if any(row.scores for row in found.rows) else 1


def _labels(data: Dataset) -> dict[str, str]:
    return {
        "title": f"{data.name}: posterior approximations compared",
        "x": data.x_name,
        "y": data.y_name,
        "note": data.note,
    }


def _guides() -> str:
    return f"of {', '.join(GUIDES)}; by default {' '.join(DEFAULT)}"


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1; got {text!r}")
    return int(text)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a positive number; got {text!r}")
    return value
