"""How fast it is, beside everyone else: ``python -m tests.benchmarks.speed``.

Prints every number as soon as it is measured, and writes the tables as Markdown and JSON after every section.
Contestants that are not installed, or fail, are listed with the reason.
"""

import argparse
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from tests.benchmarks import first_step, fleets, growth, predictions, steps
from tests.benchmarks.report import Report, Section, Task, cell, described, file_name, moment, read
from tests.benchmarks.sizes import SIZES
from tests.benchmarks.timing import Settings, reason

FOLDER = Path(__file__).parents[2] / "docs" / "benchmarks"
SECTIONS: dict[str, Callable[[Settings], tuple[Section, Iterator[Task]]]] = {
    "steps": steps.section,
    "fleet": fleets.section,
    "predict": predictions.section,
    "compile": first_step.section,
    "growth": growth.section,
    "long": growth.long_run,
}


def run(settings: Settings, names: list[str], folder: Path) -> Report:
    """Measure the sections and write them; sections that are not named stay as an earlier run left them."""
    report = Report(file_name(settings.device), described(settings.device, settings.precisions))
    before = folder / f"{report.name}.json"
    if len(names) < len(SECTIONS) and before.exists():
        earlier = read(before)
        if earlier.machine == report.machine:
            report.sections = earlier.sections
    for key, value in report.machine.items():
        print(f"{key}: {value}", flush=True)
    for name in names:
        print(f"--- {name}, {(taken := moment())}", flush=True)
        section, tasks = SECTIONS[name](settings)
        section.taken = taken
        for label, task in tasks:
            try:
                found = task()
            except Exception as cause:  # the others are measured all the same
                section.absent[label] = reason(cause)
                print(f"  {label}: {section.absent[label]}", flush=True)
                continue
            section.rows += found
            for row in found:
                told = {key: cell(value) for key, value in row.items() if key not in ("x", "y")}
                print("  " + ", ".join(f"{key} {value}" for key, value in told.items()), flush=True)
            report.sections[name] = section
            report.sections = {name: report.sections[name] for name in SECTIONS if name in report.sections}
            report.write(folder)
    return report


def parsed(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda", "auto"), default="auto")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, metavar="SIZE", help=f"networks, of {', '.join(SIZES)}")
    parser.add_argument("--who", default="", metavar="PATTERN", help="contestants in the table of steps, by name")
    parser.add_argument("--quick", action="store_true", help="the smallest network, few points and short turns")
    parser.add_argument("--out", type=Path, default=FOLDER, metavar="FOLDER", help="where to write the report")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, metavar="SECTION", help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of torch on the CPU; all cores by default")
    parser.add_argument("--rounds", type=int, help="turns that everyone has")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Measure, print and write."""
    args = parsed(argv)
    device = args.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(args.threads)
    warnings.simplefilter("ignore")  # of the contestants; what fails is listed
    sizes = list(SIZES.values())[: 1 if args.quick else 3 if device == "cuda" else 2]
    settings = Settings(
        device,
        quick=args.quick,
        rounds=args.rounds or (3 if args.quick else 7),
        turn=0.05 if args.quick or device == "cuda" else 0.2,
        sizes=[SIZES[name] for name in args.sizes] if args.sizes else sizes,
        who=args.who,
    )
    report = run(settings, args.only or list(SECTIONS), args.out)
    print(f"\n{report.markdown()}")


if __name__ == "__main__":
    main()
