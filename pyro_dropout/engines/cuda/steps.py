"""Many steps in one launch: a recorded step as a kernel, with a block of threads for each network.

Random numbers are drawn by torch, for a block of steps at a time. They depend on a seed and on the number of a step,
and not on how many steps a launch takes. What a step changes lies in the memory that threads share, from the first step
of a launch to the last.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from pyro_dropout.engines.cuda.calls import Constants, Draws
from pyro_dropout.engines.cuda.loops import Loops
from pyro_dropout.engines.cuda.operations import Lowering
from pyro_dropout.engines.cuda.recorded import (
    LANES,
    PREAMBLE,
    WORD,
    compiled_kernel,
    outside,
    processor,
    shaped,
    simpler,
)
from pyro_dropout.engines.cuda.values import UnsupportedError, Value, c_type
from pyro_dropout.engines.torch_internals import launched_together

THREADS = 512
# Of several processors: how many, what each has of the work of one, with the waiting for memory that is farther away,
# and the microseconds for which all wait for the last one.
_SHARED = ((16, 0.15, 2.4), (64, 0.06, 3.0))
_COMPILED = 10.0  # microseconds of the kernels of torch's compiler for each time that all threads wait here
_SIDE_BY_SIDE = 128  # networks that run at once, about one on each processor; of more, several share one
_MOST_STEPS = 1000  # of one launch
_SEVERAL = 4  # networks from which each is best left to a processor of its own
_DRAWN = 2**26  # random numbers of one launch
STATE = 2**22  # bytes of what a step changes
_LINE = 128  # bytes that the GPU's memory hands out at a time
_FAR = 2**24  # bytes that threads share in the GPU's memory
_CLOSE = {torch.float32: 1e-3, torch.float64: 1e-9}
# How far from the start kernel and step are compared; the second comparison goes on from the first.
_AWAY = (0.0, 0.0, 0.3)

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
    """Return the source of a kernel that takes many steps.

    Args:
        recorded: the step.
        near: bytes that the threads of a block can share.
        threads: of a block.
        lanes: threads that can exchange numbers.
        most: processors that there are.
        processors: how many of them take the steps of one network together, at least; several share the GPU's memory.
    """
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
        values[kept.number] = replace(values[kept.number], at=partial(_named, kept.now))
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

    ahead = list[tuple[str, int, int]]()  # what the next step reads for the first time: how far away, and bytes
    begins = [f"const {kept.kind} {kept.now} = s{kept.number}[0];" for kept in numbers]
    for k, each in enumerate(recorded.inputs[writes:], writes):
        if k in recorded.each:
            begins.append(pointer(f"x{k}", each.dtype, k, f" + ((long long)step * {copies} + block) * {each.numel()}"))
            ahead.append((f"x{k}", each.numel() * copies, each.numel() * each.itemsize))
        else:
            own = f" + (long long)block * {each.numel()}" if k in recorded.stacked else ""
            lines.append(pointer(f"x{k}", each.dtype, k, own))
    number = len(recorded.inputs)
    lines += [pointer(f"c{k}", value.dtype, number + k) for k, value in enumerate(constants.tensors)]
    number += len(constants.tensors)
    for k, (key, many) in enumerate(draws.counts.items()):
        place = f" + ((long long)(first + step) * {copies} + block) * {many}"
        begins.append(pointer(draws.name(key), key[1], number + k, place))
        ahead.append((draws.name(key), many * copies, many * key[1].itemsize))
    number += len(draws.counts)
    for name, away, size in ahead:
        lines_of = f"UNROLLED(1) for (int i = tid * {_LINE}; i < {size}; i += {everyone * _LINE})"
        begins.append(f"if (step + 1 < count) {{ {lines_of} AHEAD((const char*)({name} + {away}) + i); }}")
    late = [(kept, v) for kept, v in changed if not loops.is_over(v.name or "")]
    ends, waits = [], any(v.size > 1 or loops.reads_at_the_end(f"s{kept.number}") for kept, v in late)
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

    Args:
        work: microseconds of one processor.
        waits: how often all threads wait for each other.
        copies: number of networks.
        most: processors that there are.
        near: whether what a step changes fits in the memory of one processor.

    Raises:
        TooLargeError: torch's compiler is likely to be faster.

    Example:
        >>> best_count(10.0, 4, copies=1, most=132), best_count(500.0, 12, copies=1, most=132)
        (1, 64)
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


def _named(name: str, _: object) -> str:
    return name


class _Kept:
    """A tensor that a step changes."""

    def __init__(self, number: int, value: Tensor) -> None:
        self.number, self.size, self.kind = number, value.numel(), c_type(value.dtype)
        self.now = f"s{number}_now"  # its value, if it is one number
        self.words = -(-value.numel() * value.itemsize // WORD)
        self.outside = f"(({self.kind}*)given[{number}] + (long long)block * {self.size})"


class StepsOnGpu:
    """A recorded step that a kernel takes many times in one launch, for one network or for several.

    Args:
        recorded: the step.
        tensors: the inputs of all networks: of those that are replaced or ``stacked``, (copies, ...) if
            there are several. The same tensors are used at every step, but for those that differ.
        compile: makes a function of a source; by default for a GPU.
        threads, lanes: of a block, and how many of them can exchange numbers.
        processors: how many take the steps of one network together, at least.

    Raises:
        UnsupportedError: the step has an operation that a kernel does not know, or is too large; the message says why.
        WrongKernelError: the kernel does not compute what the step does.
    """

    def __init__(
        self,
        recorded: Recorded,
        tensors: Sequence[Tensor],
        compile: Callable[[Source, torch.device], Callable[..., None]] | None = None,
        *,
        threads: int | None = None,
        lanes: int = LANES,
        processors: int = 1,
    ) -> None:
        self._device, self._copies = tensors[0].device, recorded.copies
        threads = threads or (THREADS if recorded.copies <= _SIDE_BY_SIDE else THREADS // 2)
        changed = tensors[: recorded.writes]
        if not all(value.is_contiguous() for value in changed) or any(v.device != self._device for v in tensors):
            raise UnsupportedError("a parameter of the step is not contiguous, or an input lies elsewhere")
        self._copied: list[tuple[Tensor, Tensor]] = []  # tensors that are not contiguous, and their copies
        tensors = [*changed, *(self._contiguous(value) for value in tensors[recorded.writes :])]
        near, most = processor(self._device) if compile is None else (2**16, 1)
        self._recorded = replace(recorded, graph=shaped(recorded.graph, recorded.inputs))
        try:
            source = steps_source(self._recorded, near, threads, lanes, most, processors)
        except TooLargeError:
            raise
        except UnsupportedError:
            self._recorded = replace(recorded, graph=simpler(recorded.graph, recorded.inputs))
            source = steps_source(self._recorded, near, threads, lanes, most, processors)
        if any(value.numel() >= 2**31 for value in (*tensors, *source.constants)):
            raise TooLargeError("a tensor has more elements than a kernel counts, in 32 bits")
        self._source, self._many = source, bool(recorded.stacked)
        (end,) = (node for node in self._recorded.graph.graph.nodes if node.op == "output")
        self._examples = [node.meta["val"] for node in end.args[0][recorded.writes :]]
        self._constants = [self._contiguous(value.to(self._device)) for value in source.constants]
        self._run = (compile or _compiled)(source, self._device)
        self._far = torch.empty(self._copies * source.far // WORD + 1, dtype=torch.float64, device=self._device)
        per_step = max([1, *source.draws.counts.values()]) * self._copies
        self._block = max(1, min(_MOST_STEPS, _DRAWN // per_step))
        self._generator, self._now = torch.Generator(self._device), (-1, -1)
        self._drawn = self._room_for_draws(self._block)
        self._whole = self._bound(tensors, self._drawn, self._block)
        self._check(tensors)

    def _contiguous(self, value: Tensor) -> Tensor:
        """Return a tensor, or a copy that is contiguous and is made anew before each launch."""
        if value.is_contiguous():
            return value
        self._copied.append((value, value.contiguous()))
        return self._copied[-1][1]

    def room(self, number: int) -> int:
        """Return how many steps one launch may take, from the step of this number."""
        return self._block - number % self._block

    def advance(self, seed: int, number: int, steps: int, each: Sequence[Tensor] = ()) -> list[Tensor]:
        """Take some steps, of which there is ``room`` for; return the results of each, (steps, ...).

        Args:
            seed: of the random numbers.
            number: of the first one.
            steps: how many.
            each: the inputs that differ, (steps, ...).
        """
        block, first = divmod(number, self._block)
        if self._now != (seed, block):
            self._generator.manual_seed((seed + block * 0x9E3779B97F4A7C15) % 2**63)
            self._now = seed, block
            self._draw(self._drawn)
        for value, copy in self._copied:
            copy.copy_(value)
        return [value.clone() for value in self._launched(self._whole, first, steps, each)]

    def _draw(self, places: Sequence[Tensor]) -> None:
        """Draw the random numbers of some steps."""
        for place, (fill, _) in zip(places, self._source.draws.counts, strict=True):
            getattr(place, fill)(generator=self._generator)

    def _room_for_draws(self, steps: int) -> list[Tensor]:
        return [
            torch.zeros(steps, self._copies, count, dtype=dtype, device=self._device)
            for (_, dtype), count in self._source.draws.counts.items()
        ]

    def _bound(self, tensors: Sequence[Tensor], drawn: Sequence[Tensor], steps: int) -> "_Bound":
        """Return what the kernel is called with: these tensors, and new ones for what differs and for results."""
        given, many = list(tensors), (self._copies,) if self._many else ()
        for number in self._recorded.each:
            example = self._recorded.inputs[number]
            given[number] = example.new_empty(steps, *many, *example.shape)
        results = [each.new_empty(steps, *many, *each.shape, device=self._device) for each in self._examples]
        whole = [*given, *self._constants, *drawn, *results]
        addresses = torch.tensor([value.data_ptr() for value in whole], dtype=torch.int64).to(self._device)
        return _Bound(addresses, [given[number] for number in self._recorded.each], results, whole)

    def _launched(self, bound: "_Bound", first: int, steps: int, each: Sequence[Tensor]) -> list[Tensor]:
        for place, value in zip(bound.each, each, strict=True):
            place[:steps].copy_(value)
        if self._source.processors > 1:
            self._far[:-1].view(self._copies, -1)[:, 0].zero_()  # nobody has arrived
        self._run(self._copies, self._far, bound.addresses, first, steps)
        return [value[:steps] for value in bound.results]

    def _check(self, tensors: Sequence[Tensor]) -> None:
        """Raise an error unless the kernel does what the step does, with the same random numbers, at several points."""
        writes, own = self._recorded.writes, self._recorded.own
        mine = [value.clone() for value in tensors]
        self._generator.manual_seed(0)
        drawn = self._room_for_draws(1)
        bound = self._bound(mine, drawn, 1)
        each = {k: self._recorded.inputs[k] for k in self._recorded.each}
        for away in _AWAY:
            for value in mine[:writes]:
                if value.is_floating_point():
                    like: Any = {"dtype": value.dtype, "device": value.device, "generator": self._generator}
                    value.add_(torch.randn(value.shape, **like).abs_(), alpha=away)
            self._draw(drawn)
            last = self._copies - 1  # the last network stands for all
            theirs = [each.get(k, value[last] if k in own else value).clone() for k, value in enumerate(mine)]
            numbers = [value[0, last] for value in drawn]
            with torch.no_grad():
                expected = WithDraws(self._recorded.graph, self._source.draws, numbers).run(*theirs)
            pairs = zip(each.values(), bound.each, strict=True)
            found = self._launched(bound, 0, 1, [value.expand(place.shape) for value, place in pairs])
            results = [*mine[:writes], *(value[0] for value in found)]
            results = [value[last] for value in results] if self._many else results
            if not all(_alike(one, other) for one, other in zip(results, expected, strict=True)):
                raise WrongKernelError("the kernel does not compute what the step does")


@dataclass(frozen=True)
class _Bound:
    """What a kernel is called with.

    Attributes:
        addresses: of all tensors.
        each: those that differ from step to step.
        results: where results go.
        whole: all tensors, which must live as long as their addresses.
    """

    addresses: Tensor
    each: list[Tensor]
    results: list[Tensor]
    whole: list[Tensor]


class TooLargeError(UnsupportedError):
    """A step is too large for a kernel, however it is written."""


class WrongKernelError(RuntimeError):
    """A kernel does not compute what the recorded step does."""


class WithDraws(fx.Interpreter):
    """Runs a graph with given random numbers."""

    def __init__(self, graph: fx.GraphModule, draws: Draws, drawn: Sequence[Tensor]) -> None:
        super().__init__(graph)
        self._places, self._drawn = draws.places, dict(zip(draws.counts, drawn, strict=True))

    def run_node(self, n: fx.Node) -> Any:
        """Run one operation, or take its random numbers from those given."""
        if n in self._places:
            key, begin = self._places[n]
            example: Tensor = n.meta["val"]
            return self._drawn[key][begin : begin + example.numel()].view(example.shape)
        return super().run_node(n)


def _alike(left: Tensor, right: Tensor) -> bool:
    slack = _CLOSE.get(left.dtype, 1e-2)
    size = max(1.0, float(right.double().nan_to_num(0.0, 0.0, 0.0).abs().max())) if right.numel() else 1.0
    return torch.allclose(left.double(), right.double(), rtol=slack, atol=slack * size, equal_nan=True)


def _compiled(source: Source, device: torch.device) -> Callable[..., None]:
    kernel = compiled_kernel(source.text, "steps", device, source.memory)

    def run(copies: int, far: Tensor, addresses: Tensor, first: int, count: int) -> None:
        given: list[Tensor | int] = [far, addresses, first, count]
        blocks = copies * source.processors
        with torch.cuda.device(device):
            if source.processors > 1:
                launched_together(kernel, blocks, source.threads, given)
            else:
                kernel((blocks, 1, 1), (source.threads, 1, 1), given, shared_mem=source.memory)

    return run
