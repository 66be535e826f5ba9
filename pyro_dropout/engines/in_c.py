"""Steps of small networks on a CPU as loops of C: compiled within a second, and kept on disk for a later process.

Such a program is kernels, matrix products, random draws and other calls of torch on fixed memory, which can be written
down: which function, on which piece of which tensor. What was compiled or read back is run beside the operations that
were recorded, at several points, and left alone unless both agree.
"""

import functools
import hashlib
import os
import platform
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from pyro_dropout.engines import kernel_folder
from pyro_dropout.engines.engine import CannotError, Loop, Row, Step, Taken
from pyro_dropout.engines.generated import library
from pyro_dropout.engines.generated.formulas import DRAWS, PRODUCTS
from pyro_dropout.engines.program import Program, apart_in_memory
from pyro_dropout.engines.simplify_graph import is_mutable, owner

Call = tuple[Callable[..., object], tuple[Any, ...], dict[str, Any]]
Fixed = tuple[list[Call], list[Tensor]]  # calls, and the results that they leave

_COPY = torch.ops.aten.copy_.default
_FORMAT = 4
_CLOSE = {torch.float32: 1e-4, torch.float64: 1e-9}
_AWAY = (0.0, 0.0, 0.3, 3.0)  # how far from the start programs are compared; the second call goes on from the first


class Generated:
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
        program = step.recorded
        own = [each.clone() for each in (*step.row, *program.outside())]
        run = in_c(program, [*step.flat, *own])
        return InC(step, program, own, run, _written(program, len(step.flat), len(step.row)))


class InC(Loop):
    """Steps in C, on the same tensors at every step."""

    name = Generated.name

    def __init__(
        self, step: Step, program: Program, own: list[Tensor], run: Callable[[], list[Tensor]], written: list[int]
    ) -> None:
        super().__init__(step)
        self._outside, self._own, self._run, self._written = program.outside, own, run, written

    def one(self, row: Row) -> Taken:
        """Take a step."""
        for mine, given in zip(self._own, (*row, *self._outside()), strict=True):
            mine.copy_(given)
        loss = self._run()[0].clone()  # the next step writes over it
        for k in self._written:
            row[k].copy_(self._own[k])
        return loss, True


def _written(program: Program, before: int, rows: int) -> list[int]:
    """Return the places in a row, whose inputs come after ``before`` others, that a program writes over."""
    places = program.graph.graph.find_nodes(op="placeholder")[before : before + rows]
    copied = {node.args[0] for node in program.graph.graph.find_nodes(op="call_function", target=_COPY)}
    return [k for k, place in enumerate(places) if place in copied]


def in_c(program: Program, inputs: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
    """Return a recorded program in C, which runs on these very inputs.

    It returns the outputs that are not written over inputs; the next call writes over them.

    Raises:
        CannotError: the program cannot be written as C, or there is no compiler.
    """
    kept = KeptKernels(program.graph, list(inputs))
    calls, results = kept.read() or kept.compile()

    def run() -> list[Tensor]:
        with torch.no_grad():
            for function, args, named in calls:
                function(*args, **named)
        return results

    return run


# --- kernels on disk -------------------------------------------------------------------------------------------------


class KeptKernels:
    """What is kept on disk of a program that writes over its inputs.

    Args:
        graph: the program.
        inputs: its inputs, which are the same tensors at every call.
    """

    def __init__(self, graph: fx.GraphModule, inputs: Sequence[Tensor]) -> None:
        names = dict.fromkeys(str(node.target) for node in graph.graph.nodes if node.op == "get_attr")
        self._graph, self._inputs = graph, list(inputs)
        self._given = [*inputs, *(getattr(graph, name) for name in names)]
        self._key = _key(graph, self._given) if self._possible() else ""

    def _possible(self) -> bool:
        """Whether a program can be kept: it is on the CPU, and writes into nothing but its inputs."""
        written = [
            owner(node.all_input_nodes[0])
            for node in self._graph.graph.nodes
            if is_mutable(node) and node.all_input_nodes
        ]
        plain = all(value.device.type == "cpu" and value.layout is torch.strided for value in self._given)
        return plain and all(node.op != "get_attr" for node in written)

    def read(self) -> Fixed | None:
        """Return the kernels for these inputs, if they are there and do what the program does."""
        found = kernel_folder.read(self._key) if self._key else None
        if found is None:
            return None
        try:
            if not self._right(*found):
                return None
            return _filled(*found, self._given)
        except (OSError, ImportError, RuntimeError, ValueError, KeyError, TypeError, IndexError, AttributeError):
            return None  # what does not fit is compiled anew

    def _right(self, facts: dict[str, Any], libraries: dict[str, bytes]) -> bool:
        """Whether kernels do the same as the program, with the same random numbers, on copies of the inputs.

        A branch that is not taken at the start, such as that of clipping, may be taken elsewhere: both also run from
        where the first call ends, and from values that are further away, unless the program itself fails there.
        """
        mine, theirs = [_copy(value) for value in self._given], [_copy(value) for value in self._inputs]
        calls, results = _filled(facts, libraries, mine)
        changed = [k for k, _ in enumerate(theirs) if theirs[k].is_floating_point() and self._writes(k)]
        run = fx.Interpreter(self._graph).run
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            for point, away in enumerate(_AWAY):
                torch.default_generator.manual_seed(point)
                for k in changed:
                    theirs[k].add_(torch.randn_like(theirs[k]).abs_(), alpha=away)
                    mine[k].copy_(theirs[k])
                torch.default_generator.manual_seed(point)
                try:
                    expected = run(*theirs)
                except RuntimeError:  # no inverse, say: that far away there is nothing to compare
                    if not away:
                        raise
                    return True
                torch.default_generator.manual_seed(point)
                for function, args, named in calls:
                    function(*args, **named)
                pairs = zip([*mine[: len(theirs)], *results], [*theirs, *expected], strict=True)
                size = _size([*theirs, *expected]) if away else None
                if not all(_close(left, right, size) for left, right in pairs):
                    return False
        return True

    def _writes(self, number: int) -> bool:
        """Whether a program writes over one of its inputs."""
        place = [node for node in self._graph.graph.nodes if node.op == "placeholder"][number]
        return any(node.target is torch.ops.aten.copy_.default and node.args[0] is place for node in place.users)

    def compile(self) -> Fixed:
        """Return kernels in plain C for these inputs, and keep them.

        Raises:
            CannotError: there are none, and the message says why.
        """
        from pyro_dropout.engines.generated.source import plain  # not needed where kernels are kept

        if not self._key:
            raise CannotError("the step writes into a tensor that it holds, or has tensors that are not on the CPU")
        try:
            facts, source = plain(self._graph, self._given)
            code = library.compiled(source)
            if code is None:
                raise CannotError("the C compiler failed" if library.compiler() else "there is no C compiler")
            libraries = {library.LIBRARY: code}
            if not self._right(facts, libraries):
                why = "the step in C does not compute what the recorded one does"
                warnings.warn(f"{why}; it is not used. Please report this with your model.", stacklevel=2)
                raise CannotError(why)
            kernel_folder.write(self._key, facts, libraries)
            return _filled(facts, libraries, self._given)
        except OSError as cause:
            raise CannotError(str(cause)) from cause


def _key(graph: fx.GraphModule, given: Sequence[Tensor]) -> str:
    """Return the digest of all that a program in C depends on: itself, versions, the machine, and settings."""
    about = (
        *(_FORMAT, _told_graph(graph), [(tuple(v.shape), v.stride(), str(v.dtype)) for v in given]),
        *(torch.__version__, torch.version.git_version, sys.version, _system(), _processor()),
        *(torch.get_num_threads(), torch.get_default_dtype(), torch.get_float32_matmul_precision()),
        *(torch.are_deterministic_algorithms_enabled(), library.FLAGS),
    )
    return hashlib.sha256(repr(about).encode()).hexdigest()


def _told_graph(graph: fx.GraphModule) -> list[str]:
    """Return all that a graph does, in words; its Python source would take longer to write."""
    return [f"{node.name} {node.op} {node.target} {node.args} {node.kwargs}" for node in graph.graph.nodes]


def _system() -> tuple[object, ...]:
    """Return what is below Python, without starting a process to ask."""
    if not hasattr(os, "uname"):
        return (platform.platform(),)
    known = os.uname()
    libc = os.confstr("CS_GNU_LIBC_VERSION") if "CS_GNU_LIBC_VERSION" in os.confstr_names else ""
    return known.sysname, known.release, known.version, known.machine, libc


@functools.cache
def _processor() -> str:
    """Return what decides which instructions a compiled program has."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = [platform.processor()]
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{torch.backends.cpu.get_cpu_capability()} {flags}"


# --- reading back -----------------------------------------------------------------------------------------------------


def _filled(facts: dict[str, Any], libraries: dict[str, bytes], given: Sequence[Tensor]) -> Fixed:
    """Return the calls that were written down, with these inputs and new memory."""
    own = [torch.empty(size, dtype=torch.uint8) for size in facts["own"]]

    def tensor(whose: str, number: int, dtype: str, shape: list[int], stride: list[int], offset: int) -> Tensor:
        if whose == "given":
            value = given[number]
            return value.as_strided(shape, stride, value.storage_offset() + offset)
        return own[number].view(getattr(torch, dtype)).as_strided(shape, stride, offset)

    calls: list[Call] = []
    for kind, name, args, numbers, out in facts["calls"]:
        tensors = tuple(tensor(*each) for each in args)
        if kind == "draw" and name in DRAWS.values():
            calls.append((getattr(tensors[0], name), (), {}))
        elif kind == "plain":
            calls.append((library.bound(libraries[name], numbers["segment"], tensors), (), {}))
        elif kind == "torch":
            from pyro_dropout.engines.generated.by_torch import bound_call

            outs = [[number, tensor(*each)] for number, each in out]
            calls.append((bound_call(name, numbers, tensors, outs), (), {}))
        elif kind == "product" and name in PRODUCTS:
            calls.append((getattr(torch, name), tensors, {**numbers, "out": tensor(*out)}))
        else:
            raise ValueError(f"unknown call {kind} {name}")
    return calls, [tensor(*each) for each in facts["results"]]


def _copy(value: Tensor) -> Tensor:
    """Return a copy in the same order in memory."""
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    part = made
    for dim, stride in enumerate(value.stride()):
        if stride == 0:  # expanded: torch writes into no tensor whose elements share memory
            part, value = part.narrow(dim, 0, min(1, made.shape[dim])), value.narrow(dim, 0, min(1, made.shape[dim]))
    part.copy_(value)
    return made


def _size(values: Sequence[Tensor]) -> float:
    """Return the largest finite number among some tensors, at least 1."""
    found = [
        float(each.nan_to_num(0.0, 0.0, 0.0).abs().max())
        for each in values
        if each.numel() and each.is_floating_point()
    ]
    return max([1.0, *found])


def _close(left: Tensor, right: Tensor, size: float | None) -> bool:
    """Whether two tensors agree: digit by digit or, where numbers cancel, beside the largest number of the step."""
    slack = _CLOSE.get(left.dtype, 1e-2)
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    near = {"rtol": slack, "atol": slack} if size is None else {"rtol": 10 * slack, "atol": 10 * slack * size}
    return torch.allclose(left.double(), right.double(), equal_nan=True, **near)
