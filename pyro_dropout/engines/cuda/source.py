"""The source of a kernel that takes many steps: what a step changes stays where threads share it, from step to step.

A block of threads takes the steps of each network, or several blocks do, each on a processor of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, fx

from pyro_dropout.engines.cuda.loops import Loops
from pyro_dropout.engines.cuda.recorded import PREAMBLE, outside
from pyro_dropout.engines.generated.operations import Lowering
from pyro_dropout.engines.generated.values import WORD, Constants, Draws, UnsupportedError, Value, c_type

# Of several processors: how many, what each has of the work of one, with the waiting for memory that is farther away,
# and the microseconds for which all wait for the last one.
_SHARED = ((16, 0.15, 2.4), (64, 0.06, 3.0))
_COMPILED = 10.0  # microseconds of the kernels of torch's compiler for each time that all threads wait here
_SEVERAL = 4  # networks from which each is best left to a processor of its own
_FAR = 2**24  # bytes that threads share in the GPU's memory

_ENTRY = """
#ifdef __CUDACC__
extern "C" __global__ void __launch_bounds__({threads})
steps(double* far, const long long* given, const int first, const int count) {{
  extern __shared__ double memory[];
  const int warp = threadIdx.x / 32 * {processors} + blockIdx.x % {processors};  // neighbours on other processors
  run(blockIdx.x / {processors}, warp * 32 + threadIdx.x % 32, memory, far, given, first, count);
}}
#endif
"""
# Processors wait for each other: the first thread of each counts itself in the GPU's memory, and looks there until all
# have come. What was written before is visible to all threads after it.
_TOGETHER = """
#ifdef __CUDACC__
DEVICE void together(unsigned* arrived, const unsigned all) {
  __syncthreads();
  if (threadIdx.x == 0) {
    unsigned seen;
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" :: "l"(arrived) : "memory");
    do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(arrived) : "memory"); while (seen < all);
  }
  __syncthreads();
}
#undef BARRIER
#define BARRIER together((unsigned*)memory, arrivals += PROCESSORS)
#endif
"""
_COUNTER = 16  # words before the tensors of a network that several processors share, of which the first counts


@dataclass(frozen=True)
class Source:
    """A kernel's source, and what it needs.

    Attributes:
        text: the source, in C++: ``run`` of the numbers of a network and of a thread, shared and far memory,
            addresses, the number of the first step, and how many there are.
        memory: bytes that threads share.
        far: bytes that they share in the GPU's memory.
        threads: of a block.
        processors: blocks that take the steps of one network together.
        constants: the tensors that the step holds, whose addresses follow those of its inputs.
        draws: the random numbers of a step, whose addresses follow; then come those of its results.
    """

    text: str
    memory: int
    far: int
    threads: int
    processors: int
    constants: list[Tensor]
    draws: Draws


@dataclass(frozen=True)
class Recorded:
    """A recorded step of one network, which several networks may take side by side.

    Attributes:
        graph: the step, with an example of each value; its first outputs replace its first inputs.
        inputs: its inputs, contiguous.
        writes: how many are replaced.
        each: the numbers of those inputs that differ from step to step: rows of data, which must exist.
        copies: how many networks there are.
        stacked: the numbers of those other inputs of which each network has its own; empty for one network alone.
    """

    graph: fx.GraphModule
    inputs: list[Tensor]
    writes: int
    each: Sequence[int] = ()
    copies: int = 1
    stacked: Sequence[int] = ()

    @property
    def own(self) -> set[int]:
        """The numbers of the inputs that are given for all networks, one after another."""
        return {*range(self.writes), *self.stacked} - {*self.each} if self.stacked else set()


def steps_source(recorded: Recorded, near: int, threads: int, lanes: int, most: int = 1, processors: int = 1) -> Source:
    """Return the source of a kernel that takes many steps."""
    everyone = threads * processors
    constants, draws, loops = Constants(live=True), Draws(), Loops(everyone, lanes, processors)
    writes, copies = recorded.writes, recorded.copies
    state = [_Kept(k, value) for k, value in enumerate(recorded.inputs[:writes])]
    words, lines = _COUNTER if processors > 1 else 0, []
    for kept in state:
        lines.append(f"{kept.kind}* s{kept.number} = ({kept.kind}*)(memory + {words});")
        words += kept.words
    values = [outside(f"s{k}" if k < writes else f"x{k}", value) for k, value in enumerate(recorded.inputs)]
    numbers = [kept for kept in state if kept.size == 1]  # each thread has them for itself
    for kept in numbers:
        values[kept.number] = replace(values[kept.number], at=partial(lambda name, _: name, kept.now))
    outputs = Lowering(recorded.graph, values, constants, loops, "v", draws).outputs
    changed, results = list[tuple[_Kept, Value]](), list[Value]()
    for k, value in enumerate(outputs):
        if k < writes and value is values[k]:
            continue
        if k < writes and (value.shape != values[k].shape or value.dtype != values[k].dtype):
            raise UnsupportedError("a part of the state changes its form")
        stored = value if loops.has(value.name) else loops.stored(f"r{k}", value)
        if k < writes:
            changed.append((state[k], stored))
        else:
            results.append(stored)
    varying = {name for kept in state for name in (f"s{kept.number}", kept.now)}
    varying |= {f"x{k}" for k in recorded.each} | {draws.name(k) for k in draws.counts}
    once = loops.once(varying)
    names = [value.name or "" for value in (*(v for _, v in changed), *results)]
    over = {value.name or "": f"s{kept.number}" for kept, value in changed if names.count(value.name or "") == 1}
    body = loops.written(names, over)
    if processors == 1 and most > 1:
        best = best_count(loops.work(), loops.waits, copies, most, near=words * WORD <= near)
        if best > 1:
            return steps_source(recorded, near, threads, lanes, most, best)
    places, end, far = loops.memory(words, None if processors > 1 else near // WORD)
    if processors > 1:
        end, far = 0, end
    if far * WORD > _FAR:
        raise TooLargeError(f"a step needs {far * WORD} bytes beside what threads share, and may have {_FAR}")

    def pointer(name: str, dtype: torch.dtype, number: int, offset: str = "") -> str:
        kind = c_type(dtype)
        return f"const {kind}* RESTRICT {name} = (const {kind}*)given[{number}]{offset};"

    begins = [f"const {kept.kind} {kept.now} = s{kept.number}[0];" for kept in numbers]
    for k, each in enumerate(recorded.inputs[writes:], writes):
        if k in recorded.each:
            begins.append(pointer(f"x{k}", each.dtype, k, f" + ((long long)step * {copies} + block) * {each.numel()}"))
        else:
            own = f" + (long long)block * {each.numel()}" if k in recorded.stacked else ""
            lines.append(pointer(f"x{k}", each.dtype, k, own))
    number = len(recorded.inputs)
    lines += [pointer(f"c{k}", value.dtype, number + k) for k, value in enumerate(constants.tensors)]
    number += len(constants.tensors)
    for k, (key, many) in enumerate(draws.counts.items()):
        place = f" + ((long long)(first + step) * {copies} + block) * {many}"
        begins.append(pointer(draws.name(key), key[1], number + k, place))
    number += len(draws.counts)
    late = [(kept, v) for kept, v in changed if not loops.is_over(v.name or "")]
    # Numbers are read at the beginning of a step: if nobody has waited since then, someone may not have read them yet.
    ends, waits = [], bool(late) and loops.waits == 0
    waits |= any(v.size > 1 or f"s{kept.number}" in loops.read_last for kept, v in late)
    for size in sorted({kept.size for kept, _ in late}):
        one = "" if size == 1 else "[i]"
        copied = " ".join(f"s{kept.number}[i] = {v.name}{one};" for kept, v in late if kept.size == size)
        ends.append(f"UNROLLED(1) for (int i = tid; i < {size}; i += {everyone}) {{ {copied} }}")
    for k, value in enumerate(results):
        place, one = f"(({c_type(value.dtype)}*)given[{number + k}])", "" if value.size == 1 else "[i]"
        at = f"((long long)step * {copies} + block) * {value.size} + i"
        ends.append(
            f"UNROLLED(1) for (int i = tid; i < {value.size}; i += {everyone}) {place}[{at}] = {value.name}{one};"
        )
        waits |= value.size > 1
    own = f"all + (long long)block * {far}"
    text = [
        PREAMBLE,
        *([f"#define PROCESSORS {processors}", _TOGETHER] if processors > 1 else []),
        "DEVICE void run(const int block, const int tid, double* near, double* all,"
        " const long long* RESTRICT given, const int first, const int count) {",
        f"double* memory = {own}; unsigned arrivals = 0;"
        if processors > 1
        else f"double *memory = near, *far = {own};",
        *lines,
        *places,
        *(
            f"UNROLLED(1) for (int i = tid; i < {k.size}; i += {everyone}) s{k.number}[i] = {k.outside}[i];"
            for k in state
        ),
        "BARRIER;",
        *once,
        "for (int step = 0; step < count; ++step) {",
        *begins,
        *body,
        *(["BARRIER;"] if waits else []),
        *ends,
        "BARRIER;",
        "}",
        *(
            f"UNROLLED(1) for (int i = tid; i < {k.size}; i += {everyone}) {k.outside}[i] = s{k.number}[i];"
            for k in state
        ),
        "}",
        _ENTRY.format(threads=threads, processors=processors),
    ]
    return Source("\n".join(text), end * WORD, far * WORD, threads, processors, constants.tensors, draws)


def best_count(work: float, waits: int, copies: int, most: int, *, near: bool = True) -> int:
    """Return how many processors take a step of one network in the shortest time.

    What is fitted here was measured with 13 steps on an H200. Those by torch's compiler are kernels one after another.
    """
    times = {1: 0.9 * work} if near else {}
    for count, share, wait in _SHARED:
        if count * copies <= most:
            times[count] = share * work + wait * waits
    if not times:
        raise TooLargeError("what a step changes does not fit in the memory of a processor")
    best = min(times, key=times.__getitem__)
    if copies < _SEVERAL and times[best] > _COMPILED * waits:
        each, others = times[best], _COMPILED * waits
        raise TooLargeError(
            f"a step would take a kernel about {each:.0f} µs, and those of torch's compiler {others:.0f}"
        )
    return best


class _Kept:
    """A tensor that a step changes."""

    def __init__(self, number: int, value: Tensor) -> None:
        self.number, self.size, self.kind = number, value.numel(), c_type(value.dtype)
        self.now = f"s{number}_now"  # its value, if it is one number
        self.words = -(-value.numel() * value.itemsize // WORD)
        self.outside = f"(({self.kind}*)given[{number}] + (long long)block * {self.size})"


class TooLargeError(UnsupportedError):
    """A step is too large for a kernel, however it is written."""
