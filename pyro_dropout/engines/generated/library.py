"""A source in C, compiled to a library with the C++ compiler that torch's own would use, and its functions."""

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from pyro_dropout.engines.kernel_folder import private_folder

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
        >>> from pyro_dropout.engines.generated.library import compiler
        >>> isinstance(compiler(), tuple)
        True
    """
    given = shlex.split(os.environ.get("CXX", ""))
    if given:
        return tuple(given) if shutil.which(given[0]) else ()
    return next(((name,) for name in ("g++", "gcc", "clang++", "cc") if shutil.which(name)), ())


def compiled(text: str) -> bytes | None:
    """Return the library of a source; None if it could not be compiled."""
    if not compiler():
        return None
    try:
        with private_folder() as folder:
            source, made = folder / "source.c", folder / "library.so"
            source.write_text(text)
            command = [*compiler(), *FLAGS, str(source), "-o", str(made), "-lm"]
            done = subprocess.run(command, capture_output=True, timeout=_SECONDS).returncode == 0
            return made.read_bytes() if done else None
    except (OSError, subprocess.SubprocessError):
        return None


def function_of(code: bytes, name: str, tensors: Sequence[Tensor]) -> Callable[[], None]:
    """Return a function of a library, bound to the tensors that it reads and writes."""
    function = getattr(_opened(code), name)
    pointers = (ctypes.c_void_p * len(tensors))(*(each.data_ptr() for each in tensors))

    def run(kept: Sequence[Tensor] = tensors) -> None:  # the tensors live as long as the function
        if function(pointers):
            raise IndexError("the number of a row is out of range")

    return run


@functools.cache
def _opened(code: bytes) -> ctypes.CDLL:
    """Return a library, loaded from a file that nobody else can change; once loaded, it needs no file."""
    with private_folder() as folder:
        path = folder / "library.so"
        path.write_bytes(code)
        return ctypes.CDLL(str(path))


def key_of(text: str) -> str:
    """Return the digest of all that the library of a source depends on."""
    about = text, compiler(), FLAGS, platform.machine(), _instructions()
    return hashlib.sha256(repr(about).encode()).hexdigest()


@functools.cache
def _instructions() -> str:
    """Return what decides which instructions a compiled program has."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = [platform.processor()]
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
