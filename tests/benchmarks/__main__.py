"""Figures beside their limits: ``python -m tests.benchmarks [NAME ...] [--device cuda] [--quick] [--who PATTERN]``.

Each figure is printed as soon as it is measured. Without names all are measured that take no option; on a machine with
a GPU, those of a GPU too. Each runs in a process of its own, on one thread. The exit code says whether a limit was
missed.
"""

import argparse
import os
import subprocess
import sys
import warnings
from dataclasses import replace

import torch

from tests.benchmarks import (
    cuda_c,
    endurance,
    first_hour,
    fleets,
    general,
    laplace,
    memory,
    precision,
    predictions,
    steps,
    tables,
    transformers,
    waiting,
)
from tests.benchmarks.figures import BENCHMARKS, ROOT, Asked, cpu_model, moment

OURS = (cuda_c, fleets, general, memory, precision, predictions, steps, transformers)
MODULES = (*OURS, endurance, first_hour, laplace, tables, waiting)  # they register themselves


def everything(*more: str) -> int:
    """Run all of them one after another, and return how many missed a limit or failed."""
    devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    commands = [
        ["tests.benchmarks", name, "--device", device, *more]
        for device in devices
        for name, (_, own) in BENCHMARKS.items()
        if device in own
    ]
    failed = 0
    for command in commands:
        print(f"--- python -m {' '.join(command)}", flush=True)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        failed += subprocess.run([sys.executable, "-m", *command], cwd=ROOT, env=environment).returncode != 0
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
        about = torch.cuda.get_device_name() if device == "cuda" else cpu_model()
        print(f"{name}: {about}, torch {torch.__version__}, {moment()}", flush=True)
        for figure in measure(Asked(device, given.quick, given.rounds, given.who)):
            figure = replace(figure, most=None, least=None) if given.quick else figure  # limits are for whole runs
            print(f"  {figure}", flush=True)
            missed += figure.missed
    return missed


if __name__ == "__main__":
    sys.exit(min(main(), 100))
