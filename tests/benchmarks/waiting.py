"""How long a person with a small table waits; limits are for two cores that nothing else uses.

Every command runs in a process of its own, with an empty cache of the compiler; the first picture also with no bytecode
but what ``make install`` leaves. Seconds of the processor do not grow with what else the machine does.
"""

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from tests.benchmarks.figures import ROOT, Asked, Figure, benchmark
from tests.benchmarks.first_hour_tables import TARGET, houses

FIT = ["-m", "pyro_dropout", "fit", "table.csv", "--target", "y", "--quiet", "--device", "cpu"]
COMPARE = ["-m", "pyro_dropout", "compare", *FIT[3:], "--guides", "dropout,multiplicative,mean-field,low-rank"]
SINGLE = ["--guide", "mean-field", "--scale", "plain", "--noise", "constant", "--steps", "1200", "--held-back", "0"]
NETWORK = """
import time, torch, pyro_dropout as pd
torch.set_num_threads(1)
x, y = torch.randn(400, 13), torch.randn(400, 1)
def fit(**how):
    net = torch.nn.Sequential(torch.nn.Linear(13, 50), torch.nn.ReLU(), torch.nn.Linear(50, 1))
    model = pd.BayesianNet(net, likelihood=pd.Gaussian(tau=10.0))
    start = time.perf_counter()
    pd.fit(model, pd.AutoDropout(model, keep=0.9), x, y, device="cpu", progress=False, **how)
    print(time.perf_counter() - start)
"""
FIRST_STEP = f"{NETWORK}fit(steps=1, compile=True)"
TEN_THOUSAND = f"{NETWORK}for how in ('traced', 'auto'): fit(steps=10_000, batch_size=50, compile=how)"


def timed(command: list[str], folder: Path, **environment: str) -> tuple[float, float]:
    """Return the seconds of a command, of the clock and of the processor, with an empty cache of the compiler."""
    with tempfile.TemporaryDirectory() as cache:
        usual = {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": ""}  # Python's own default, as on most machines
        own = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, **usual, **environment}
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run([sys.executable, *command], cwd=folder, env=own, check=True, capture_output=True)
        seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def figure(what: str, taken: tuple[float, float], most: float) -> Figure:
    """Return the seconds of the clock as a figure; those of the processor are told beside them."""
    return Figure(f"{what} ({taken[1]:.1f} s of the processor)", taken[0], "s", most=most)


def write_table(path: Path, rows: int, columns: int) -> None:
    """Write a table of numbers."""
    random = np.random.default_rng(0)
    x = random.standard_normal((rows, columns))
    y = np.sin(x[:, 0]) + x[:, 1] * x[:, 2] + 0.1 * random.standard_normal(rows)
    pd.DataFrame({**{f"x{k}": x[:, k] for k in range(columns)}, "y": y}).to_csv(path, index=False)


def fit(folder: Path) -> Iterator[Figure]:
    """A fit of 500 rows and 8 columns, its imports, and the choice of a guide beside a single training."""
    write_table(folder / "table.csv", 500, 8)
    imports = ["-c", "from pyro_dropout.tabular.fit_table import fit_table; from pyro_dropout.cli.main import app"]
    timed(imports, folder)  # so that bytecode is there
    yield figure("imports of fit", timed(imports, folder), 4.0)
    whole = timed([*FIT, "--out", "auto"], folder)
    yield figure("fit, 500 x 8", whole, 10.0)
    alone = timed([*FIT, *SINGLE, "--out", "single"], folder)
    yield Figure("--guide auto, times a single fit", whole[0] / alone[0], most=3.0)


def picture(folder: Path) -> Iterator[Figure]:
    """The first picture after an installation: fit and predict of 2,000 houses."""
    frame = houses().frame.rename(columns={TARGET: "price"})
    frame.to_csv(folder / "houses.csv", index=False)
    frame.drop(columns="price").head(100).to_csv(folder / "new.csv", index=False)
    kept = {"PYTHONPYCACHEPREFIX": str(folder / "bytecode"), "PYTHONDONTWRITEBYTECODE": ""}
    first = timed(
        ["-c", "import matplotlib.figure, pyro_dropout.cli.main, pyro_dropout.tabular.fit_table"], folder, **kept
    )
    yield figure("last line of make install", first, 60.0)
    one, two = (
        timed(["-m", "pyro_dropout", *words.split()], folder, **kept)
        for words in ("fit houses.csv --target price --out run", "predict run new.csv --out p.csv --plot p.png")
    )
    if not (folder / "p.png").stat().st_size:
        raise RuntimeError("there is no picture")
    yield figure("first picture: fit", one, 60.0)
    yield figure("first picture: fit and predict", (one[0] + two[0], one[1] + two[1]), 60.0)


def step(folder: Path) -> Iterator[Figure]:
    """The first compiled step, of 13-50-1."""
    first = ["-c", FIRST_STEP]
    how = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")}
    yield Figure("first compiled step, cold", timed(first, folder, **how)[0], "s", most=8.0)
    # The best of three, in turns: all that disturbs a process makes it longer.
    pairs = [(timed(first, folder, **how)[0], timed(["-c", "import torch"], folder)[0]) for _ in range(3)]
    second, torch_alone = (min(each) for each in zip(*pairs, strict=True))
    yield Figure("first compiled step, second process", second, "s", most=2.5)
    yield Figure("of which importing torch", torch_alone, "s")


def steps(folder: Path) -> Iterator[Figure]:
    """Ten thousand steps of 13-50-1, recorded and as they are decided on, compilation included."""
    own = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", TEN_THOUSAND], env=own, check=True, capture_output=True, text=True)
    recorded, taken = map(float, done.stdout.split())
    yield Figure(f"10,000 steps, over the {recorded:.1f} s of recorded ones", taken / recorded, most=0.5)


def compare(folder: Path) -> Iterator[Figure]:
    """Comparisons of four guides."""
    for rows, columns, limit in ((500, 8, 60.0), (2000, 12, 180.0)):
        write_table(folder / "table.csv", rows, columns)
        taken = timed([*COMPARE, "--out", f"out-{rows}"], folder)
        yield figure(f"compare of four guides, {rows} x {columns}", taken, limit)


PARTS: tuple[Callable[[Path], Iterator[Figure]], ...] = (fit, picture, step, steps, compare)


@benchmark("waiting", "cpu")
def waiting(asked: Asked) -> Iterator[Figure]:
    """All of them, each in a folder of its own."""
    for part in PARTS[: asked.pick(len(PARTS), 1)]:
        with tempfile.TemporaryDirectory() as folder:
            yield from part(Path(folder))
