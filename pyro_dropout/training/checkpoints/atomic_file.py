"""A file that is whole or not there: written beside its place, forced to the disk, and renamed."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """Yield a name beside ``path`` to write to; the file takes its own name only if nothing goes wrong.

    Until then, and after any error, what was there before stays as it was. A link stays a link: the file that it leads
    to is replaced.

    Args:
        path: the file; its folder must exist.

    Example:
        >>> import pathlib, tempfile
        >>> from pyro_dropout.training.checkpoints.atomic_file import whole_file
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> with whole_file(folder / "words.txt") as beside:
        ...     _ = beside.write_text("all of it")
        >>> [each.name for each in folder.iterdir()]
        ['words.txt']
    """
    path = Path(os.path.realpath(path))
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix="-" + path.name)
    os.close(handle)
    beside = Path(name)
    try:
        yield beside
        beside.chmod(_mode(path))  # a temporary file is its owner's alone
        _force(beside)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # some file systems have no folders to force
        _force(path.parent)


def _mode(path: Path) -> int:
    """Return the permissions of a file that is replaced, or those that a new one has here."""
    if path.exists():
        return path.stat().st_mode & 0o777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def _force(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
