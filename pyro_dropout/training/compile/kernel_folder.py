"""Where compiled kernels are kept between processes: a folder for each program, that only its owner can write to.

It lies in torch's own folder for compiled code. What is read runs as code, so it must belong to the user, be closed to
others, and have the digest that was noted when it was written; anything else is as good as absent.
"""

import contextlib
import getpass
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_MOST = 64  # programs; those that were written first give way
_PROGRAM = "program.json"
_OFF = {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1", "TORCHINDUCTOR_FX_GRAPH_CACHE": "0"}


def place() -> Path | None:
    """Return the folder for all programs; None where nothing is to be kept.

    Example:
        >>> from pyro_dropout.training.compile.kernel_folder import place
        >>> place() is None or place().name
        'pyro_dropout'
    """
    off = any(os.environ.get(name) == value for name, value in _OFF.items())
    config: Any = sys.modules.get("torch._inductor.config")
    off = off or bool(config is not None and (config.force_disable_caches or not config.fx_graph_cache))
    if off or not hasattr(os, "geteuid"):
        return None
    given = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if given:
        return Path(given) / "pyro_dropout"
    try:
        return Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}" / "pyro_dropout"
    except (KeyError, OSError):  # a user without a name
        return None


def read(key: str) -> tuple[dict[str, Any], dict[str, Path]] | None:
    """Return what was kept under a key: facts, and libraries by their names; None if it is absent or damaged."""
    folder = place()
    if folder is None or not _own(folder) or not _own(folder / key):
        return None
    try:
        kept = json.loads(_bytes(folder / key / _PROGRAM))
        if kept["digest"] != _digest(json.dumps(kept["facts"]).encode()):
            return None
        libraries = {name: folder / key / name for name in kept["libraries"]}
        if any(_digest(_bytes(path)) != kept["libraries"][name] for name, path in libraries.items()):
            return None
        return kept["facts"], libraries
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def write(key: str, facts: Mapping[str, Any], libraries: Mapping[str, Path]) -> None:
    """Keep facts and copies of libraries under a key; nothing happens where that is not possible."""
    folder = place()
    if folder is None:
        return
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _own(folder):
            return
        made = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=folder))
        try:
            for name, path in libraries.items():
                (made / name).write_bytes(path.read_bytes())
                (made / name).chmod(0o600)
            digests = {name: _digest((made / name).read_bytes()) for name in libraries}
            whole = {"facts": facts, "digest": _digest(json.dumps(facts).encode()), "libraries": digests}
            (made / _PROGRAM).write_text(json.dumps(whole))
            (made / _PROGRAM).chmod(0o600)
            if (folder / key).exists():  # damaged, or written by another process meanwhile
                shutil.rmtree(folder / key, ignore_errors=True)
            made.rename(folder / key)
        finally:
            shutil.rmtree(made, ignore_errors=True)
        _prune(folder)


def _prune(folder: Path) -> None:
    found = sorted((path for path in folder.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime)
    for path in found[:-_MOST]:
        shutil.rmtree(path, ignore_errors=True)


def _own(path: Path) -> bool:
    """Whether a file or folder, and no link, belongs to this user, and others cannot write to it."""
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return found.st_uid == os.geteuid() and not found.st_mode & 0o022 and not path.is_symlink()


def _bytes(path: Path) -> bytes:
    if not _own(path):
        raise OSError(f"{path} belongs to somebody else")
    return path.read_bytes()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
