"""All chains on a GPU, in a kernel with one block of threads for each chain: some hundred steps in one launch.

A chain's state lies in the memory that its threads share. No chain waits for another, and the host looks at them only
between launches. Random numbers are those of a run on the CPU. The host draws those of the next launch while the GPU is
at work: noise for each step, and momenta in a ring of twice as many rows as a launch can use. Those that a launch has
used are replaced during the next one, which has enough of its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pyro_dropout.engines.cuda.loops import Loops
from pyro_dropout.engines.cuda.recorded import (
    LANES,
    PREAMBLE,
    compiled_kernel,
    lowered,
    outside,
    packed,
    processor,
)
from pyro_dropout.engines.generated.values import WORD, Constants, UnsupportedError, Value, c_type
from pyro_dropout.references.nuts.adaptation import Plan, Tuning
from pyro_dropout.references.nuts.no_u_turn import HALF, LEAF, Array, Randoms, Tree, counts_of
from pyro_dropout.references.nuts.stepping import Stepping

Function = Callable[..., list[Array]]
# Takes the states of all chains, (C, words), the constants, noise (C, steps, 3), momenta (C, M, d), draws, the steps
# spent on them, and two numbers: how many steps to take, and how many were taken before.
Launch = Callable[..., None]

_FIELDS = (*Tree._fields, *Tuning._fields)
THREADS = 256  # of a chain

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
    """A kernel's source in C++, and what it needs."""

    text: str  # a chain's memory is shared by its threads or, if FAR is defined, in that of the GPU
    constants: Tensor  # those that it reads, one after another, each at a multiple of 8 bytes
    memory: int  # bytes that a chain's threads share
    threads: int  # of a chain


def kernel_source(
    leaf: Function,
    turn: Function,
    state: Sequence[Tensor],
    momenta: Tensor,
    plan: Plan,
    size: int,
    *,
    threads: int = THREADS,
    lanes: int = LANES,
) -> Source:
    """Return the source of a kernel from both functions of a step, of which ``size`` coordinates are kept.

    ``state``, (1, ...) each, and the ring of momenta, (1, M, d), are those of one chain; ``lanes`` threads can exchange
    numbers. ``leaf`` makes (*state, noise) the new trees, and whether one has ended; ``turn`` makes (*state, noise,
    momenta) the new state, and whether draws are left.
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
            "if (!a_flag) continue;",
            f"const double drawn = {draw}[0];",
            bodies[1],
            f"if ({draw}[0] > drawn) {{",
            f"const int kept = (int){draw}[0] - 1 - {plan.warmup};",
            f"double* place = draws + ((long long)chain * {plan.samples} + kept) * {size};",
            f"if (kept >= 0) for (int i = tid; i < {size}; i += {threads}) place[i] = {layout.name('chosen_z')}[i];",
            "if (tid == 0) spent[chain] = before + step + 1;",
            "}",
            "if (!b_flag) break;",
            "}",
            "BARRIER;",
            f"for (int i = tid; i < {layout.words}; i += {threads}) state[i] = memory[i];",
            "}",
            _ENTRY.format(threads=threads, inputs=_INPUTS, words=layout.words + most),
        ]
    )
    return Source(text, held, WORD * (layout.words + most), threads)


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
    loops.stored(f"{prefix}_flag", flag)
    written = loops.written([value.name or "" for _, value in changed])
    places, words, _ = loops.memory(layout.words)
    copies = []
    for size in sorted({value.size for _, value in changed}):
        each = " ".join(
            f"s{k}[i] = {value.name}{'' if size == 1 else '[i]'};" for k, value in changed if value.size == size
        )
        copies.append(f"for (int i = tid; i < {size}; i += {threads}) {{ {each} }}")
    return "\n".join([*places, *written, "BARRIER;", *copies, "BARRIER;"]), words - layout.words


_MIDDLE = 0.5  # noise of the step that is checked
_ALIKE = 1e-6  # by how much it may be off: more than by rounding
_FEW, _MANY = 64, 512  # steps of one launch; with many, what the host does between two of them is short
_MOMENTA = 2**24  # numbers that the momenta of all chains may have, beyond those of few steps

_MOST = 2**22  # bytes of one chain: with more, a processor of the GPU is too slow for it


def compiled(source: Source, device: torch.device) -> Launch:
    """Return a function that runs a kernel on a GPU, without waiting for it."""
    if source.memory > _MOST:
        raise UnsupportedError(f"a chain of this model needs {source.memory} bytes, and may have {_MOST}")
    near = source.memory <= processor(device)[0]
    shared = source.memory if near else 0
    kernel = compiled_kernel(source.text if near else "#define FAR\n" + source.text, "chains", device, shared)
    far: list[Tensor] = []

    def run(states: Tensor, *others: Tensor | int) -> None:
        if not far:
            far.append(states if near else states.new_empty(len(states), source.memory // states.itemsize))
        with torch.cuda.device(device):
            kernel((len(states), 1, 1), (source.threads, 1, 1), [far[0], states, *others], shared_mem=shared)

    return run


class ChainsOnGpu:
    """Chains that go on where others have stopped: their steps, random numbers, draws (C, draws, d), and steps spent.

    One launch takes ``steps``; by default as many as the memory for momenta allows, within bounds.
    """

    def __init__(
        self,
        stepping: Stepping,
        plan: Plan,
        random: Randoms,
        draws: NDArray[np.float64],
        spent: NDArray[np.int64],
        device: torch.device,
        steps: int | None = None,
        compile: Callable[[Source, torch.device], Launch] = compiled,
        *,
        threads: int = THREADS,
        lanes: int = LANES,
    ) -> None:
        whole = [torch.as_tensor(value).contiguous() for value in (*stepping.tree, *stepping.tuning)]
        self._used = counts_of(stepping.tuning.moves)
        chains, _, width = random.ring.shape
        steps = steps or min(max(_MOMENTA // (2 * chains * width), _FEW), _MANY)
        self._random, self.steps, self._device = random, steps, device
        ring = random.grown(2 * steps)
        one = [part[:1].clone() for part in whole]
        with stepping.functions() as (leaf, turn):
            source = kernel_source(leaf, turn, one, ring[:1], plan, draws.shape[2], threads=threads, lanes=lanes)
            expected = _stepped(leaf, turn, whole, ring)
        self._launch = compile(source, device)
        self._shapes = [(part.shape, part.dtype) for part in whole]
        flat = [part.reshape(len(part), -1).view(torch.float64) for part in whole]
        self._state = torch.cat(flat, 1).to(device)
        self._constants, self._ring = source.constants.to(device), ring.to(device)
        self._draws = torch.from_numpy(draws).to(device, copy=True)
        self._spent = torch.from_numpy(spent.astype(np.int64)).to(device, copy=True)
        self._check(expected, plan.warmup + plan.samples)
        self._noise = self._next_noise()

    def _check(self, expected: Sequence[Tensor], total: int) -> None:
        """Raise an error unless the kernel's first step is that of the CPU."""
        before = self._state.clone()
        unfinished = (self.tuning.draw < total).cpu().flatten()
        noise = torch.full((len(before), 1, 3), _MIDDLE, dtype=torch.float64, device=self._device)
        others = (noise, self._ring, self._draws.clone(), self._spent.clone())
        self._launch(self._state, self._constants, *others, 1, 0)
        for name, one, other in zip(_FIELDS, self._parts(), expected, strict=True):
            found, asked = one.cpu()[unfinished].double(), other[unfinished].double()
            if not torch.allclose(found, asked, rtol=_ALIKE, atol=_ALIKE, equal_nan=True):
                raise UnsupportedError(f"the kernel's {name} is not that of the model")
        self._state = before

    def block(self, before: int) -> NDArray[np.int64]:
        """Take the steps of one launch, and return how many draws each chain has; ``before`` counts those before."""
        inputs = (self._constants, self._noise, self._ring, self._draws, self._spent)
        self._launch(self._state, *inputs, self.steps, before)
        self._noise = self._next_noise()  # while the GPU is at work
        self._replace_momenta()
        tuning = self.tuning
        moves, draw = (counts_of(part) for part in torch.stack([tuning.moves.double(), tuning.draw]).cpu())
        self._used = moves
        return draw

    def _next_noise(self) -> Tensor:
        noise = 1 - self._moved(self._random.uniform(self.steps))  # never 0
        log = -torch.log(noise)
        noise[..., HALF] = log[..., HALF]
        noise[..., LEAF] = -torch.log(log[..., LEAF])  # 1 gives infinite noise, by which the leaf is chosen
        return noise

    def _replace_momenta(self) -> None:
        """Replace the momenta that were used before the launch that is at work; the copy waits for it, not the host."""
        chains, rows = self._random.replace(self._used)
        if len(chains):
            new = self._moved(self._random.ring[chains, rows])
            where = self._moved(np.stack([chains, rows]))
            self._ring[where[0], where[1]] = new

    def _moved(self, values: NDArray[Any]) -> Tensor:
        found = torch.from_numpy(values)
        return found.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else found

    @property
    def tuning(self) -> Tuning:
        """What the chains have adapted."""
        return Tuning(*self._parts()[len(Tree._fields) :])

    def _parts(self) -> list[Tensor]:
        parts: Any = self._state.split([shape[1:].numel() for shape, _ in self._shapes], 1)
        pairs = zip(parts, self._shapes, strict=True)
        return [part.view(dtype).reshape(shape) for part, (shape, dtype) in pairs]

    def results(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Return the draws, (C, draws, d), and the steps that each chain took until its last one."""
        return self._draws.cpu().numpy(), self._spent.cpu().numpy()


def _stepped(leaf: Function, turn: Function, state: list[Tensor], ring: Tensor) -> list[Tensor]:
    """Return a state after one step with noise from the middle."""
    noise = torch.full((len(ring), 3), _MIDDLE, dtype=torch.float64)
    *tree, ended = leaf(*state, noise)
    state = [*tree, *state[len(tree) :]]
    return turn(*state, noise, ring)[:-1] if ended else state
