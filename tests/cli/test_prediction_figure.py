"""The pictures of ``predict``: of rows with targets, of rows without, and what cannot be drawn."""

from pathlib import Path
from typing import Any

import pytest

from pyro_dropout.cli import predict
from tests.cli.command import run, succeeded, written


@pytest.mark.parametrize("name", [pytest.param("houses", marks=pytest.mark.deep), "trees"])
def test_the_picture_is_of_the_rows_in_the_file(
    fitted: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(predict, "_save", lambda figure, path: figures.append(figure))
    lines = (fitted / f"{name}.csv").read_text("utf-8").splitlines()
    lines[1] = "99999," + lines[1].partition(",")[2]  # beyond the training range
    target = {"houses": "price", "trees": "kind"}[name]
    without = [lines[0].replace(target, "other"), *lines[1:]]
    for which, text in (("with", lines), ("without", without)):
        new = written(tmp_path, "\n".join(text), f"{which}.csv")
        asked = ["predict", fitted / name, new, "--out", tmp_path / "p.csv", "--quiet"]
        done = succeeded(*asked, "--plot", tmp_path / "p.png", "--explain", tmp_path / "e.png")
        assert "predictions depend most on " in done.stdout
    compared, chart, importance, _ = figures
    assert "1 more left out: a number outside its training range" in compared._suptitle.get_text()
    assert f"{len(lines) - 2} rows" in compared.axes[0].get_title()
    assert chart._suptitle.get_text() == importance._suptitle.get_text()  # without targets, what matters is drawn
    assert f"{len(lines) - 2} rows within the training range, each column shuffled 3" in chart._suptitle.get_text()


def test_bad_wishes_are_refused_and_nothing_is_written(fitted: Path, tmp_path: Path) -> None:
    asked = ["predict", fitted / "houses", fitted / "houses.csv", "--out", tmp_path / "p.csv"]
    for wish, said in (
        (["--plot", tmp_path / "p.txt"], "must end in .png, .pdf or .svg"),
        (["--plot", tmp_path / "no" / "p.png"], "there is no folder"),
        (["--plot", tmp_path / "p.png", "--explain", tmp_path / "p.png"], "is also the --plot file"),
        (["--quantiles", "0.1,x"], "write numbers with points"),
        (["--level", 1], "level must"),
    ):
        done = run(*asked, *wish)
        assert done.exit_code == 2
        assert said in " ".join(done.stderr.split())
        assert not list(tmp_path.iterdir())
