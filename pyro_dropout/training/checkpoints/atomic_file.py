"""Atomic file writes: a temporary file beside the target is flushed to disk and renamed."""

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
MAKE_ROOM = "Free some space, or save to another disk"


@contextlib.contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path`` to write to; it is renamed to ``path`` only if no error occurs.

    Until then, and after any error, an existing file stays as it was. A symbolic link stays a link: the file that it
    points to is replaced. An error of the disk names ``path``, not the temporary file.
    """
    path = Path(os.path.realpath(path))
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix="-" + path.name)
    os.close(handle)
    beside = Path(name)
    try:
        with naming(path, name, beside):
            yield beside
            if path.exists():
                mode = path.stat().st_mode & 0o777
            else:
                mask = os.umask(0)
                os.umask(mask)
                mode = 0o666 & ~mask
            beside.chmod(mode)  # only its owner can read a temporary file
            _force(beside)
            os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # some file systems cannot flush a folder
        _force(path.parent)


@contextlib.contextmanager
def naming(path: Path, *instead: str | Path) -> Iterator[None]:
    """Let errors of the disk name ``path`` where they name nothing, as a failed write does, or one of ``instead``."""
    try:
        yield
    except OSError as cause:
        if cause.errno is None or cause.filename not in (None, *instead):
            raise
        raise OSError(cause.errno, cause.strerror, str(path)) from None


def clear_unfinished(folder: Path, pattern: str) -> None:
    """Remove what ``whole_file`` left when it was killed; only for a folder that no other process writes to."""
    for left in folder.glob(f".????????-{pattern}"):
        left.unlink(missing_ok=True)


def _force(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
