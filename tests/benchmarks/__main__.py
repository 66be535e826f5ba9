"""Figures beside their limits: ``python -m tests.benchmarks [NAME ...] [--device cuda] [--quick] [--who PATTERN]``.

Each figure is printed as soon as it is measured. Without names all are measured that take no option; on a machine with
a GPU, those of a GPU too. Each runs in a process of its own, on one thread. The exit code says whether a limit was
missed.
"""

import argparse
import itertools
import os
import subprocess
import sys
import warnings
from dataclasses import replace

import torch

from tests.benchmarks import (
    endurance,
    first_hour,
    laplace,
    memory,
    predictions,
    processes,
    steps,
    tables,
    transformers,
    waiting,
)
from tests.benchmarks.figures import BENCHMARKS, ROOT, Asked, moment

# They register themselves.
MODULES = (endurance, first_hour, laplace, memory, predictions, processes, steps, tables, transformers, waiting)


def everything(*more: str) -> int:
    """Run all of them one after another, and return how many missed a limit or failed."""
    devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    failed = 0
    for device, (name, (_, own)) in itertools.product(devices, BENCHMARKS.items()):
        if device in own:
            command = [sys.executable, "-m", "tests.benchmarks", name, "--device", device, *more]
            print("---", *command[1:], flush=True)
            failed += subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode != 0
    return failed


def main(argv: list[str] | None = None) -> int:
    """Measure and print; return how many limits were missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="by default what the benchmark is about")
    parser.add_argument("--quick", action="store_true", help="a small run, to see that it works")
    parser.add_argument("--rounds", type=int, default=5, help="turns that everyone has")
    parser.add_argument("--who", default="", metavar="PATTERN", help="contestants and settings, by name")
    given = parser.parse_args(argv)
    if unknown := set(given.names) - set(BENCHMARKS):
        parser.error(f"unknown benchmark {', '.join(unknown)}; choose from {', '.join(BENCHMARKS)}")
    if not given.names:
        return everything(*["--quick"] * given.quick)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    missed = 0
    for name in given.names:
        measure, devices = BENCHMARKS[name]
        device = given.device or ("cuda" if "cuda" in devices and torch.cuda.is_available() else "cpu")
        torch.set_float32_matmul_precision("high" if device == "cuda" else "highest")
        torch.manual_seed(0)
        print(f"{name}: {moment(device)}", flush=True)
        for figure in measure(Asked(device, given.quick, given.rounds, given.who)):
            figure = replace(figure, most=None, least=None) if given.quick else figure  # limits are for whole runs
            print(f"  {figure}", flush=True)
            missed += figure.missed
    return missed


if __name__ == "__main__":
    sys.exit(min(main(), 100))
