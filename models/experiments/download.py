"""Download the experiments' data into a folder; each file is checked against a known SHA-256."""

import csv
import gzip
import hashlib
import http.client
import os
import tempfile
import zlib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from tqdm.auto import tqdm

from experiments.collection import PAPER_SERIES, UCI_NAMES
from pyro_dropout.errors import PyroDropoutError

DOWNLOADS = (*UCI_NAMES, "mnist")
NOT_FETCHED = f"co2 and solar are not fetched: the paper's series are published as HDF5 only ({PAPER_SERIES})."
_CHUNK = 1 << 20
_TIMEOUT = 60.0  # seconds without a byte


class Item(NamedTuple):
    """One file: its path, its URL and its SHA-256."""

    file: str
    url: str
    sha256: str


def manifest(names: Sequence[str] | None = None) -> list[Item]:
    """Return the files of the data sets in ``names``; of all data sets by default.

    Example:
        >>> from experiments.download import manifest
        >>> manifest(["yacht"])[0].file, len(manifest(["yacht"]))
        ('uci/yacht/data.txt', 43)
    """
    wanted = DOWNLOADS if names is None else tuple(names)
    unknown = [name for name in wanted if name not in DOWNLOADS]
    if unknown:
        why = f" {NOT_FETCHED}" if {"co2", "solar"} & set(unknown) else ""
        raise PyroDropoutError(f"{unknown[0]!r} cannot be downloaded; choose from {', '.join(DOWNLOADS)}.{why}")
    folders = tuple("mnist/" if name == "mnist" else f"uci/{UCI_NAMES[name]}/" for name in wanted)
    text = resources.files("pyro_dropout.datasets").joinpath("data", "manifest.csv").read_text("utf-8")
    rows = list(csv.reader(line for line in text.splitlines() if not line.startswith("#")))[1:]
    return [Item(*row) for row in rows if row[0].startswith(folders)]


def download(folder: str | Path, names: Sequence[str] | None = None, progress: bool = True) -> list[Path]:
    """Download the files that are not in ``folder`` yet, and return the paths of the new files.

    A file is written under a temporary name and renamed when its SHA-256 is right, so files in the folder are always
    complete. Existing files are checked in the same way: correct ones are kept, wrong ones are downloaded again.

    Args:
        folder: where to put the files; created if it does not exist.
        names: data sets from ``DOWNLOADS``; all by default.
        progress: show a progress bar.
    """
    items = manifest(names)
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    new = []
    for item in tqdm(items, desc="data", unit="file", disable=not progress):
        path = root / item.file
        if path.is_file() and _sha256(path) == item.sha256:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        _fetch(item, path)
        new.append(path)
    return new


def _fetch(item: Item, path: Path) -> None:
    """Stream a file to a temporary name next to ``path``, check it and rename it."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix="-" + path.name)
    temporary = Path(name)
    try:
        try:
            with os.fdopen(handle, "wb") as file, _open(item.url) as answer:
                while chunk := answer.read(_CHUNK):
                    file.write(chunk)
        except (URLError, http.client.HTTPException, TimeoutError, ConnectionError) as cause:
            raise PyroDropoutError(
                f"{item.url} could not be downloaded: {cause}. Check the connection and run the command again;"
                " existing files are kept."
            ) from None
        found = _sha256(temporary)
        if found != item.sha256:
            raise PyroDropoutError(
                f"{item.url} does not have the expected content: its SHA-256 is {found} and should be {item.sha256}."
                " It was discarded; it may have changed at the source."
            )
        temporary.chmod(0o644)  # temporary files are readable only by their owner
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _sha256(path: Path) -> str:
    """Return the hash of a file's contents, of a .gz file's unpacked; "that of no gzip file" if it is none."""
    digest = hashlib.sha256()
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    except (gzip.BadGzipFile, EOFError, zlib.error):
        return "that of no gzip file"
    return digest.hexdigest()


# --- only over https --------------------------------------------------------------------------------------------------


def _encrypted(url: str) -> str:
    if urlsplit(url).scheme != "https":
        raise PyroDropoutError(f"{url} is not downloaded: only https is allowed.")
    return url


class _OverHttps(HTTPRedirectHandler):
    """Follows a redirect only to https."""

    def redirect_request(self, req: Request, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        return super().redirect_request(req, fp, code, msg, headers, _encrypted(newurl))


def _open(url: str) -> Any:
    request = Request(_encrypted(url), headers={"User-Agent": "pyro-dropout"})
    return build_opener(_OverHttps).open(request, timeout=_TIMEOUT)
