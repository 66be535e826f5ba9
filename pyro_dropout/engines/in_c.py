"""Steps of small networks on a CPU as loops of C, compiled within a second.

Such a program is kernels, small matrix products and factors, random draws, and other calls of torch on fixed memory. It
is run beside the operations that were recorded, at several points, and not used unless both agree.
"""

import ctypes
import functools
import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Sequence

import torch
from torch import Tensor, fx

from pyro_dropout.engines.agreement import agrees, written
from pyro_dropout.engines.c.source import Run, Source
from pyro_dropout.engines.engine import CannotError, Loop, Row, Step, Taken, copy_into
from pyro_dropout.engines.kernel_folder import private_folder
from pyro_dropout.engines.program import Program, apart_in_memory
from pyro_dropout.errors import warn_caller

# No flag changes a result: sums are vectorised where the source says so, and nowhere else.
FLAGS = (
    *("-x", "c", "-std=gnu11", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"),
    *("-fno-strict-aliasing", "-fopenmp-simd", "-w", "-shared", "-fPIC"),
    # Compilers leave half of the widest vectors unused, for processors that had to slow down for them.
    *["-mprefer-vector-width=512"] * (platform.machine() in ("x86_64", "AMD64")),
)
_SECONDS = 60  # a compiler that takes longer has failed


class InC:
    """Writes a whole step, with its optimiser, as C."""

    name = "C"

    def loop(self, step: Step) -> Loop:
        """Return what takes the steps."""
        if step.t.is_cuda:
            raise CannotError("the tensors are on a GPU")
        if not step.small:
            raise CannotError("it has too many parameters")
        if not apart_in_memory([*step.flat, *step.row], len(step.changed)):
            raise CannotError("two of its tensors share memory")
        return StepsInC(step)


class StepsInC(Loop):
    """Takes steps on the same tensors at every call: rows, and what the step reads besides, are copied there."""

    name = InC.name

    def __init__(self, step: Step) -> None:
        super().__init__(step)
        program, first = step.recorded, len(step.flat)
        self._outside = program.outside
        self._own = [each.clone() for each in (*step.row, *program.outside())]
        self._run = in_c(program, [*step.flat, *self._own], len(step.changed))
        self._written = [k - first for k in written(program.graph) if first <= k < first + len(step.row)]
        usual = len(step.row) < 2 and all(each.is_contiguous() for each in step.row)
        self._most = step.chain if usual and self._run.alone and not self._written and not program.lifted else 0

    def one(self, row: Row) -> Taken:
        """Take a step."""
        with torch.no_grad():
            copy_into(self._own, [*row, *self._outside()])
            loss = self._run()[0].clone()
            for k in self._written:
                row[k].copy_(self._own[k])
        return loss, True

    def at_once(self, steps: int) -> int:
        """Return how many of some steps one call takes: so few that an interruption need not wait."""
        return min(steps, self._most)

    def many(self, steps: int, rows: Tensor | None) -> Tensor:
        """Take steps, each with one of the rows, and return the losses."""
        return self._run.many(steps, self._own, None if rows is None else rows.contiguous())


def in_c(program: Program, inputs: Sequence[Tensor], writes: int = 0) -> Run:
    """Return a recorded program in C, which runs on these very inputs.

    It writes its first outputs over its first inputs, so many, and returns the others; the next call writes over them.
    """
    graph = program.graph
    source = Source(graph, inputs, writes)
    try:
        run = _right(source, compiled(source.text), graph, inputs, writes)
    except OSError as cause:
        raise CannotError(str(cause)) from cause
    if run is None:
        why = "the step in C does not compute what the recorded one does"
        warn_caller(f"{why}; it is not used. Please report this with your model.")
        raise CannotError(why)
    return run


# --- the compiler that torch would use too ----------------------------------------------------------------------------


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


# --- comparing --------------------------------------------------------------------------------------------------------


def _right(
    source: Source, made: ctypes.CDLL, graph: fx.GraphModule, inputs: Sequence[Tensor], writes: int
) -> Run | None:
    """Return a program that runs with a library; None unless it does what was recorded, with the same random numbers.

    A branch that is not taken at the start, such as that of clipping, may be taken elsewhere: both also run from where
    the first call ends, and from values that are further away. The inputs are as before when this returns.
    """
    before = {k: inputs[k].clone() for k in [*range(writes), *written(graph)]}
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            run = Run(source, made)
            return run if agrees(run, graph, inputs, before, writes) else None
        finally:
            for k, value in before.items():
                inputs[k].copy_(value)
