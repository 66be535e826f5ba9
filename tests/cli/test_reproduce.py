"""The worked scripts by name: where they are found, what counts as one, and how options reach them."""

from pathlib import Path

import pytest

import pyro_dropout as pd
from pyro_dropout.cli import scripts as module
from pyro_dropout.cli.scripts import about, reproduce, scripts

SCRIPT = '''"""How often does it run?

More of this.
"""
import pyro_dropout


def main(argv=None):
    print("ran with", argv)
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "once.py").write_text(SCRIPT)
    return tmp_path


def test_the_scripts_beside_the_package_are_found() -> None:
    found = scripts()
    assert set(found) == {path.stem for path in (Path(__file__).parents[2] / "models").glob("*.py")}
    assert {"bnn", "deep_gp", "in_between"} <= set(found)
    assert all(len(about(path)) > 20 for path in found.values())


def test_what_is_no_script_of_ours_is_left_out(folder: Path) -> None:
    (folder / "other.py").write_text("def main(argv=None):\n    raise SystemExit\n")  # does not use the package
    (folder / "part.py").write_text("import pyro_dropout\n")  # has no main
    (folder / "old.py").write_text("print 'python 2'\n")
    (folder / "bytes.py").write_bytes(b"\xff\xfe\x00")
    assert scripts([folder]) == {"once": folder / "once.py"}
    assert about(folder / "once.py") == "How often does it run?"


def test_the_first_folder_with_scripts_counts(folder: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert scripts([tmp_path / "none", empty, folder])["once"] == folder / "once.py"
    with pytest.raises(pd.PyroDropoutError, match="not installed with the package: they are in the folder 'models'"):
        scripts([tmp_path / "none", empty])


def test_without_a_repository_the_working_directory_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "once.py").write_text(SCRIPT)
    monkeypatch.setattr(module, "__file__", str(tmp_path / "site-packages" / "pyro_dropout" / "cli" / "scripts.py"))
    monkeypatch.chdir(tmp_path)
    reproduce("once", ["--quick", "--seed", "3"])
    assert capsys.readouterr().out == "ran with ['--quick', '--seed', '3']\n"
    with pytest.raises(pd.PyroDropoutError, match="unknown experiment 'twice'; choose from once"):
        reproduce("twice")
    with pytest.raises(pd.PyroDropoutError, match="unknown experiment"):
        reproduce("../models/once")
