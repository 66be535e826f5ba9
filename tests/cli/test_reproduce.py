"""The worked scripts by name: where they are found, and how options reach them."""

from pathlib import Path

import pytest

from pyro_dropout.cli import repository
from tests.cli.command import run

SCRIPT = '''"""How often does it run?

More of this.
"""


def main(argv=None):
    print("ran with", argv)
'''


def test_the_scripts_beside_the_package_are_listed() -> None:
    lines = dict(line.split(maxsplit=1) for line in run("reproduce").stdout.splitlines())
    assert set(lines) == {path.stem for path in (Path(__file__).parents[2] / "models").glob("*.py")}
    assert lines["bnn"].startswith("A Bayesian neural network written out by hand")


def test_without_a_repository_the_working_directory_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repository, "__file__", str(tmp_path / "site-packages" / "pyro_dropout" / "cli" / "x.py"))
    monkeypatch.chdir(tmp_path)
    assert "are not installed with the package: they are in the folder 'models'" in run("reproduce").stderr
    (tmp_path / "models" / "experiments").mkdir(parents=True)
    (tmp_path / "models" / "experiments" / "experiment.py").touch()
    (tmp_path / "models" / "once.py").write_text(SCRIPT)
    monkeypatch.setattr("sys.path", [])  # restored afterwards
    assert run("reproduce").stdout == "once  How often does it run?\n"
    assert run("reproduce", "once", "--quick", "--seed", "3").stdout == "ran with ['--quick', '--seed', '3']\n"
    assert "unknown experiment 'twice'; choose from once" in run("reproduce", "twice").stderr
