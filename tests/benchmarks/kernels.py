"""Where the time of a step goes: ``python -m tests.benchmarks.kernels [CASE ...] [--device cuda]``.

Takes steps as ``fit`` does, and prints for each case the time of a step, the most memory that torch held, and what
ran: kernels on a GPU, operations on a CPU, with their time and number in a step. With ``TORCH_LOGS=output_code`` torch
also prints the programs that inductor made.
"""

import argparse
import time
import warnings
from collections import Counter

import torch
from torch.profiler import ProfilerActivity, profile

import pyro_dropout as pd
from pyro_dropout.generative.precision import Precision
from tests.benchmarks.ours import RANK, Guide, dropout, fitting
from tests.benchmarks.sizes import DEEP, SIZES, WIDE, Size
from tests.benchmarks.timing import Advance, wait

CASES: dict[str, tuple[Size, Guide, bool, Precision]] = {
    "dropout": (DEEP, dropout, True, "float32"),
    "dropout-bf16": (DEEP, dropout, True, "bf16"),
    "classes-bf16": (WIDE, dropout, True, "bf16"),
    "mean-field": (DEEP, pd.AutoMeanField, True, "float32"),
    "mean-field-shared": (DEEP, pd.AutoMeanField, False, "float32"),
    "low-rank": (DEEP, lambda model: pd.AutoLowRank(model, rank=RANK), False, "float32"),
}
LIMITS = {"dropout-bf16": 130.0, "classes-bf16": 115.0, "mean-field": 330.0, "low-rank": 500.0}  # µs, on an H200
ROUNDS = 5


def step_time(advance: Advance, steps: int, device: str) -> float:
    """Return the microseconds of a step in the best round."""
    taken = []
    for _ in range(ROUNDS):
        wait(device)
        start = time.perf_counter()
        advance(steps)
        wait(device)
        taken.append((time.perf_counter() - start) / steps)
    return 1e6 * min(taken)


def kernels(advance: Advance, steps: int, device: str) -> list[tuple[str, float, float]]:
    """Return name, microseconds in a step and number in a step of all that runs, the longest first."""
    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as seen:
        advance(steps)
        wait(device)
    spent: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for event in seen.events() or []:
        if event.device_type.name.lower() == device:
            own = event.time_range.elapsed_us() if device == "cuda" else event.self_cpu_time_total
            spent[event.name] += own
            count[event.name] += 1
    return [(name, total / steps, count[name] / steps) for name, total in spent.most_common()]


def measure(name: str, size: Size, device: str, rows: int) -> None:
    """Print what one case takes."""
    _, guide, per_example, products = CASES[name]
    start = time.perf_counter()
    advance, quantum = fitting(size, device, guide, per_example=per_example, compile=True, products=products)
    advance(2 * quantum)
    wait(device)
    ready = time.perf_counter() - start
    steps = quantum * (15 if device == "cuda" else 5)
    held = f", {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB at most" if device == "cuda" else ""
    own = device == "cuda" and size is CASES[name][0] and name in LIMITS
    limit = f" (at most {LIMITS[name]:.0f})" if own else ""
    taken = step_time(advance, steps, device)
    print(f"{name}, {size.name}: {taken:.1f} µs a step{limit}, ready in {ready:.0f} s{held}")
    found = kernels(advance, quantum, device)
    print(f"  {sum(each[1] for each in found):.1f} µs in {sum(each[2] for each in found):.1f} kernels")
    for label, spent, count in found[:rows]:
        print(f"  {spent:9.2f} µs {count:6.2f} times  {label[:100]}", flush=True)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; all by default")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--size", choices=SIZES, help="a network other than the case's own")
    parser.add_argument("--rows", type=int, default=25, help="kernels to list")
    given = parser.parse_args(argv)
    if unknown := set(given.cases) - set(CASES):
        parser.error(f"unknown case {', '.join(unknown)}; choose from {', '.join(CASES)}")
    warnings.simplefilter("ignore")
    torch.set_float32_matmul_precision("high" if given.device == "cuda" else "highest")
    for name in given.cases or CASES:
        if given.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        measure(name, SIZES[given.size] if given.size else CASES[name][0], given.device, given.rows)


if __name__ == "__main__":
    main()
