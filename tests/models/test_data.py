"""The experiments' data: what loaders read, and downloads that leave nothing half-made. No network is touched."""

import gzip
import hashlib
import io
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from experiments import download as module
from experiments.collection import UCI_NAMES, VARIABLE, co2_paper, mnist, solar, uci
from experiments.download import Item, download, manifest

import pyro_dropout as pd


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
    write_series(tmp_path / "co2.csv", (months - 135.5) / 78.5, np.sin(months))
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
    assert months.test_x[0] == pytest.approx((272 - 135.5) / 78.5, abs=1e-6)
    assert months.test_x[-1] == pytest.approx(3.72, abs=0.01)


TEXT = b"1 2 3\n" * 1000
LABELS = b"\0\0\x08\x01\0\0\0\x02\x03\x04"
ITEMS = [
    Item("uci/yacht/data.txt", "https://example.org/data.txt", hashlib.sha256(TEXT).hexdigest()),
    Item("mnist/labels.gz", "https://example.org/labels.gz", hashlib.sha256(LABELS).hexdigest()),
]


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes | Exception]:
    """A made source: what each address answers; what was asked for is under the key 'asked'."""
    answers: dict[str, bytes | Exception] = {
        ITEMS[0].url: TEXT,
        ITEMS[1].url: gzip.compress(LABELS),
        "asked": b"",
    }

    def opened(url: str) -> io.BytesIO:
        answers["asked"] += url.encode() + b" "  # type: ignore[operator]
        answer = answers[url]
        if isinstance(answer, Exception):
            raise answer
        return io.BytesIO(answer)

    monkeypatch.setattr(module, "_open", opened)
    monkeypatch.setattr(module, "manifest", lambda names: ITEMS)
    return answers


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_files_are_fetched_once(tmp_path: Path, source: dict[str, bytes | Exception]) -> None:
    folder = tmp_path / "new" / "data"
    new = download(folder, progress=False)
    assert new == [folder / item.file for item in ITEMS]
    assert files(folder) == ["mnist/labels.gz", "uci/yacht/data.txt"]
    assert (folder / "uci/yacht/data.txt").read_bytes() == TEXT
    source["asked"] = b""
    assert download(folder, progress=False) == []
    assert source["asked"] == b""
    # Packed in another way it is still the same file.
    (folder / "mnist/labels.gz").write_bytes(gzip.compress(LABELS, 1, mtime=5))
    assert download(folder, progress=False) == []


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: item.file)
@pytest.mark.parametrize("change", [lambda b: b[:-1], lambda b: b + b"x", lambda b: b""], ids=["short", "long", "none"])
def test_another_content_is_refused(
    tmp_path: Path, source: dict[str, bytes | Exception], item: Item, change: Callable[[bytes], bytes]
) -> None:
    plain = change(LABELS if item.file.endswith(".gz") else TEXT)
    source[item.url] = gzip.compress(plain) if item.file.endswith(".gz") else plain
    with pytest.raises(pd.errors.PyroDropoutError) as mistake:
        download(tmp_path, progress=False)
    said = str(mistake.value)
    assert set(re.findall(r"[0-9a-f]{64}", said)) == {item.sha256, hashlib.sha256(plain).hexdigest()}
    assert item.url in said
    assert item.file not in files(tmp_path)
    assert [name for name in files(tmp_path) if "/." in name] == []  # no temporary file is left


def test_a_fault_of_the_network_is_one_sentence(tmp_path: Path, source: dict[str, bytes | Exception]) -> None:
    source[ITEMS[0].url] = TimeoutError("timed out")
    with pytest.raises(
        pd.errors.PyroDropoutError, match=r"https://example.org/data.txt could not be downloaded: .*run"
    ):
        download(tmp_path, progress=False)
    assert files(tmp_path) == []


def test_the_manifest_is_whole() -> None:
    items = manifest()
    assert len({item.file for item in items}) == len(items)
    assert all(re.fullmatch(r"[0-9a-f]{64}", item.sha256) for item in items)
    assert not any(".." in item.file or item.file.startswith("/") for item in items)
    for name, folder in UCI_NAMES.items():
        own = {item.file.removeprefix(f"uci/{folder}/") for item in manifest([name])}
        splits = 5 if name == "protein" else 20
        wanted = {f"index_{part}_{k}.txt" for part in ("train", "test") for k in range(splits)}
        assert own == wanted | {"data.txt", "index_features.txt", "index_target.txt"}
    for url in ("http://example.org/a", "file:///etc/hosts"):
        with pytest.raises(pd.errors.PyroDropoutError, match="only https"):
            module._open(url)
    with pytest.raises(pd.errors.PyroDropoutError, match="HDF5 only"):
        manifest(["co2"])
