"""An exclusive claim to a folder, so that two processes never write their results into one.

The claim is a lock on the file ``.lock`` in the folder (``flock``; on Windows, ``msvcrt.locking``). The operating
system releases it when its process ends, however it ends.
"""

import contextlib
import errno
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.training.checkpoints.regular_file import check_name, check_no_links

LOCK = ".lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # of some network file systems


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
    try:
        try:
            handle = _lock(folder, make)
        except OSError as cause:
            what = "written" if folder.is_dir() else "created"
            raise PyroDropoutError(f"{str(folder)!r} cannot be {what}: {cause.strerror}.") from None
        try:
            yield
        finally:
            if sys.platform == "win32":  # which removes no open file
                os.close(handle)
            with contextlib.suppress(OSError):
                (folder / LOCK).unlink(missing_ok=True)
            if sys.platform != "win32":
                os.close(handle)
    finally:
        for each in made:
            with contextlib.suppress(OSError):  # no longer empty
                each.rmdir()


def _lock(folder: Path, make: bool) -> int:
    """Return the open and locked file."""
    while True:
        if make:
            folder.mkdir(parents=True, exist_ok=True)
        try:
            handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:
            if not make:
                raise
            continue  # the folder was removed by the process that had made it
        try:
            try:
                _try(handle)
            except OSError as cause:
                if cause.errno not in _NO_LOCKS:
                    raise PyroDropoutError(
                        f"{str(folder)!r} is in use: another process is writing to it. Wait until it ends, or use"
                        " another folder."
                    ) from None
                told = f"{folder} is on a file system without locks: make sure that no other process writes to it."
                warnings.warn(told, stacklevel=4)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(handle), os.stat(folder / LOCK)):
                    return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # it was removed by its owner before we got the lock


if sys.platform == "win32":
    import msvcrt

    def _try(handle: int) -> None:
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)

else:
    import fcntl

    def _try(handle: int) -> None:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
