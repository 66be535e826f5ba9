"""Large loads, and what they take: ``python -m tests.benchmarks.load``.

Ten million rows of a CSV file through ``pyro-dropout predict``, whose memory must not grow with the file; a fleet of
ten thousand networks; and a prediction with a hundred thousand draws, whose memory must not grow with the draws.
``--columns 10000`` fits and predicts a table of 250 rows and so many columns instead.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import pyro_dropout as pd

HEADER = "age,height,weight\n"


def resident(process: int | str = "self") -> int:
    """Return the bytes of memory that a process has now; 0 if it is gone."""
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (FileNotFoundError, ProcessLookupError):
        return 0


def stream(rows: int, samples: int) -> dict[str, object]:
    """Fit a small table, and predict for a large one, in processes of their own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines = [f"{k % 90},{150 + k % 47},{40 + k % 61 + 0.1 * (k % 90)}\n" for k in range(100_000)]
        (folder / "small.csv").write_text(HEADER + "".join(lines[:400]))
        with (folder / "large.csv").open("w") as file:
            file.write(HEADER)
            for start in range(0, rows, len(lines)):
                file.writelines(lines[: min(len(lines), rows - start)])
        command = [sys.executable, "-m", "pyro_dropout"]
        fitted = ["fit", "small.csv", "--target", "weight", "--out", "run", "--steps", "200", "--quiet"]
        subprocess.run([*command, *fitted], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        asked = ["predict", "run", "large.csv", "--out", "said.csv", "--samples", str(samples), "--quiet"]
        start, seen, done = time.monotonic(), [], []
        process = subprocess.Popen([*command, *asked], cwd=folder, stdout=subprocess.DEVNULL)
        while process.poll() is None:
            time.sleep(0.5)
            beside = [path for path in folder.iterdir() if "said" in path.name]
            done.append(beside[0].stat().st_size if beside else 0)
            seen.append(resident(process.pid))
        seconds = time.monotonic() - start
        with (folder / "said.csv").open() as file:
            written = sum(1 for _ in file) - 1
        sizes = (folder / "said.csv").stat().st_size
    early = [memory for memory, size in zip(seen, done, strict=True) if 0.1 * sizes < size < 0.2 * sizes]
    late = [memory for memory, size in zip(seen, done, strict=True) if size > 0.9 * sizes and memory]
    return {
        "exit code": process.returncode,
        "rows": written,
        "seconds": round(seconds, 1),
        "rows a second": round(written / seconds),
        "most megabytes from 10 to 20 % of the file": round(max(early) / 1e6, 1) if early else None,
        "most megabytes in its last 10 %": round(max(late) / 1e6, 1) if late else None,
        "most megabytes": round(max(seen) / 1e6, 1),
    }


def wide(columns: int) -> dict[str, object]:
    """Fit a table with many columns, two of which say what the target is, and predict 50 other rows."""
    x = torch.randn(300, columns, generator=torch.Generator().manual_seed(0))
    y = 2 * x[:, :1] - x[:, 5:6] + 0.3 * torch.randn(300, 1, generator=torch.Generator().manual_seed(1))
    lines = [",".join(f"{value:.3f}" for value in row) + "\n" for row in torch.cat([x, y], 1).tolist()]
    header = ",".join([*(f"c{k}" for k in range(columns)), "y"]) + "\n"
    fitted = ["fit", "table.csv", "--target", "y", "--out", "run", "--quiet"]
    asked = ["predict", "run", "new.csv", "--out", "said.csv", "--quiet"]
    found: dict[str, object] = {"columns": columns}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "table.csv").write_text(header + "".join(lines[:250]))
        Path(folder, "new.csv").write_text(header + "".join(lines[250:]))
        for words in (fitted, asked, [*asked[:-1], "--plot", "said.png", "--quiet"]):
            before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
            subprocess.run([sys.executable, "-m", "pyro_dropout", *words], cwd=folder, check=True, stdout=sys.stderr)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            name = words[0] + " --plot" * ("--plot" in words)
            found |= {f"{name}: seconds": round(time.monotonic() - start, 1), f"{name}: of CPU time": round(cpu, 1)}
    return found | {"most megabytes": round(after.ru_maxrss / 1e3, 1)}


def fleet(replicas: int, steps: int) -> dict[str, object]:
    """Train many small networks at once, compiled."""
    x = torch.randn(1000, 13, generator=torch.Generator().manual_seed(0))
    y = x[:, :1].sin()

    def build(seed: int) -> tuple[pd.BayesianNet, pd.AutoDropout]:
        torch.manual_seed(seed)
        net = torch.nn.Sequential(torch.nn.Linear(13, 50), torch.nn.ReLU(), torch.nn.Linear(50, 1))
        model = pd.BayesianNet(net, likelihood=pd.Gaussian(10.0))
        return model, pd.AutoDropout(model, keep=0.9)

    start = time.monotonic()
    many = pd.Fleet(build, {"seed": list(range(replicas))})
    built = time.monotonic() - start
    history = many.fit(x, y, steps=steps, batch_size=32, lr=1e-2, progress=False, seed=0)
    better = (history.losses[-1] < history.losses[0]).double().mean().item()
    return {
        "replicas": len(many),
        "seconds to build": round(built, 1),
        "steps": history.steps,
        "seconds": round(history.seconds, 1),
        "microseconds a replica's step": round(1e6 * history.seconds / (history.steps * replicas), 2),
        "share whose loss fell": better,
        "diverged": int(history.diverged.sum()),
        "most megabytes": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3, 1),
    }


def draws(counts: list[int]) -> list[dict[str, object]]:
    """Predict with more and more draws, whose outputs are not kept."""
    net = torch.nn.Sequential(torch.nn.Linear(13, 50), torch.nn.ReLU(), torch.nn.Linear(50, 1))
    model = pd.BayesianNet(net, likelihood=pd.Gaussian(10.0))
    guide = pd.AutoDropout(model, keep=0.9)
    x = torch.randn(500, 13)
    guide(x, x[:, :1])
    found: list[dict[str, object]] = []
    for count in counts:
        start = time.monotonic()
        answer = pd.predict(model, guide, x, samples=count, keep_samples=False, seed=0)
        density = answer.log_prob(x[:, :1])
        line = {"draws": count, "seconds": round(time.monotonic() - start, 1), "megabytes": round(resident() / 1e6, 1)}
        found.append({**line, "finite": bool(torch.isfinite(density).all())})
    return found


def main() -> None:
    """Carry all three loads, and print what they took as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--samples", type=int, default=20, help="draws for each of the rows")
    parser.add_argument("--replicas", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--draws", type=int, nargs="+", default=[1000, 10_000, 100_000])
    parser.add_argument("--columns", type=int, help="fit a table with so many columns instead")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.columns:
        print(json.dumps(wide(args.columns), indent=1))
        return
    print(json.dumps({"draws": draws(args.draws)}, indent=1), flush=True)
    print(json.dumps({"rows": stream(args.rows, args.samples)}, indent=1), flush=True)
    print(json.dumps({"fleet": fleet(args.replicas, args.steps)}, indent=1), flush=True)


if __name__ == "__main__":
    main()
