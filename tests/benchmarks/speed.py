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

from tests.benchmarks import fleets, growth, long_run, predictions, steps
from tests.benchmarks.first_step import measure as measure_first_step
from tests.benchmarks.machine import described, file_name, moment
from tests.benchmarks.report import Report, Section, read, section_text
from tests.benchmarks.settings import Settings, default_sizes
from tests.benchmarks.sizes import SIZES
from tests.benchmarks.timing import Deadline, reason

FOLDER = Path(__file__).parents[2] / "docs" / "benchmarks"
LIMITS = {("cpu", False): 560.0, ("cpu", True): 150.0, ("cuda", False): 335.0, ("cuda", True): 150.0}

# In the order of importance, for time may run out.
SECTIONS: dict[str, Callable[[Settings], Iterator[Section]]] = {
    "steps": steps.measure,
    "fleet": fleets.measure,
    "predict": predictions.measure,
    "compile": lambda settings: measure_first_step(settings, torch.get_num_threads()),
    "growth": growth.measure,
    "long": long_run.measure,
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
        try:
            for section in SECTIONS[name](settings):
                section.taken = taken
                report.sections[name] = section
                save(report, folder)
        except Exception as cause:
            print(f"{name} {reason(cause)}", flush=True)
    return report


def save(report: Report, folder: Path) -> None:
    """Write page, numbers and figure."""
    report.sections = {name: report.sections[name] for name in SECTIONS if name in report.sections}
    report.write(folder)
    if report.curves:
        try:
            from tests.benchmarks.figure import draw

            draw(report.curves, folder / f"{report.name}_growth.png")
        except Exception as cause:  # the numbers are worth more than their picture
            print(f"the figure {reason(cause)}", flush=True)


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
    parser.add_argument("--limit", type=float, help="seconds after which nothing new is begun; 0 for no end")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Measure, print and write."""
    args = parsed(argv)
    device = args.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(args.threads)
    warnings.simplefilter("ignore")  # of the contestants; what fails is listed
    limit = LIMITS[device, args.quick] if args.limit is None else args.limit or None
    settings = Settings(
        device,
        quick=args.quick,
        rounds=args.rounds or (3 if args.quick else 7),
        turn=0.05 if args.quick or device == "cuda" else 0.2,
        sizes=[SIZES[name] for name in args.sizes] if args.sizes else default_sizes(device, args.quick),
        deadline=Deadline(limit),
        who=args.who,
    )
    report = run(settings, args.only or list(SECTIONS), args.out)
    for section in report.sections.values():
        print(f"\n{section_text(section)}")


if __name__ == "__main__":
    main()
