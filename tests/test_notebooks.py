"""Every notebook runs from its first cell to its last, in short form, and what it asserts is true."""

import runpy
import time
from pathlib import Path
from typing import Any

import jupytext
import pytest
import torch

from tests.own_process import ROOT, python

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.py"))


def cells(path: Path) -> list[str]:
    """The code cells of a notebook, in order."""
    return [
        cell.source
        for cell in jupytext.reads(path.read_text("utf-8"), fmt="py:percent").cells
        if cell.cell_type == "code"
    ]


def run(sources: list[str]) -> dict[str, Any]:
    """Run code cells in one namespace, as a kernel does; an error names its cell."""
    space: dict[str, Any] = {"__name__": "__main__"}
    for number, source in enumerate(sources, 1):
        exec(compile(source, f"cell {number}", "exec"), space)
    return space


@pytest.fixture
def short_form(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The environment of a reader in a hurry, with no data folder and no windows."""
    import matplotlib.pyplot as plt

    monkeypatch.setenv("PYRO_DROPOUT_SHORT", "1")
    monkeypatch.delenv("PYRO_DROPOUT_DATA", raising=False)
    monkeypatch.setattr(plt, "show", lambda: None)
    yield
    plt.close("all")
    torch.set_default_dtype(torch.float32)


def test_they_are_numbered_in_reading_order() -> None:
    assert [path.name[:3] for path in NOTEBOOKS] == [f"{number:02}_" for number in range(1, len(NOTEBOOKS) + 1)]


LONGEST = ("02", "06", "07")  # ten seconds each even in short form
BRIEF = [pytest.param(p, marks=[pytest.mark.deep] * p.stem.startswith(LONGEST)) for p in NOTEBOOKS]


@pytest.mark.parametrize("path", BRIEF, ids=lambda path: path.stem)
@pytest.mark.thinned(2)
def test_a_notebook_runs_and_its_claims_hold(path: Path, short_form: None) -> None:
    import matplotlib.pyplot as plt

    started = time.process_time()
    run(cells(path))
    assert plt.get_fignums(), "a notebook shows at least one figure"
    # Seconds of this process, which other work on the machine does not lengthen; shape checks are part of them.
    assert time.process_time() - started < 20


@pytest.mark.deep
def test_a_notebook_is_written_with_its_outputs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYRO_DROPOUT_SHORT", "1")  # which the script sets; undone after the test
    monkeypatch.delenv("MPLBACKEND", raising=False)  # a kernel has a backend of its own
    space = runpy.run_path(str(ROOT / "docs" / "make_notebooks.py"))
    space["main"](["04", "--short", "--out", str(tmp_path)])
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("04_")
    outputs = [output for cell in jupytext.read(path).cells for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2  # with pyplot, and as a Figure
    assert "stderr" not in {output.get("name") for output in outputs}


@pytest.mark.deep
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_holds_in_its_long_form(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYRO_DROPOUT_SHORT", "PYRO_DROPOUT_DATA"):
        monkeypatch.delenv(name, raising=False)
    python(path)
