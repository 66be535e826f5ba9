"""Checks of a path before it is opened: a regular file with a printable name, and no symbolic link in a folder of ours.

A pipe would be waited for, and a device such as ``/dev/zero`` would be read for ever.
"""

import os
import stat
from pathlib import Path

from pyro_dropout.errors import PyroDropoutError

_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
_KINDS |= dict.fromkeys((stat.S_IFCHR, stat.S_IFBLK), "a device")


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
