"""The same seed gives the same table: twice in one process, in two processes, compiled and not."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import pyro_dropout as pd
from pyro_dropout.comparison.folder import TABLE, _write_table
from tests.cli.command import houses, run, table_of, written

ROOT = Path(__file__).parents[2]
TIMES = {"us", "us_error", "seconds", "seconds_error"}
# Noise of both kinds in one guide: uniform numbers for the rows that are kept, normal ones around them and for biases.
SMOOTH = {"smooth dropout": lambda m: pd.AutoDropout(m, keep=0.8, scale=0.1, bias="gaussian", init_scale=0.1)}


def plane() -> tuple[Tensor, Tensor]:
    x = torch.linspace(-1, 1, 60).reshape(20, 3)
    return x, x.sum(-1, keepdim=True)


def compared(folder: Path, *, compile: bool, seeds: list[int]) -> list[dict[str, str]]:
    model = pd.BayesianNet(nn.Linear(3, 1), likelihood=pd.Gaussian(25.0))
    torch.randn(int(torch.randint(1, 9, ())))  # whatever a program has drawn before must not matter
    found = pd.compare(
        model, SMOOTH, plane(), plane(), seeds=seeds, steps=30, samples=50, compile=compile, progress=False
    )
    assert found.rows[0].note == ""
    folder.mkdir()
    _write_table(found, folder / TABLE)
    return scores(folder)


def scores(folder: Path) -> list[dict[str, str]]:
    """The table as it was written, letter by letter, but for the times."""
    rows = table_of(folder / TABLE)
    assert rows
    assert set(rows[0]) >= TIMES
    return [{name: cell for name, cell in row.items() if name not in TIMES} for row in rows]


def by_command(out: Path, *arguments: object) -> list[dict[str, str]]:
    command = [sys.executable, "-m", "pyro_dropout", "compare", *map(str, arguments), "--quiet", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return scores(out)


@pytest.fixture(scope="module")
def eager(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return compared(tmp_path_factory.mktemp("eager") / "one", compile=False, seeds=[3, 4])


@pytest.mark.deep
def test_eager_twice(eager: list[dict[str, str]], tmp_path: Path) -> None:
    assert compared(tmp_path / "two", compile=False, seeds=[3, 4]) == eager
    other = compared(tmp_path / "other", compile=False, seeds=[5, 4])
    assert other[0]["log_lik"] != eager[0]["log_lik"]


@pytest.mark.deep
def test_compiled_twice_and_nearly_as_eager(eager: list[dict[str, str]], tmp_path: Path) -> None:
    one, two = (compared(tmp_path / name, compile=True, seeds=[3, 4]) for name in ("one", "two"))
    assert one == two
    # Both draw the same numbers; sums in another order round otherwise, which thirty steps have let grow a little.
    numbers = {name: float(cell) for name, cell in one[0].items() if name not in ("posterior", "note") and cell}
    assert len(numbers) > 15
    for name, value in numbers.items():
        assert float(eager[0][name]) == pytest.approx(value, rel=1e-3, abs=1e-4), name


@pytest.mark.deep
def test_the_command_in_two_processes(tmp_path: Path) -> None:
    data = written(tmp_path, houses())
    options = ["--guides", "dropout", "--seeds", 2, "--steps", 20, "--samples", 30, "--no-compile"]
    one = by_command(tmp_path / "one", data, "--target", "price", *options)
    done = run("compare", data, "--target", "price", *options, "--quiet", "--out", tmp_path / "two")  # in this process
    assert done.exit_code == 0, done.stderr
    assert scores(tmp_path / "two") == one
    assert [row["posterior"] for row in one] == ["dropout"]


@pytest.mark.deep
def test_the_bundled_series_as_the_command_compares_it_by_default(tmp_path: Path) -> None:
    one, two = (by_command(tmp_path / name) for name in ("one", "two"))
    assert one == two
    assert [row["posterior"] for row in one] == ["dropout", "multiplicative", "mean-field", "low-rank"]
