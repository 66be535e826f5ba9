"""An exclusive claim to a folder, so that two processes never write their results into one.

The claim is a lock on the file ``.lock`` in the folder. The operating system releases it when its process ends, however
it ends.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.training.checkpoints.regular_file import check_name, check_no_links

LOCK = ".lock"


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
    lock = FileLock(folder / LOCK, timeout=0)
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
            with contextlib.suppress(OSError):  # Windows removes no open file, and filelock removes it there
                (folder / LOCK).unlink(missing_ok=True)
            lock.release()
    finally:
        for each in made:
            with contextlib.suppress(OSError):  # no longer empty
                each.rmdir()
