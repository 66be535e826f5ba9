"""A source in C, compiled to a library with the C++ compiler that torch's own would use."""

import ctypes
import functools
import os
import shlex
import shutil
import subprocess

from pyro_dropout.engines.engine import CannotError
from pyro_dropout.engines.kernel_folder import private_folder

# No flag changes a result: sums are vectorised where the source says so, and nowhere else.
FLAGS = (
    *("-x", "c", "-std=gnu11", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"),
    *("-fno-strict-aliasing", "-fopenmp-simd", "-w", "-shared", "-fPIC"),
)
_SECONDS = 60  # a compiler that takes longer has failed


@functools.cache
def compiler() -> tuple[str, ...]:
    """Return the compiler's command; empty if there is none."""
    given = shlex.split(os.environ.get("CXX", ""))
    if given:
        return tuple(given) if shutil.which(given[0]) else ()
    return next(((name,) for name in ("g++", "gcc", "clang++", "cc") if shutil.which(name)), ())


def compiled(text: str) -> ctypes.CDLL:
    """Return the library of a source; raise ``CannotError`` if it cannot be compiled."""
    if not compiler():
        raise CannotError("there is no C compiler")
    try:
        return _compiled(text, compiler())
    except (OSError, subprocess.SubprocessError) as cause:
        raise CannotError(f"the C compiler failed ({type(cause).__name__})") from cause


@functools.lru_cache(maxsize=64)
def _compiled(text: str, command: tuple[str, ...]) -> ctypes.CDLL:
    with private_folder() as folder:  # nobody else can exchange what is loaded; once loaded, it needs no file
        source, made = folder / "source.c", folder / "library.so"
        source.write_text(text)
        whole = [*command, *FLAGS, str(source), "-o", str(made), "-lm"]
        subprocess.run(whole, capture_output=True, timeout=_SECONDS, check=True)
        return ctypes.CDLL(str(made))
