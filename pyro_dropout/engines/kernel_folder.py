"""Where compiled kernels are kept between processes: a file for each program, in a folder that others cannot change.

What is kept runs as code. So nobody but this user and root may be able to change the folder or any folder above it,
or put another in its place; /tmp is such a folder, because its sticky bit lets nobody move what belongs to others.
Anywhere else nothing is kept and nothing is read. A file is read once, and those bytes are checked and loaded.
"""

import contextlib
import errno
import hashlib
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pyro_dropout.engines.torch_internals import cache_folder, caches_are_off
from pyro_dropout.errors import PyroDropoutError

_OPEN = stat.S_IWGRP | stat.S_IWOTH
_MOST = 64  # programs; those that were written first give way
_DEFAULT = "torchinductor_"  # starts the name of torch's own folder, unless another one is chosen
_FULL = os.strerror(errno.ENOSPC)
_OFF = {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1", "TORCHINDUCTOR_FX_GRAPH_CACHE": "0"}


def place() -> Path | None:
    """Return the folder for all programs; None where nothing is to be kept.

    Example:
        >>> from pyro_dropout.engines.kernel_folder import place
        >>> place() is None or place().name.startswith("pyro_dropout")
        True
    """
    off = any(os.environ.get(name) == value for name, value in _OFF.items())
    off = off or caches_are_off()
    if off or not hasattr(os, "geteuid"):
        return None
    given = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or _DEFAULT)  # which torch itself sets later
    own = given.name.startswith(_DEFAULT)
    folder = Path(tempfile.gettempdir(), f"pyro_dropout_{os.geteuid()}") if own else given / "pyro_dropout"
    return folder.resolve()


@contextlib.contextmanager
def compiler_folder() -> Iterator[None]:
    """Within this context torch's compiler uses its folder; raise if that is full, or another user has put it there."""
    folder = Path(cache_folder())
    if folder.name.startswith(_DEFAULT) and hasattr(os, "geteuid") and folder.stat().st_uid not in (0, os.geteuid()):
        raise PyroDropoutError(
            f"{folder}, where torch keeps compiled code, belongs to another user, who could run code as you. Set"
            " TORCHINDUCTOR_CACHE_DIR to a folder of your own."
        )
    try:
        yield
    except Exception as cause:
        inner = getattr(cause, "inner_exception", cause)
        full = _FULL if _FULL in str(cause) else ""  # as the C++ compiler says it
        said = inner.strerror if isinstance(inner, OSError) else full
        if not said:
            raise
        raise PyroDropoutError(
            f"torch's compiler cannot write to {folder} or {tempfile.gettempdir()}: {said}. Free some space, or set"
            " TORCHINDUCTOR_CACHE_DIR and TMPDIR to folders on another disk; or leave compile at 'auto'."
        ) from cause


def trusted(path: Path) -> bool:
    """Whether nobody but this user and root can change a file or folder, or put another in its place.

    Args:
        path: without links.
    """
    if not hasattr(os, "geteuid"):
        return True  # where temporary folders belong to one user
    try:
        it, *above = [os.lstat(each) for each in (path, *path.parents)]  # the mode of a link is open to all
    except OSError:
        return False
    me = os.geteuid()
    return (
        it.st_uid == me
        and not it.st_mode & _OPEN
        and all(each.st_uid in (0, me) and (not each.st_mode & _OPEN or each.st_mode & stat.S_ISVTX) for each in above)
    )


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """Within this context there is an empty folder that nobody else can change."""
    with tempfile.TemporaryDirectory(prefix="pyro_dropout-") as made:
        folder = Path(made).resolve()
        if not trusted(folder):
            raise PermissionError(f"others can change {folder.parent}")
        yield folder


def read(key: str) -> bytes | None:
    """Return the library that was kept under a key; None if it is absent or damaged."""
    folder = place()
    if folder is None or not trusted(folder / key):
        return None
    try:
        digest, _, code = (folder / key).read_bytes().partition(b"\n")
    except OSError:
        return None
    return code if digest == _digest(code) else None


def write(key: str, code: bytes) -> None:
    """Keep a library under a key; nothing happens where that is not possible."""
    folder = place()
    if folder is None:
        return
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not trusted(folder):
            return
        handle, made = tempfile.mkstemp(prefix=".unfinished-", dir=folder)
        try:
            with open(handle, "wb") as file:
                file.write(_digest(code) + b"\n" + code)
            os.replace(made, folder / key)
        finally:
            Path(made).unlink(missing_ok=True)
        for path in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime)[:-_MOST]:
            path.unlink()


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).hexdigest().encode()
