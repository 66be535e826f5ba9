"""All figures of speed and memory that have a limit, one after another: ``python -m tests.benchmarks.limits``.

Each benchmark measures its own baseline in the same process and prints the ratio beside the limit. On a machine with a
GPU those of a GPU run too.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
ON_CPU = (
    ("general", "--one-by-one"),
    ("threads",),
    ("memory", "--weights", "100e6"),
    ("low_rank",),
    ("nuts", "--quick"),
    ("linearised", "--device", "cpu", "--images", "1000"),
    ("laplace", "--memory"),
    ("tables",),
    ("no_waiting",),
)
ON_GPU = (
    ("precision",),
    ("kernels", "--rows", "0", "mean-field", "low-rank"),
    ("cuda_c",),
    ("laplace", "--device", "cuda"),
    ("linearised", "--device", "cuda"),
    ("memory", "--device", "cuda"),
    ("nuts", "--device", "cuda", "--quick"),
)


def main() -> int:
    """Run the benchmarks, and return how many of them could not run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=sorted({name for name, *_ in ON_CPU + ON_GPU}))
    given = parser.parse_args()
    failed = 0
    for name, *options in ON_CPU + (ON_GPU if torch.cuda.is_available() else ()):
        if given.only and name not in given.only:
            continue
        print(f"--- python -m tests.benchmarks.{' '.join([name, *options])}", flush=True)
        environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
        environment |= {} if name == "threads" else {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", f"tests.benchmarks.{name}", *options]
        failed += subprocess.run(command, cwd=ROOT, env=environment).returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main())
