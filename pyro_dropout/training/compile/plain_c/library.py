"""A source in C, compiled to a library with the C++ compiler that torch's own would use, and its functions."""

import ctypes
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

LIBRARY = "0.so"  # its name among what is kept
# No flag changes a result: sums are vectorised where the source says so, and nowhere else.
FLAGS = (
    *("-x", "c", "-std=gnu11", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"),
    *("-fno-strict-aliasing", "-fopenmp-simd", "-w", "-shared", "-fPIC"),
)
_SECONDS = 60  # a compiler that takes longer has failed


@functools.cache
def compiler() -> tuple[str, ...]:
    """Return the compiler's command; empty if there is none.

    Example:
        >>> from pyro_dropout.training.compile.plain_c.library import compiler
        >>> isinstance(compiler(), tuple)
        True
    """
    given = shlex.split(os.environ.get("CXX", ""))
    if given:
        return tuple(given) if shutil.which(given[0]) else ()
    return next(((name,) for name in ("g++", "gcc", "clang++", "cc") if shutil.which(name)), ())


def identity() -> object:
    """Return what tells one compiler from another: where it is, its size and its date."""
    found = [shutil.which(each) for each in compiler()[:1]]
    real = [Path(each).resolve() for each in found if each]
    return compiler(), [(str(each), each.stat().st_size, each.stat().st_mtime_ns) for each in real], FLAGS


@contextmanager
def compiled(text: str) -> Iterator[Path | None]:
    """Within this context there is a library of a source; None if it could not be compiled."""
    with tempfile.TemporaryDirectory(prefix="pyro_dropout-") as folder:
        name = hashlib.sha256(text.encode()).hexdigest()  # a library that is loaded is known by its name
        source, made = Path(folder) / f"{name}.c", Path(folder) / f"{name}.so"
        source.write_text(text)
        command = [*compiler(), *FLAGS, str(source), "-o", str(made), "-lm"]
        try:
            done = bool(compiler()) and subprocess.run(command, capture_output=True, timeout=_SECONDS).returncode == 0
        except (OSError, subprocess.SubprocessError):
            done = False
        yield made if done else None


def bound(path: Path, segment: int, tensors: Sequence[Tensor]) -> Callable[[], None]:
    """Return a function of a library, bound to the tensors that it reads and writes."""
    function = getattr(_opened(path), f"segment{segment}")
    pointers = (ctypes.c_void_p * len(tensors))(*(each.data_ptr() for each in tensors))

    def run(kept: Sequence[Tensor] = tensors) -> None:  # the tensors live as long as the function
        if function(pointers):
            raise IndexError("the number of a row is out of range")

    return run


@functools.cache
def _opened(path: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(path))
