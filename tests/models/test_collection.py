"""The experiments' data: what the loaders return with and without a folder, and what they say of a broken one."""

import gzip
from pathlib import Path

import numpy as np
import pytest
from experiments.collection import VARIABLE, co2_paper, mnist, solar, uci


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
    assert data.gaps == ((2.0, 3.0), (6.0, 7.0))
    months = co2_paper()
    assert months.y.flatten().tolist() == pytest.approx(np.sin(np.arange(272)).tolist(), abs=1e-6)
    assert months.test_x[0] == pytest.approx(0.01 * 272 - 1.36, abs=1e-6)
    assert months.test_x[-1] == pytest.approx(3.72, abs=0.01)
