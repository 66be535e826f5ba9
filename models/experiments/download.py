"""Download the experiments' data into a folder; each file is checked against a known SHA-256."""

import csv
import gzip
import hashlib
import http.client
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import URLError
from urllib.request import Request, urlopen

from tqdm.auto import tqdm

from experiments.collection import PAPER_SERIES, UCI_NAMES
from pyro_dropout.errors import PyroDropoutError

DOWNLOADS = (*UCI_NAMES, "mnist")
NOT_FETCHED = f"co2 and solar are not fetched: the paper's series are published as HDF5 only ({PAPER_SERIES})."
_TIMEOUT = 60.0  # seconds without a byte


class Item(NamedTuple):
    """One file: its path, its URL and its SHA-256."""

    file: str
    url: str
    sha256: str


def manifest(names: Sequence[str] | None = None) -> list[Item]:
    """Return the files of the data sets in ``names``; of all data sets by default."""
    wanted = DOWNLOADS if names is None else tuple(names)
    unknown = [name for name in wanted if name not in DOWNLOADS]
    if unknown:
        why = f" {NOT_FETCHED}" if {"co2", "solar"} & set(unknown) else ""
        raise PyroDropoutError(f"{unknown[0]!r} cannot be downloaded; choose from {', '.join(DOWNLOADS)}.{why}")
    folders = tuple("mnist/" if name == "mnist" else f"uci/{UCI_NAMES[name]}/" for name in wanted)
    text = Path(__file__).with_name("manifest.csv").read_text("utf-8")
    rows = list(csv.reader(line for line in text.splitlines() if not line.startswith("#")))[1:]
    return [Item(*row) for row in rows if row[0].startswith(folders)]


def download(folder: str | Path, names: Sequence[str] | None = None, progress: bool = True) -> list[Path]:
    """Download the files that are not in ``folder`` yet, and return the paths of the new files.

    A file is written under a temporary name and renamed when its SHA-256 is right, so files in the folder are always
    complete. Existing files are checked in the same way: correct ones are kept, wrong ones are downloaded again.
    """
    new = []
    for item in tqdm(manifest(names), desc="data", unit="file", disable=not progress):
        path = Path(folder) / item.file
        if path.is_file() and _sha256(item.file, path.read_bytes()) == item.sha256:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with _open(item.url) as answer:
                content = answer.read()
        except (URLError, http.client.HTTPException, TimeoutError, ConnectionError) as cause:
            raise PyroDropoutError(
                f"{item.url} could not be downloaded: {cause}. Check the connection and run the command again;"
                " existing files are kept."
            ) from None
        found = _sha256(item.file, content)
        if found != item.sha256:
            raise PyroDropoutError(
                f"{item.url} does not have the expected content: its SHA-256 is {found} and should be {item.sha256}."
                " It was discarded; it may have changed at the source."
            )
        temporary = path.with_name(f".{path.name}")
        temporary.write_bytes(content)
        temporary.replace(path)
        new.append(path)
    return new


def _sha256(name: str, content: bytes) -> str:
    """Return the hash of a file's content, of a .gz file's unpacked; "that of no gzip file" if it is none."""
    try:
        return hashlib.sha256(gzip.decompress(content) if name.endswith(".gz") else content).hexdigest()
    except (gzip.BadGzipFile, EOFError, zlib.error):
        return "that of no gzip file"


def _open(url: str) -> Any:
    if not url.startswith("https://"):
        raise PyroDropoutError(f"{url} is not downloaded: only https is allowed.")
    return urlopen(Request(url, headers={"User-Agent": "pyro-dropout"}), timeout=_TIMEOUT)
