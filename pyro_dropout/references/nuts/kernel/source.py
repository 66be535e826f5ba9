"""The source of a kernel that runs whole chains: one block of threads for each, until its draws or its steps are done.

A chain's state lies in the memory that its threads share. No chain waits for another, and nothing waits for the host.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from pyro_dropout.engines.program import traced
from pyro_dropout.engines.torch_internals import decompositions
from pyro_dropout.references.nuts.adaptation import Plan, Tuning
from pyro_dropout.references.nuts.kernel.calls import Constants
from pyro_dropout.references.nuts.kernel.loops import Loops
from pyro_dropout.references.nuts.kernel.operations import Lowering
from pyro_dropout.references.nuts.kernel.values import UnsupportedError, Value, c_type, flat_index
from pyro_dropout.references.nuts.no_u_turn import Array, Tree

_FIELDS = (*Tree._fields, *Tuning._fields)
_WORD = 8  # bytes
THREADS, LANES = 256, 32  # of a chain, and how many of them can exchange numbers
# What torch's own table of simpler operations leaves as it is.
_MORE = [
    *(torch.ops.aten.elu, torch.ops.aten.gelu, torch.ops.aten.leaky_relu, torch.ops.aten.hardtanh),
    *(torch.ops.aten._softmax, torch.ops.aten._log_softmax),
]

PREAMBLE = """
#ifdef __CUDACC__
#define DEVICE __device__ __forceinline__
#define BARRIER __syncthreads()
#define NEIGHBOUR(value, away) __shfl_xor_sync(0xffffffffu, value, away)
#define INF __longlong_as_double(0x7ff0000000000000LL)
#endif
template <typename T> DEVICE T larger(T a, T b) { return (a != a || a > b) ? a : b; }
template <typename T> DEVICE T smaller(T a, T b) { return (a != a || a < b) ? a : b; }
template <typename T> DEVICE T log_sum(T a, T b) {
  const T most = larger(a, b);
  return (most == -INF || most == INF) ? most : most + log1p(exp(smaller(a, b) - most));
}
"""
_INPUTS = (
    "double* states, const char* constants, const double* noises, const double* rings, double* draws,"
    " long long* spent, const int steps, const int before"
)
_ENTRY = """
#ifdef __CUDACC__
extern "C" __global__ void __launch_bounds__({threads}) chains(double* far, {inputs}) {{
#ifdef FAR
  double* memory = far + (long long)blockIdx.x * {words};
#else
  extern __shared__ double memory[];
#endif
  run(blockIdx.x, threadIdx.x, memory, states, constants, noises, rings, draws, spent, steps, before);
}}
#endif
"""


@dataclass(frozen=True)
class Source:
    """A kernel's source, and what it needs.

    Attributes:
        text: the source, in C++. A chain's memory is shared by its threads or, if FAR is defined, in that of the GPU.
        constants: the tensors that it reads, one after another, each at a multiple of 8 bytes.
        memory: bytes that a chain's threads share.
        threads: of a chain.
    """

    text: str
    constants: Tensor
    memory: int
    threads: int


def kernel_source(
    leaf: Callable[..., list[Array]],
    turn: Callable[..., list[Array]],
    state: Sequence[Tensor],
    momenta: Tensor,
    plan: Plan,
    size: int,
    *,
    threads: int = THREADS,
    lanes: int = LANES,
) -> Source:
    """Return the source of a kernel from both functions of a step.

    Args:
        leaf: adds one leaf to each tree: (*state, noise) to the new trees, and whether one has ended.
        turn: does what follows their end: (*state, noise, momenta) to the new state, and whether draws are left.
        state: the state of one chain, (1, ...) each.
        momenta: those of one chain in a ring, (1, M, d).
        plan: settings.
        size: number of coordinates that are kept.
        threads: of a chain.
        lanes: threads that can exchange numbers.
    """
    constants, layout = Constants(), _Layout(state)
    noise = momenta.new_full((1, 3), 0.5)
    bodies, most = [], 0
    for function, others, prefix in ((leaf, [noise], "a"), (turn, [noise, momenta], "b")):
        read = [*layout.values, outside("noise", noise), outside("ring", momenta)][: len(state) + len(others)]
        (*found, flag), loops = lowered(function, [*state, *others], read, constants, prefix, threads, lanes)
        text, words = _body(loops, layout, found, flag, prefix, threads)
        bodies.append(text)
        most = max(most, words)
    held, lines = packed(constants.tensors)
    draw, total = layout.name("draw"), plan.warmup + plan.samples
    text = "\n".join(
        [
            PREAMBLE,
            f"DEVICE void run(const int chain, const int tid, double* memory, {_INPUTS}) {{",
            *lines,
            *layout.lines,
            f"double* state = states + (long long)chain * {layout.words};",
            f"const double* ring = rings + (long long)chain * {momenta.numel()};",
            f"for (int i = tid; i < {layout.words}; i += {threads}) memory[i] = state[i];",
            "BARRIER;",
            f"if ({draw}[0] >= {total}) return;",
            "for (int step = 0; step < steps; ++step) {",
            "const double* noise = noises + ((long long)chain * steps + step) * 3;",
            bodies[0],
            f"if (!{_flag('a')}) continue;",
            f"const double drawn = {draw}[0];",
            bodies[1],
            f"if ({draw}[0] > drawn) {{",
            f"const int kept = (int){draw}[0] - 1 - {plan.warmup};",
            f"double* place = draws + ((long long)chain * {plan.samples} + kept) * {size};",
            f"if (kept >= 0) for (int i = tid; i < {size}; i += {threads}) place[i] = {layout.name('chosen_z')}[i];",
            "if (tid == 0) spent[chain] = before + step + 1;",
            "}",
            f"if (!{_flag('b')}) break;",
            "}",
            "BARRIER;",
            f"for (int i = tid; i < {layout.words}; i += {threads}) state[i] = memory[i];",
            "}",
            _ENTRY.format(threads=threads, inputs=_INPUTS, words=layout.words + most),
        ]
    )
    return Source(text, held, _WORD * (layout.words + most), threads)


def lowered(
    function: Callable[..., list[Array]],
    inputs: list[Tensor],
    values: Sequence[Value],
    constants: Constants,
    prefix: str,
    threads: int,
    lanes: int,
) -> tuple[list[Value], Loops]:
    """Return the results of a function of these inputs, and the loops that compute them."""
    graph, loops = _shaped(traced(function, inputs), inputs), Loops(threads, lanes)
    try:
        return Lowering(graph, values, constants, loops, prefix).outputs, loops
    except UnsupportedError:
        graph, loops = _simpler(graph, inputs), Loops(threads, lanes)
        return Lowering(graph, values, constants, loops, prefix).outputs, loops


class _Layout:
    """Where each part of a chain's state lies, one after another, each number in 8 bytes."""

    def __init__(self, state: Sequence[Tensor]) -> None:
        self.words, self.lines, self.values = 0, [], []  # type: int, list[str], list[Value]
        for k, part in enumerate(state):
            if part.dtype not in (torch.float64, torch.int64):
                raise UnsupportedError(f"a chain's state has no numbers of type {part.dtype}")
            kind = c_type(part.dtype)
            self.lines.append(f"{kind}* s{k} = ({kind}*)(memory + {self.words});")
            self.values.append(outside(f"s{k}", part))
            self.words += part.numel()

    def name(self, field: str) -> str:
        """Return the name of a part."""
        return f"s{_FIELDS.index(field)}"


def _flag(prefix: str) -> str:
    return f"{prefix}_flag"


def outside(name: str, example: Tensor) -> Value:
    """Return a tensor that no loop computes."""
    shape = tuple(example.shape)
    return Value(shape, example.dtype, lambda at: f"{name}[{flat_index(at, shape)}]", name=name)


class _Shapes(fx.Interpreter):
    """Notes what each operation gives."""

    def run_node(self, n: fx.Node) -> Any:
        """Run one operation."""
        n.meta["val"] = result = super().run_node(n)
        return result


def _shaped(graph: fx.GraphModule, inputs: list[Tensor]) -> fx.GraphModule:
    """Return a graph with an example of each value."""
    with torch.no_grad():
        _Shapes(graph).run(*inputs)
    return graph


def _simpler(graph: fx.GraphModule, inputs: list[Tensor]) -> fx.GraphModule:
    """Return a graph with fewer kinds of operations."""
    with torch.no_grad():
        found: fx.GraphModule = make_fx(graph, decompositions(_MORE))(*inputs)
    found.graph.eliminate_dead_code()
    return _shaped(found, inputs)


def _body(loops: Loops, layout: _Layout, found: list[Value], flag: Value, prefix: str, threads: int) -> tuple[str, int]:
    """Return the lines that compute a new state and write it over the old one, and the words of memory they need."""
    changed = []
    for k, value in enumerate(found):
        old = layout.values[k]
        if value is old:
            continue
        if value.dtype != old.dtype or value.shape != old.shape:
            raise UnsupportedError("a part of the state changes its form")
        if not loops.has(value.name):
            value = loops.stored(f"{prefix}_{k}", value)
        changed.append((k, value))
    loops.stored(_flag(prefix), flag)
    written = loops.written()
    places, words = [], layout.words
    for name, (size, dtype) in loops.places.items():
        kind = c_type(dtype)
        places.append(f"{kind}* {name} = ({kind}*)(memory + {words});")
        words += -(-size * dtype.itemsize // _WORD)
    copies = []
    sizes = sorted({value.size for _, value in changed})
    for size in sizes:
        each = " ".join(
            f"s{k}[i] = {value.name}{'' if size == 1 else '[i]'};" for k, value in changed if value.size == size
        )
        copies.append(f"for (int i = tid; i < {size}; i += {threads}) {{ {each} }}")
    return "\n".join([*places, *written, "BARRIER;", *copies, "BARRIER;"]), words - layout.words


def packed(tensors: Sequence[Tensor]) -> tuple[Tensor, list[str]]:
    """Return constants one after another, and the lines that name them."""
    parts, lines, offset = [], [], 0
    for k, tensor in enumerate(tensors):
        kind = c_type(tensor.dtype)
        lines.append(f"const {kind}* c{k} = (const {kind}*)(constants + {offset});")
        flat = tensor.reshape(-1).view(torch.uint8)
        more = -len(flat) % _WORD
        parts += [flat, flat.new_zeros(more)]
        offset += len(flat) + more
    return torch.cat(parts) if parts else torch.zeros(_WORD, dtype=torch.uint8), lines
