"""The kernels of a compiled program, kept on disk: a later process runs them without torch's compiler.

To load the compiler and let it find its own files takes longer than to import everything else. Where a program is
nothing but kernels, matrix products and random draws on fixed memory, these can be written down: which library, which
product, on which piece of which tensor. What is read back is run once beside the operations that it was compiled from,
and left alone unless both agree.
"""

import functools
import hashlib
import importlib.util
import os
import platform
import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils._config_module import _UNSET_SENTINEL

from pyro_dropout.generative.random_state import forked
from pyro_dropout.training.compile import kernel_folder
from pyro_dropout.training.compile.lighter import owner
from pyro_dropout.training.compile.plain_c import library

Call = tuple[Callable[..., object], tuple[Any, ...], dict[str, Any]]
Fixed = tuple[list[Call], list[Tensor]]  # calls, and the results that they leave

_FORMAT = 3
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
_DRAWS = ("uniform_", "normal_")
_CLOSE = {torch.float32: 1e-4, torch.float64: 1e-9}


class KeptKernels:
    """What is kept on disk of a program that writes over its inputs.

    Args:
        graph: the program.
        inputs: its inputs, which are the same tensors at every call.
        settings: everything else that the compiled program depends on.
    """

    def __init__(self, graph: fx.GraphModule, inputs: Sequence[Tensor], settings: object) -> None:
        names = dict.fromkeys(str(node.target) for node in graph.graph.nodes if node.op == "get_attr")
        self._graph, self._inputs = graph, list(inputs)
        self._given = [*inputs, *(getattr(graph, name) for name in names)]
        self._key = _key(graph, self._given, settings) if self._possible() else ""

    def _possible(self) -> bool:
        """Whether a program can be kept: it is on the CPU, and writes into nothing but its inputs."""
        written = [
            owner(node.all_input_nodes[0])
            for node in self._graph.graph.nodes
            if isinstance(node.target, OpOverload) and node.target._schema.is_mutable and node.all_input_nodes
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
        """Whether kernels do the same as the program, with the same random numbers, on copies of the inputs."""
        mine, theirs = [_copy(value) for value in self._given], [_copy(value) for value in self._inputs]
        calls, results = _filled(facts, libraries, mine)
        with torch.no_grad(), forked():
            torch.manual_seed(0)
            expected = fx.Interpreter(self._graph).run(*theirs)
            torch.manual_seed(0)
            for function, args, named in calls:
                function(*args, **named)
        pairs = zip([*mine[: len(theirs)], *results], [*theirs, *expected], strict=True)
        return all(_close(left, right) for left, right in pairs)

    def compile(self) -> Fixed | None:
        """Return kernels in plain C for these inputs, and keep them; None if there are none that do the same."""
        from pyro_dropout.training.compile.plain_c import program  # not needed where kernels are kept

        made = program.plain(self._graph, self._given) if self._key else None
        if made is None:
            return None
        facts, source = made
        code = library.compiled(source)
        if code is None:
            return None
        libraries = {library.LIBRARY: code}
        try:
            if not self._right(facts, libraries):
                return None
            kernel_folder.write(self._key, facts, libraries)
            return _filled(facts, libraries, self._given)
        except (OSError, RuntimeError, ValueError, AttributeError):
            return None  # torch's compiler may do better

    def write(self, calls: Sequence[Call], results: Sequence[Tensor]) -> None:
        """Keep what a first run has called, if all of it can be written down."""
        if not self._key:
            return
        try:
            facts, libraries = _told(calls, results, self._given)
        except _NotKeptError:
            return
        kernel_folder.write(self._key, facts, libraries)


class _NotKeptError(RuntimeError):
    """A call cannot be written down."""


def _key(graph: fx.GraphModule, given: Sequence[Tensor], settings: object) -> str:
    """Return the digest of all that a compiled program depends on: itself, versions, the machine, and settings."""
    about = (
        *(_FORMAT, _told_graph(graph), [(tuple(v.shape), v.stride(), str(v.dtype)) for v in given], settings),
        *(torch.__version__, torch.version.git_version, sys.version, _system(), _processor()),
        *(torch.get_num_threads(), torch.get_default_dtype(), torch.get_float32_matmul_precision()),
        *(torch.are_deterministic_algorithms_enabled(), library.identity()),
        sorted((k, v) for k, v in os.environ.items() if k.startswith("TORCH") and k != "TORCHINDUCTOR_CACHE_DIR"),
        [_changed(sys.modules.get(name)) for name in ("torch._inductor.config", "torch._functorch.config")],
    )
    return hashlib.sha256(repr(about).encode()).hexdigest()


def _told_graph(graph: fx.GraphModule) -> list[str]:
    """Return all that a graph does, in words; its Python source would take longer to write."""
    return [f"{node.name} {node.op} {node.target} {node.args} {node.kwargs}" for node in graph.graph.nodes]


def _changed(config: Any) -> list[tuple[str, str]]:
    """Return the settings of torch's compiler that were changed in this process; none where it is not loaded."""
    if config is None:
        return []
    now = {name: _own(entry.user_override) for name, entry in config._config.items()}
    other = {name: value for name, value in now.items() if value is not _UNSET_SENTINEL}
    return sorted((name, repr(value)) for name, value in other.items() if value != config._config[name].default)


def _own(setting: Any) -> Any:
    """Return what a user has set; torch 2.13 keeps it for each thread, earlier versions keep the value itself."""
    return setting.get() if isinstance(setting, ContextVar) else setting


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


# --- writing down -----------------------------------------------------------------------------------------------------


def _told(
    calls: Sequence[Call], results: Sequence[Tensor], given: Sequence[Tensor]
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return calls and results as JSON values, and the libraries that they need."""
    memory = [value.untyped_storage().data_ptr() for value in given]
    own: dict[int, list[int]] = {}  # number and bytes of each piece of memory besides the inputs
    libraries: dict[Path, str] = {}

    def tensor(value: object) -> list[Any]:
        if not isinstance(value, Tensor) or value.device.type != "cpu":
            raise _NotKeptError
        at = value.untyped_storage().data_ptr()
        if memory.count(at) > 1:
            raise _NotKeptError
        layout = [str(value.dtype).removeprefix("torch."), list(value.shape), list(value.stride())]
        if at in memory:
            whose = given[memory.index(at)]
            if whose.dtype != value.dtype:
                raise _NotKeptError
            return ["given", memory.index(at), *layout, value.storage_offset() - whose.storage_offset()]
        number, _ = own.setdefault(at, [len(own), value.untyped_storage().nbytes()])
        return ["own", number, *layout, value.storage_offset()]

    def call(function: Any, args: tuple[Any, ...], named: dict[str, Any]) -> list[Any]:
        name, holder = function.__name__, getattr(function, "__self__", None)
        if isinstance(holder, Tensor) and name in _DRAWS and not args and not named:
            return ["draw", name, [tensor(holder)], {}, None]
        if isinstance(holder, ModuleType) and name == "kernel" and not named:
            file = libraries.setdefault(Path(str(holder.__file__)), f"{len(libraries)}.so")
            return ["kernel", file, [tensor(each) for each in args], {}, None]
        numbers = {key: value for key, value in named.items() if key != "out"}
        plain = all(isinstance(value, int | float) for value in numbers.values())
        if name not in _PRODUCTS or not plain:
            raise _NotKeptError
        return ["product", name, [tensor(each) for each in args], numbers, tensor(named["out"])]

    told = [call(*each) for each in calls]
    facts = {"calls": told, "results": [tensor(each) for each in results]}
    return {**facts, "own": [size for _, size in own.values()]}, {name: _read(path) for path, name in libraries.items()}


def _read(path: Path) -> bytes:
    """Return a library of torch's compiler, unless others may have changed it."""
    if not kernel_folder.trusted(path.resolve().parent):
        raise _NotKeptError
    return path.read_bytes()


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
        if kind == "draw" and name in _DRAWS:
            calls.append((getattr(tensors[0], name), (), {}))
        elif kind == "kernel":
            calls.append((_loaded(libraries[name]), tensors, {}))
        elif kind == "plain":
            calls.append((library.bound(libraries[name], numbers["segment"], tensors), (), {}))
        elif kind == "torch":
            from pyro_dropout.training.compile.plain_c.by_torch import bound_call

            outs = [[number, tensor(*each)] for number, each in out]
            calls.append((bound_call(name, numbers["args"], tensors, outs), (), {}))
        elif kind == "product" and name in _PRODUCTS:
            calls.append((getattr(torch, name), tensors, {**numbers, "out": tensor(*out)}))
        else:
            raise ValueError(f"unknown call {kind} {name}")
    return calls, [tensor(*each) for each in facts["results"]]


@functools.cache
def _loaded(code: bytes) -> Any:
    """Return the kernel of a library, as torch's compiler loads it."""
    address = torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr  # type: ignore[attr-defined]
    os.environ["_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"] = str(address)
    with library.on_disk(code) as path:
        spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}.kernel", path)
        if spec is None or spec.loader is None:
            raise ImportError(str(path))
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module.kernel


def _copy(value: Tensor) -> Tensor:
    """Return a copy in the same order in memory."""
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).copy_(value)


def _close(left: Tensor, right: Tensor) -> bool:
    slack = _CLOSE.get(left.dtype, 1e-2)
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return torch.allclose(left.double(), right.double(), rtol=slack, atol=slack, equal_nan=True)
