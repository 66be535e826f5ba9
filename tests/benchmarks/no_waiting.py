"""How long a person with a small table waits: ``python -m tests.benchmarks.no_waiting [--only fit,picture]``.

Each figure stands beside its limit, which is for two cores that nothing else uses. Every command runs in a process of
its own, with an empty cache of the compiler; ``picture`` also with no bytecode but what ``make install`` leaves. The
seconds of the processor do not grow with what else the machine does.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.benchmarks.first_hour_tables import TARGET, houses
from tests.benchmarks.first_step import once
from tests.benchmarks.low_rank import HELD_BACK, write_table
from tests.benchmarks.machine import cpu_model, moment
from tests.benchmarks.report import Row, table

COLUMNS = {"figure": "figure", "seconds": "measured", "limit": "at most", "cpu": "seconds of the processor"}
IMPORTS = "from pyro_dropout.tabular.fit_table import plan_table; from pyro_dropout.cli.main import app"
ROOT = Path(__file__).parents[2]
TEN_THOUSAND = """
import time, torch, pyro_dropout as pd
torch.set_num_threads(1)
x, y = torch.randn(400, 13), torch.randn(400, 1)
taken = []
for how in ("traced", "auto"):
    net = torch.nn.Sequential(torch.nn.Linear(13, 50), torch.nn.ReLU(), torch.nn.Linear(50, 1))
    model = pd.BayesianNet(net, likelihood=pd.Gaussian(tau=10.0))
    start = time.perf_counter()
    pd.fit(model, pd.AutoDropout(model, keep=0.9), x, y, steps=10_000, batch_size=50, compile=how, progress=False)
    taken.append(time.perf_counter() - start)
print(*taken)
"""


def timed(command: list[str], folder: Path, **environment: str) -> tuple[float, float]:
    """Return the seconds of a command, of the clock and of the processor, with an empty cache of the compiler."""
    with tempfile.TemporaryDirectory() as cache:
        usual = {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": ""}  # Python's own default, as on most machines
        own = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, **usual, **environment}
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run([sys.executable, *command], cwd=folder, env=own, check=True, capture_output=True)
        seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def ours(*command: str) -> list[str]:
    """Return a command of the library."""
    return ["-m", "pyro_dropout", *command]


def row(figure: str, seconds: float, limit: float | str, cpu: float | str = "") -> Row:
    """Return a row of the table; one without a limit is there to be compared with."""
    return {"figure": figure, "seconds": seconds, "limit": limit, "cpu": cpu}


def fit(folder: Path) -> Iterator[Row]:
    """A fit of 500 rows and 8 columns, its imports, and the choice of a guide beside a single training."""
    write_table(folder / "table.csv", round(500 * (1 - HELD_BACK)), 8)
    given = ["fit", "table.csv", "--target", "y", "--quiet", "--device", "cpu"]
    timed(["-c", IMPORTS], folder)  # so that bytecode is there
    yield row("imports of fit", *_placed(timed(["-c", IMPORTS], folder), 4.0))
    whole = timed(ours(*given, "--out", "auto"), folder)
    yield row("fit, 500 x 8", *_placed(whole, 10.0))
    single = ["--guide", "mean-field", "--scale", "plain", "--noise", "constant", "--steps", "1200", "--held-back", "0"]
    alone = timed(ours(*given, *single, "--out", "single"), folder)
    yield row("--guide auto, times a single fit", whole[0] / alone[0], 3.0, whole[1] / alone[1])


def compare(folder: Path) -> Iterator[Row]:
    """Comparisons of four guides."""
    for rows, columns, limit in ((500, 8, 60.0), (2000, 12, 180.0)):
        write_table(folder / "table.csv", round(rows * (1 - HELD_BACK)), columns)
        given = ["compare", "table.csv", "--target", "y", "--device", "cpu", "--out", f"out-{rows}", "--quiet"]
        whole = timed(ours(*given, "--guides", "dropout,multiplicative,mean-field,low-rank"), folder)
        yield row(f"compare of four guides, {rows} x {columns}", *_placed(whole, limit))


def picture(folder: Path) -> Iterator[Row]:
    """The first picture after an installation: fit and predict of 2,000 houses."""
    frame = houses().frame.rename(columns={TARGET: "price"})
    frame.to_csv(folder / "houses.csv", index=False)
    frame.drop(columns="price").head(100).to_csv(folder / "new.csv", index=False)
    kept = {"PYTHONPYCACHEPREFIX": str(folder / "bytecode"), "PYTHONDONTWRITEBYTECODE": ""}
    yield row(
        "last line of make install", *_placed(timed(["-m", "pyro_dropout.cli.first_import"], folder, **kept), 60.0)
    )
    one = timed(ours("fit", "houses.csv", "--target", "price", "--out", "run"), folder, **kept)
    two = timed(ours("predict", "run", "new.csv", "--out", "p.csv", "--plot", "p.png"), folder, **kept)
    if not (folder / "p.png").stat().st_size:
        raise RuntimeError("there is no picture")
    yield row("first picture: fit", one[0], 60.0, one[1])
    yield row("first picture: fit and predict", one[0] + two[0], 60.0, one[1] + two[1])


def step(folder: Path) -> Iterator[Row]:
    """The first compiled step, of 13-50-1."""
    cache = str(folder / "cache")
    yield row("first compiled step, cold", once("cpu", 1, cache)[0], 8.0)
    # The best of three, in turns: all that disturbs a process makes it longer.
    pairs = [(once("cpu", 1, cache)[0], timed(["-c", "import torch"], folder)[0]) for _ in range(3)]
    second, torch_alone = (min(each) for each in zip(*pairs, strict=True))
    yield row("first compiled step, second process", second, 2.5)
    yield row("of which importing torch", torch_alone, "")


def steps(folder: Path) -> Iterator[Row]:
    """Ten thousand steps of 13-50-1, recorded and as they are decided on, compilation included."""
    own = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", TEN_THOUSAND], env=own, check=True, capture_output=True, text=True)
    recorded, taken = map(float, done.stdout.split())
    yield row("10,000 steps, recorded", recorded, "")
    yield row("10,000 steps, times the recorded ones", taken / recorded, 0.5)


def _placed(measured: tuple[float, float], limit: float) -> tuple[float, float, float]:
    return measured[0], limit, measured[1]


PARTS: dict[str, Callable[[Path], Iterator[Row]]] = {
    "fit": fit,
    "picture": picture,
    "step": step,
    "steps": steps,
    "compare": compare,
}


def main(argv: list[str] | None = None) -> int:
    """Print each figure as it is measured, then the table; return 1 if one is over its limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", help=f"some of {', '.join(PARTS)}, separated by commas", default=",".join(PARTS))
    chosen = parser.parse_args(argv).only.split(",")
    print(f"{cpu_model()}, {os.cpu_count()} cores, {moment()}", flush=True)
    found: list[Row] = []
    for name in chosen:
        with tempfile.TemporaryDirectory() as folder:
            for each in PARTS[name](Path(folder)):
                limit = f", at most {each['limit']:.1f}" if each["limit"] else ""
                print(f"  {each['figure']}: {each['seconds']:.1f}{limit}", flush=True)
                found.append(each)
    print(table(COLUMNS, found))
    return int(any(each["limit"] and each["seconds"] > each["limit"] for each in found))


if __name__ == "__main__":
    sys.exit(main())
