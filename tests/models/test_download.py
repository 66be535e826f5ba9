"""Downloads: what is kept, what is refused, and that nothing half-made is left behind. No network is touched."""

import gzip
import hashlib
import io
import re
from collections.abc import Callable
from pathlib import Path
from urllib.request import Request

import pytest
from experiments import download as module
from experiments.collection import UCI_NAMES
from experiments.download import Item, download, manifest

import pyro_dropout as pd

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
    assert (folder / "uci/yacht/data.txt").stat().st_mode & 0o777 == 0o644
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


def test_only_https() -> None:
    for url in ("http://example.org/a", "file:///etc/hosts", "ftp://example.org/a"):
        with pytest.raises(pd.errors.PyroDropoutError, match="only https"):
            module._open(url)
    follow = module._OverHttps().redirect_request
    request = Request("https://example.org/a")
    with pytest.raises(pd.errors.PyroDropoutError, match="only https"):
        follow(request, io.BytesIO(), 302, "Found", {}, "http://example.org/a")
    assert follow(request, io.BytesIO(), 302, "Found", {}, "https://example.org/b").full_url == "https://example.org/b"


def test_the_manifest_is_whole() -> None:
    items = manifest()
    assert len({item.file for item in items}) == len(items)
    assert all(item.url.startswith("https://") for item in items)
    assert all(item.url.rsplit("/", 1)[1] == item.file.rsplit("/", 1)[1] for item in items)
    assert all(re.fullmatch(r"[0-9a-f]{64}", item.sha256) for item in items)
    assert not any(".." in item.file or item.file.startswith("/") for item in items)
    for name, folder in UCI_NAMES.items():
        own = {item.file.removeprefix(f"uci/{folder}/") for item in manifest([name])}
        splits = 5 if name == "protein" else 20
        wanted = {f"index_{part}_{k}.txt" for part in ("train", "test") for k in range(splits)}
        assert own == wanted | {"data.txt", "index_features.txt", "index_target.txt"}
    assert len(manifest(["mnist"])) == 4
    with pytest.raises(pd.errors.PyroDropoutError, match="'iris' cannot be downloaded; choose from boston"):
        manifest(["iris"])
    with pytest.raises(pd.errors.PyroDropoutError, match="HDF5 only"):
        manifest(["co2"])
