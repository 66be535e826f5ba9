"""The experiments' data: what the loaders return with and without a folder, and what they say of a broken one."""

import gzip
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from experiments.collection import VARIABLE, co2_paper, mnist, solar, uci

import pyro_dropout as pd
from pyro_dropout.datasets import bundled


@pytest.fixture
def none(monkeypatch: pytest.MonkeyPatch) -> None:
    """No data folder, as on a fresh machine."""
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small folder of the real layout: one UCI set of 6 rows with 2 splits, and 3 + 2 images."""
    yacht = tmp_path / "uci" / "yacht"
    yacht.mkdir(parents=True)
    (yacht / "data.txt").write_text("".join(f"{k} {10 * k}\t {100 * k}.5\n" for k in range(6)) + "\n")
    (yacht / "index_features.txt").write_text("0\n2\n")
    (yacht / "index_target.txt").write_text("1\n")
    for split, test in enumerate((0, 5)):
        rows = [k for k in (3, 1, 4, 0, 5, 2) if k != test]
        (yacht / f"index_train_{split}.txt").write_text("\n".join(map(str, rows)) + "\n")
        (yacht / f"index_test_{split}.txt").write_text(f"{test}\n")
    for part, number in (("train", 3), ("t10k", 2)):
        write_images(tmp_path / "mnist", part, number)
    months = np.arange(272)
    write_series(tmp_path / "co2.csv", 0.01 * months - 1.36, np.sin(months))
    write_series(tmp_path / "solar_train.csv", np.array([0.0, 1, 4, 5, 8, 9]), np.arange(6.0))
    write_series(tmp_path / "solar_gaps.csv", np.array([2.0, 3, 6, 7]), np.arange(4.0))
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    return tmp_path


def write_series(path: Path, x: np.ndarray, y: np.ndarray) -> None:
    path.write_text("x,y\n" + "".join(f"{a:.9f},{b:.9f}\n" for a, b in zip(x, y, strict=True)))


def write_images(where: Path, part: str, number: int) -> None:
    where.mkdir(exist_ok=True)
    pixels = (np.arange(number * 784) % 256).astype(np.uint8).tobytes()
    head = b"\0\0\x08\x03" + b"".join(size.to_bytes(4, "big") for size in (number, 28, 28))
    (where / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(head + pixels))
    labels = b"\0\0\x08\x01" + number.to_bytes(4, "big") + bytes(range(7, 7 + number))
    (where / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))


# --- without a folder -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("none")
def test_the_bundled_months_are_standardised_and_go_on() -> None:
    data = co2_paper()
    assert data.source == "bundled"
    assert data.x.shape == data.y.shape == (272, 1)
    assert data.test_x.shape == data.test_y.shape == (156, 1)
    for part in (data.x, data.y):
        assert abs(part.mean()) < 1e-5
        assert part.std(correction=0) == pytest.approx(1.0, abs=1e-5)
    assert abs(float((data.x * data.y).mean())) < 1e-5  # the trend is out
    step = 2 * math.sqrt(3 / (272**2 - 1))  # of 272 equally spaced numbers with variance 1
    assert torch.cat([data.x, data.test_x]).diff(dim=0).flatten() == pytest.approx(step, abs=1e-5)
    assert 3.72 - step < data.test_x[-1] <= 3.72
    # The year's rhythm: twelve months later is alike, six months later is opposite. The months after the end have
    # drifted off the old trend (emissions grew), so they are compared with their own running mean.
    y = torch.cat([data.y, data.test_y]).flatten()[-200:]
    wave = y - torch.nn.functional.avg_pool1d(y.expand(1, 1, -1), 13, 1, 6, count_include_pad=False)[0, 0]
    wave = wave[6:-6]
    assert torch.corrcoef(torch.stack([wave[:-12], wave[12:]]))[0, 1] > 0.95
    assert torch.corrcoef(torch.stack([wave[:-6], wave[6:]]))[0, 1] < -0.5


@pytest.mark.usefixtures("none")
def test_the_bundled_sunspots_have_five_gaps() -> None:
    data = solar()
    assert data.source == "bundled"
    assert len(data.x) + len(data.test_x) == 309
    everything = torch.cat([data.y, data.test_y])
    assert abs(everything.mean()) < 1e-5
    assert everything.std(correction=0) == pytest.approx(1.0, abs=1e-5)
    inside = torch.stack([(data.test_x >= lo - 1e-5) & (data.test_x <= hi + 1e-5) for lo, hi in data.gaps])
    assert inside.sum(1).flatten().tolist() == [15] * 5  # every held-out year is in one gap, fifteen in each
    assert not any(((data.x > lo) & (data.x < hi)).any() for lo, hi in data.gaps)
    assert data.x.min() < data.gaps[0][0]
    assert data.x.max() > data.gaps[-1][1]
    # Known maxima of the solar cycle: 1957 is the highest of all, 1778 the highest of its century.
    order = torch.cat([data.x, data.test_x]).flatten().argsort()
    assert 1700 + int(everything.flatten()[order].argmax()) == 1957
    assert 1700 + int(everything.flatten()[order][:100].argmax()) == 1778


@pytest.mark.usefixtures("none")
def test_the_made_table_is_its_formula_plus_noise_that_grows() -> None:
    data = uci("boston")
    assert data.source == "made"
    assert data.x.shape == (400, 5)
    a, b, c, d, _ = data.x.double().T
    rest = data.y.flatten() - (10 + 4 * torch.sin(torch.pi * a) + 3 * b * c + 2 * d**2)
    scaled = rest / (0.3 + 0.4 * a.abs())
    assert abs(scaled.mean()) < 0.2
    assert 0.85 < scaled.std() < 1.15  # 400 standard normals: the deviation is known to 1/√800
    assert rest[a.abs() > 0.7].std() > 1.2 * rest[a.abs() < 0.3].std()
    assert len(data.train_rows) == len(data.test_rows) == 20
    for train, test in zip(data.train_rows, data.test_rows, strict=True):
        assert (len(train), len(test)) == (360, 40)
        assert torch.cat([train, test]).sort().values.equal(torch.arange(400))
    assert len({tuple(rows.tolist()) for rows in data.test_rows}) == 20
    assert torch.equal(uci("boston").y, data.y)


@pytest.mark.usefixtures("none")
def test_the_drawn_digits_can_be_told_apart() -> None:
    data = mnist()
    assert data.source == "made"
    assert data.x.shape == (2000, 1, 28, 28)
    assert data.test_x.shape == (500, 1, 28, 28)
    assert data.x.dtype == torch.float32
    assert data.x.min() >= 0
    assert data.x.max() <= 1
    assert torch.bincount(data.y).tolist() == [200] * 10
    assert torch.bincount(data.test_y).tolist() == [50] * 10
    assert not torch.equal(data.x[:500].sum((1, 2, 3)), data.test_x.sum((1, 2, 3)))
    # The nearest training image names the digit; chance is 10%, MNIST's 2,000 nearest neighbours reach about 91%.
    nearest = torch.cdist(data.test_x.flatten(1), data.x.flatten(1)).argmin(1)
    assert (data.y[nearest] == data.test_y).float().mean() > 0.9
    ink = data.x.mean((1, 2, 3))
    assert ink.min() > 0.05
    assert ink.max() < 0.4


# --- with a folder ----------------------------------------------------------------------------------------------------


def test_a_table_and_its_splits_are_read(folder: Path) -> None:
    data = uci("yacht")
    assert data.source == "the paper's"
    assert data.x.tolist() == [[k, 100 * k + 0.5] for k in range(6)]
    assert data.y.tolist() == [[10 * k] for k in range(6)]
    assert [rows.tolist() for rows in data.train_rows] == [[3, 1, 4, 5, 2], [3, 1, 4, 0, 2]]
    assert [rows.tolist() for rows in data.test_rows] == [[0], [5]]


def test_images_are_read_as_they_were_written(folder: Path) -> None:
    data = mnist()
    assert data.x.shape == (3, 1, 28, 28)
    assert data.test_x.shape == (2, 1, 28, 28)
    assert data.x.flatten().tolist() == pytest.approx([(k % 256) / 255 for k in range(3 * 784)])
    assert data.y.tolist() == [7, 8, 9]
    assert data.test_y.tolist() == [7, 8]


def test_series_are_read_and_the_gaps_are_found(folder: Path) -> None:
    data = solar()
    assert data.source == "the paper's"
    assert data.x.flatten().tolist() == [0, 1, 4, 5, 8, 9]
    assert data.gaps == [(2.0, 3.0), (6.0, 7.0)]
    months = co2_paper()
    assert months.y.flatten().tolist() == pytest.approx(np.sin(np.arange(272)).tolist(), abs=1e-6)
    assert months.test_x[0] == pytest.approx(0.01 * 272 - 1.36, abs=1e-6)
    assert months.test_x[-1] == pytest.approx(3.72, abs=0.01)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("uci/yacht/data.txt", None, "there is no file"),
        ("uci/yacht/data.txt", "1 2 3\n1 2\n", "garbled"),
        ("uci/yacht/data.txt", "1 2 x\n", "garbled"),
        ("uci/yacht/data.txt", "1 2 nan\n", "a value is missing or infinite"),
        ("uci/yacht/data.txt", "", "it is empty"),
        ("uci/yacht/index_features.txt", "0\n7\n", "from 0 to 2"),
        ("uci/yacht/index_test_1.txt", "6\n", "from 0 to 5"),
        ("uci/yacht/index_test_1.txt", "0.5\n", "whole numbers"),
        ("uci/yacht/index_test_1.txt", "5\n5\n", "different"),
        ("uci/yacht/index_test_1.txt", "4\n", "shares rows with index_train_1"),
        ("uci/yacht/index_test_1.txt", None, "there is no file"),
        ("mnist/t10k-labels-idx1-ubyte.gz", None, "there is no file"),
        ("mnist/t10k-labels-idx1-ubyte.gz", "not packed", "cannot be unpacked"),
        ("co2.csv", "x,y\n1,2\n", "1 months where 272 are expected"),
        ("co2.csv", None, "there is no file"),
        ("solar_gaps.csv", "x,y\n1,2,3\n", "3 columns where 2 are expected"),
    ],
)
def test_a_broken_folder_is_named_with_a_remedy(folder: Path, file: str, text: str | None, message: str) -> None:
    path = folder / file
    path.unlink() if text is None else path.write_text(text)
    load = {"u": lambda: uci("yacht"), "m": mnist, "c": co2_paper, "s": solar}[file[0]]
    with pytest.raises(pd.PyroDropoutError) as mistake:
        load()
    said = str(mistake.value)
    assert message in said
    assert str(path) in said
    assert ("HDF5" if file.endswith(".csv") else "pyro-dropout datasets --download FOLDER") in said
    assert "\n" not in said


def test_an_archive_that_ends_early_is_found_out(folder: Path) -> None:
    path = folder / "mnist" / "train-images-idx3-ubyte.gz"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(pd.PyroDropoutError, match="cannot be unpacked"):
        mnist()
    path.write_bytes(gzip.compress(gzip.decompress(whole)[:-1]))
    with pytest.raises(pd.PyroDropoutError, match="not an idx file"):
        mnist()
    shutil.copy(folder / "mnist" / "t10k-images-idx3-ubyte.gz", path)
    with pytest.raises(pd.PyroDropoutError, match="for 3 labels"):
        mnist()


def test_a_folder_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "/nowhere/at/all")
    for load in (co2_paper, solar, mnist, lambda: uci("wine")):
        with pytest.raises(pd.PyroDropoutError, match="not a folder"):
            load()
    monkeypatch.setenv(VARIABLE, "")
    assert co2_paper().source == "bundled"
    with pytest.raises(pd.PyroDropoutError, match="'iris'; choose from boston, concrete"):
        uci("iris")


# --- the paper's own data, where they are -----------------------------------------------------------------------------


def bundled_lines(name: str) -> list[str]:
    path = Path(bundled.__file__).parent / "data" / name
    return [line for line in path.read_text("utf-8").splitlines() if line[:1].isdigit()]
