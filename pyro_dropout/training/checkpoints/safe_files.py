"""Files and folders that are written whole, by one process at a time, and read only if they are what they seem.

A file is written beside its target, flushed to disk and renamed. A folder is held by a lock on the file ``.lock`` in
it, which the operating system releases when its process ends, however it ends. Before anything is opened, it must be a
regular file with a printable name: a pipe would be waited for, and a device such as ``/dev/zero`` read for ever.
"""

import contextlib
import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from pyro_dropout.errors import PyroDropoutError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
MAKE_ROOM = "Free some space, or save to another disk"
LOCK = ".lock"
_PATIENCE = 0.1  # seconds: the last process may be about to remove its lock
_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
_KINDS |= dict.fromkeys((stat.S_IFCHR, stat.S_IFBLK), "a device")


# --- writing ----------------------------------------------------------------------------------------------------------


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


@contextlib.contextmanager
def claimed(folder: Path, *, make: bool = False) -> Iterator[None]:
    """Hold a folder exclusively; raise if another process holds it.

    With ``make`` it is created with its parents, and those that are empty at the end are removed again.
    """
    check_name(folder)
    if folder.exists() and not folder.is_dir():
        raise PyroDropoutError(f"{str(folder)!r} is a file; a folder is needed.")
    check_no_links(folder, LOCK)
    made = [each for each in (folder.absolute(), *folder.absolute().parents) if make and not each.exists()]
    lock = FileLock(folder / LOCK, timeout=_PATIENCE)
    try:
        try:
            if make:
                folder.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        except Timeout:
            raise PyroDropoutError(
                f"{str(folder)!r} is in use: another process is writing to it. Wait until it ends, or use another"
                " folder."
            ) from None
        except OSError as cause:
            what = "written" if folder.is_dir() else "created"
            raise PyroDropoutError(f"{str(folder)!r} cannot be {what}: {cause.strerror}.") from None
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # Windows removes no open file
                (folder / LOCK).unlink(missing_ok=True)
            lock.release()
    finally:
        for each in made:
            with contextlib.suppress(OSError):  # no longer empty
                each.rmdir()


# --- before reading ---------------------------------------------------------------------------------------------------


def check_regular(path: str | Path, advice: str, missing: str = "") -> None:
    """Raise unless a path leads to a regular file, with advice, or with what to say if there is none."""
    check_name(path)
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise PyroDropoutError(missing or f"there is no file {str(path)!r}.") from None
    if not stat.S_ISREG(mode):
        raise PyroDropoutError(f"{str(path)!r} is {_KINDS.get(stat.S_IFMT(mode), 'not a file')}; {advice}")


def check_name(path: str | Path) -> None:
    """Raise unless a path can be opened and written into a report: UTF-8, and no NUL."""
    try:
        valid = b"\0" not in str(path).encode()
    except UnicodeEncodeError:
        valid = False
    if not valid:
        raise PyroDropoutError(f"{str(path)!a} is not a path in UTF-8; rename the file or the folder.")


def check_no_links(folder: Path, *names: str) -> None:
    """Raise if one of these files or folders in ``folder``, or anything below them, is a symbolic link."""
    for path in (folder / name for name in names):
        for each in (path, *(path.rglob("*") if path.is_dir() and not path.is_symlink() else ())):
            if each.is_symlink():
                raise PyroDropoutError(
                    f"{str(each)!r} is a symbolic link, through which files elsewhere would be read or overwritten."
                    " Put what it leads to in its place."
                )
