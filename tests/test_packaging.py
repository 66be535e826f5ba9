"""What a user gets: one version, a wheel with the package alone in it, and a Makefile that sets everything up."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

import pyro_dropout
from tests.own_process import ROOT, python
from tests.wheel import LARGEST


def make(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run make as from a fresh shell: nothing of an outer ``make test`` is handed on."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(["make", *arguments], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A folder with the Makefile and what it depends on, and no virtual environment."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def test_there_is_one_version() -> None:
    written = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text("utf-8"), re.MULTILINE)
    assert cited
    assert pyro_dropout.__version__ == version("pyro-dropout") == written == cited[1]


def test_the_wheel_holds_the_package_alone(tmp_path: Path) -> None:
    python("-m", "hatchling", "build", "--target", "wheel", "--directory", tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.stat().st_size <= LARGEST
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {
        "pyro_dropout",
        f"pyro_dropout-{pyro_dropout.__version__}.dist-info",
    }
    assert "pyro_dropout/py.typed" in names
    templates = [path for path in (ROOT / "pyro_dropout/comparison/report/templates").rglob("*") if path.is_file()]
    assert {str(path.relative_to(ROOT)) for path in templates} <= set(names)
    assert {path.suffix for path in templates} == {".jinja", ".css"}
    assert {name for name in names if name.endswith(".py")} == {
        str(path.relative_to(ROOT)) for path in (ROOT / "pyro_dropout").rglob("*.py")
    }

    # As installed, with nothing else in sight: the scripts beside the package cannot be imported.
    look = "import importlib.util, sys; print(*(bool(importlib.util.find_spec(name)) for name in sys.argv[1:]))"
    alone = f"import sys; sys.path.insert(0, {str(wheel)!r}); "
    done = python("-I", "-S", "-c", alone + look, "pyro_dropout", "models", "tests", folder=tmp_path)
    assert done.stdout.split() == ["True", "False", "False"]


def test_make_installs_and_then_tests(bare: Path) -> None:
    done = make("-n", "test", folder=bare)
    assert done.returncode == 0, done.stderr
    steps = ["-m venv .venv", 'install --no-compile -c constraints.txt -e ".[dev]"', "-m pytest"]
    places = [done.stdout.find(step) for step in steps]
    assert -1 not in places
    assert places == sorted(places)


def test_make_tests_another_torch_in_an_environment_of_its_own(bare: Path) -> None:
    done = make("-n", "test-torch", "VERSION=2.10", folder=bare)
    assert done.returncode == 0, done.stderr
    assert "-m venv .venv-torch-2.10\n" in done.stdout
    assert "torch==2.10.*/' constraints.txt > .venv-torch-2.10/constraints.txt" in done.stdout
    assert 'install --no-compile -c .venv-torch-2.10/constraints.txt -e ".[dev]"' in done.stdout
    assert ".venv/" not in done.stdout
    done = make("test-torch", folder=bare)
    assert done.returncode != 0
    assert "VERSION=2.10" in done.stderr


def test_make_refuses_another_python_in_one_line(bare: Path) -> None:
    old = bare / "old-python"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.1 && exit 0\nexit 1\n')
    old.chmod(0o755)
    done = make("test", "PYTHON=./old-python", folder=bare)
    assert done.returncode != 0
    (line,) = [line for line in done.stderr.splitlines() if "needs Python 3.11, 3.12 or 3.13" in line]
    assert "Python 3.9.1" in line
    assert not (bare / ".venv").exists()


@pytest.mark.deep
def test_make_compare_writes_the_page(tmp_path: Path) -> None:
    # The environment is the one these tests run in, taken as it is (-o): no test may rebuild what it stands on.
    given = ["-o", ".venv/.made", "-o", ".venv/.installed", f"BIN={Path(sys.executable).parent}"]
    few = f"--out {tmp_path}/out --guides mean-field --seeds 1 --steps 20 --samples 20 --no-compile --quiet"
    done = make("compare", *given, f"ARGS={few}", folder=ROOT)
    assert done.returncode == 0, done.stderr
    assert "mean-field" in done.stdout
    assert (tmp_path / "out" / "report.html").read_text("utf-8").startswith("<!doctype html>")
