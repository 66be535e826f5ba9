"""Where compilers write: torch's own in a folder that belongs to the user, ours in one that nobody else can change.

What is compiled runs as code. So nobody but this user and root may be able to change the folder or any folder above it,
or put another in its place; /tmp is such a folder, because its sticky bit lets nobody move what belongs to others.
"""

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pyro_dropout.engines.torch_internals import cache_folder
from pyro_dropout.errors import PyroDropoutError

_OPEN = stat.S_IWGRP | stat.S_IWOTH
_DEFAULT = "torchinductor_"  # starts the name of torch's own folder, unless another one is chosen


def check_compiler_folder() -> None:
    """Raise if another user has made the folder that torch's compiler reads code from."""
    folder = Path(cache_folder())
    if folder.name.startswith(_DEFAULT) and hasattr(os, "geteuid") and folder.stat().st_uid not in (0, os.geteuid()):
        raise PyroDropoutError(
            f"{folder}, where torch keeps compiled code, belongs to another user, who could run code as you. Set"
            " TORCHINDUCTOR_CACHE_DIR to a folder of your own."
        )


def trusted(path: Path) -> bool:
    """Whether nobody but this user and root can change a file or folder, or put another in its place."""
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
