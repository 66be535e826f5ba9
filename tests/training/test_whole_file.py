"""A file is whole or not there, wherever its name leads."""

import errno
from pathlib import Path

import pytest

from pyro_dropout.training.checkpoints.atomic_file import whole_file


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    target, link = tmp_path / "far" / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    with whole_file(link) as beside:
        beside.write_text("new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert sorted(path.name for path in (*tmp_path.iterdir(), *target.parent.iterdir())) == ["far", "link", "target"]


def test_a_link_to_nothing_yet(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("later")
    with whole_file(link) as beside:
        beside.write_text("new")
    assert link.is_symlink()
    assert (tmp_path / "later").read_text() == "new"


@pytest.mark.parametrize("named", [False, True])
def test_an_error_of_the_disk_names_the_file(tmp_path: Path, named: bool) -> None:
    """A write that fails names no file, and an opening one the temporary file."""
    path = tmp_path / "answers.csv"
    with pytest.raises(OSError, match=f"No space left on device: '{path}'"), whole_file(path) as beside:
        raise OSError(errno.ENOSPC, "No space left on device", *([str(beside)] if named else []))
    with pytest.raises(FileNotFoundError, match="other"), whole_file(path):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "other")
    assert list(tmp_path.iterdir()) == []
