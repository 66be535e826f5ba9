"""A training of an hour: does memory stay, and are files closed? ``python -m tests.benchmarks.soak --minutes 60``.

``--fits 300`` makes so many short trainings in one process instead, and compares memory after a tenth of them with that
at the end.
The training has mini-batches, a schedule, early stopping that never stops it, and checkpoints; a thread beside it looks
at the memory and the open files of the process. Printed: what it saw, and by how much memory grew after the warm-up.
Ctrl-C ends it early, and tells what was seen until then.
"""

import argparse
import json
import os
import tempfile
import threading
import time
from pathlib import Path

import torch

import pyro_dropout as pd

WARM_UP = 0.1  # of the time: compiling, first checkpoints, the allocator's pools


def resident() -> int:
    """Return the bytes of memory that the process has, as the kernel counts them."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def open_files() -> int:
    """Return how many files the process has open."""
    return len(os.listdir("/proc/self/fd"))


def watch(seen: list[tuple[float, int, int]], over: threading.Event, every: float) -> None:
    """Note (seconds, bytes, files) again and again until it is over."""
    start = time.monotonic()
    while not over.wait(every):
        seen.append((time.monotonic() - start, resident(), open_files()))


def train(steps: int, folder: Path | None, compiled: bool) -> pd.training.History:
    """Take so many steps of a small training with everything that ``fit`` has."""
    torch.manual_seed(0)
    x = torch.linspace(-1, 1, 2000).unsqueeze(-1)
    y = torch.sin(6 * x) + 0.1 * torch.randn_like(x)
    net = torch.nn.Sequential(torch.nn.Linear(1, 50), torch.nn.ReLU(), torch.nn.Linear(50, 1))
    model = pd.BayesianNet(net, likelihood=pd.Gaussian(100.0, learn=True))
    return pd.fit(
        model,
        pd.AutoDropout(model, keep=0.95),
        x[::2],
        y[::2],
        steps=steps,
        batch_size=128,
        lr=1e-3,
        schedule=pd.training.inverse_decay(),
        validation=(x[1::2], y[1::2]),
        patience=10**9,
        check_every=max(1, min(20_000, steps // 4)),
        checkpoint=None if folder is None else pd.training.Checkpoint(folder, seconds=30.0, keep_last=2),
        compile=compiled,
        progress=False,
        seed=0,
    )


def many(count: int, compiled: bool) -> dict[str, object]:
    """Memory after a tenth of so many trainings, and after all of them."""
    seen = []
    for _ in range(count):
        with tempfile.TemporaryDirectory() as folder:
            train(20, Path(folder), compiled)
        seen.append(resident())
    early, late = seen[count // 10], seen[-1]
    return {
        "fits": count,
        "compiled": compiled,
        "megabytes after a tenth": round(early / 1e6, 1),
        "megabytes at the end": round(late / 1e6, 1),
        "growth %": round(100 * (late / early - 1), 2),
        "open files": open_files(),
    }


def main() -> None:
    """Train for as long as asked, and print what the watcher saw as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--fits", type=int, help="so many short trainings instead")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.fits:
        print(json.dumps(many(args.fits, not args.eager), indent=1))
        return
    speed = train(2000, None, not args.eager).steps_per_second
    seen: list[tuple[float, int, int]] = []
    over = threading.Event()
    watcher = threading.Thread(target=watch, args=(seen, over, max(0.2, args.minutes * 60 / 240)))
    watcher.start()
    begun, steps = time.monotonic(), int(speed * args.minutes * 60)
    with tempfile.TemporaryDirectory() as folder:
        try:
            train(steps, Path(folder), not args.eager)
            whole = True
        except KeyboardInterrupt:
            whole = False
    minutes = (time.monotonic() - begun) / 60
    over.set()
    watcher.join()
    warm = [row for row in seen if row[0] > WARM_UP * seen[-1][0]]
    tenth = max(1, len(warm) // 10)
    early, late = (sum(row[1] for row in part) / len(part) for part in (warm[:tenth], warm[-tenth:]))
    files = [row[2] for row in warm]
    print(
        json.dumps(
            {
                "minutes": round(minutes, 2),
                "steps asked for": steps,
                "all of them taken": whole,
                "compiled": not args.eager,
                "megabytes after warm-up": round(early / 1e6, 2),
                "megabytes at the end": round(late / 1e6, 2),
                "growth %": round(100 * (late / early - 1), 3),
                "files after warm-up": min(files[:tenth]),
                "files at the end": min(files[-tenth:]),
                "most files": max(files),
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
