"""The command line: what it writes, and what it says of mistakes."""

from pathlib import Path

import pytest
import torch

import pyro_dropout as pd
from pyro_dropout.faces.cli import main
from pyro_dropout.faces.datasets import read_table
from pyro_dropout.faces.standard_models import DEFAULT, GUIDES, kept, regression_model, wave_model

FEW = ["--seeds", "1", "--steps", "5", "--samples", "10", "--no-compile", "--quiet"]


def table(folder: Path, text: str) -> str:
    path = folder / "table.csv"
    path.write_text(text, "utf-8")
    return str(path)


def numbers(rows: int) -> str:
    values = torch.randn(rows, 3)
    return "a,b,c\n" + "\n".join(",".join(f"{v:.4f}" for v in row) for row in values)


def test_a_table_of_ones_own_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    data = table(tmp_path, numbers(40))
    assert main(["compare", data, "--target", "b", "--guides", "dropout", "mean-field", "--out", str(page), *FEW]) == 0
    said = capsys.readouterr().out
    assert "not scored" not in said
    (errors,) = [line.split()[1:] for line in said.splitlines() if line.startswith("RMSE")]
    assert all(0 < float(error) < 10 for error in errors)
    assert len(errors) == 2
    assert "The page: " in said
    assert "table.csv: 32 rows to train on and 8" in page.read_text("utf-8")


def test_the_series_that_comes_along() -> None:
    data = pd.co2()
    x, y = data.train
    assert abs(y.mean()) < 1e-3  # the trend is taken out
    assert not ((x > 1968) & (x < 1971)).any()
    assert ((data.test[0] > 1968) & (data.test[0] < 1984)).all()
    # its rhythm is a year: the months of one year look like those of the next
    january = [float(y[(x.squeeze() > k) & (x.squeeze() < k + 0.08)].mean()) for k in range(1959, 1967)]
    june = [float(y[(x.squeeze() > k + 0.42) & (x.squeeze() < k + 0.5)].mean()) for k in range(1959, 1967)]
    assert all(a < b for a, b in zip(january, june, strict=True))


@pytest.mark.parametrize("name", GUIDES)
def test_every_guide_fits_both_models(name: str) -> None:
    data = pd.co2()
    for model in (wave_model(data.train, width=5), regression_model(data.train, width=5)):
        guide = GUIDES[name](model)
        pd.fit(model, guide, *data.train, steps=2, compile=False, progress=False)
        assert torch.isfinite(pd.predict(model, guide, data.test[0], samples=3, shared=True).mean).all()
        assert kept(model)(next(iter(model.sites))) == 1.0  # the only input is never dropped


def test_the_default_guides_exist() -> None:
    assert set(DEFAULT) <= set(GUIDES)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (None, [], "there is no file"),
        ("", [], "at least two columns"),
        ("a;b\n1;2\n", [], "separated by commas; it begins with 'a;b'"),
        ("a,b\n1,x\n", [], "row 2, column 'b': 'x' is not a number"),
        ("a,b\n1\n", [], "row 2: 1 values for 2 columns"),
        ("a,b\n1,2\n", [], "1 rows; at least 10"),
        ("a,b\n" + "1,nan\n" * 12, [], "row 2: a value is missing"),
        ("a,b\n" + "1,2\n" * 12, ["--target", "z"], "no column 'z'; its columns are a, b"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, options: list[str], message: str
) -> None:
    data = str(tmp_path / "none.csv") if text is None else table(tmp_path, text)
    assert main(["compare", data, "--out", str(tmp_path / "page.html"), *options, *FEW]) == 2
    (said,) = capsys.readouterr().err.strip().splitlines()
    assert said.startswith("pyro-dropout: ")
    assert message in said
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize("wrong", [["--steps", "0"], ["--lr", "-1"], ["--guides", "laplace"], ["--seeds", "many"]])
def test_options_are_checked_before_anything_runs(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["compare", *wrong])
    assert stop.value.code == 2
    assert wrong[0] in capsys.readouterr().err


def test_a_folder_that_does_not_exist_is_found_out_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--out", "nowhere/page.html"]) == 2
    assert "--out does not exist" in capsys.readouterr().err
    assert main(["compare", "--out", "."]) == 2
    assert "is a folder" in capsys.readouterr().err


def test_the_split_is_the_same_every_time(tmp_path: Path) -> None:
    data = table(tmp_path, numbers(20))
    one, two = (read_table(data) for _ in range(2))
    assert torch.equal(one.test[0], two.test[0])
    assert not torch.equal(one.test[0], read_table(data, seed=1).test[0])
    with pytest.raises(pd.RangeError, match="held_back"):
        read_table(data, held_back=1.0)
