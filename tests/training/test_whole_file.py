"""A file is whole or not there, wherever its name leads."""

from pathlib import Path

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
