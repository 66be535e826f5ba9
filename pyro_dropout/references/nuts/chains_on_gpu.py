"""All chains on a GPU, each for itself, some hundred steps in one launch; the host looks at them only between launches.

Random numbers are those of a run on the CPU. The host draws those of the next launch while the GPU is at work: noise
for each step, and momenta in a ring of twice as many rows as a launch can use. Those that a launch has used are
replaced during the next one, which has enough of its own.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pyro_dropout.engines.cuda import launch
from pyro_dropout.engines.cuda.recorded import LANES
from pyro_dropout.engines.cuda.values import UnsupportedError
from pyro_dropout.references.nuts.adaptation import Plan, Tuning
from pyro_dropout.references.nuts.chain_source import THREADS, Source, kernel_source
from pyro_dropout.references.nuts.no_u_turn import HALF, LEAF, Array, Tree
from pyro_dropout.references.nuts.randoms import Randoms
from pyro_dropout.references.nuts.stepping import Stepping

_MIDDLE = 0.5  # noise of the step that is checked
_ALIKE = 1e-6  # by how much it may be off: more than by rounding
_FEW, _MANY = 64, 512  # steps of one launch; with many, what the host does between two of them is short
_MOMENTA = 2**24  # numbers that the momenta of all chains may have, beyond those of few steps

_MOST = 2**22  # bytes of one chain: with more, a processor of the GPU is too slow for it

Function = Callable[..., list[Array]]
# Takes the states of all chains, (C, words), the constants, noise (C, steps, 3), momenta (C, M, d), draws, the steps
# spent on them, and two numbers: how many steps to take, and how many were taken before.
Launch = Callable[..., None]


def compiled(source: Source, device: torch.device) -> Launch:
    """Return a function that runs a kernel on a GPU, without waiting for it."""
    if source.memory > _MOST:
        raise UnsupportedError(f"a chain of this model needs {source.memory} bytes, and may have {_MOST}")
    near = source.memory <= launch.near_memory(device)
    shared = source.memory if near else 0
    kernel = launch.compiled(source.text if near else "#define FAR\n" + source.text, "chains", device, shared)
    far: list[Tensor] = []

    def run(states: Tensor, *others: Tensor | int) -> None:
        if not far:
            far.append(states if near else states.new_empty(len(states), source.memory // states.itemsize))
        with torch.cuda.device(device):
            kernel((len(states), 1, 1), (source.threads, 1, 1), [far[0], states, *others], shared_mem=shared)

    return run


class ChainsOnGpu:
    """Chains that go on where others have stopped.

    Args:
        stepping: the chains so far.
        plan: settings.
        random: their random numbers.
        draws: the draws so far, (C, draws, d); the others are filled in.
        spent: the steps of each chain until its last draw.
        device: where.
        steps: of one launch; by default as many as the memory for momenta allows, within bounds.
        compile: makes a function of a source.
        threads, lanes: of a chain, and how many of them can exchange numbers.
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
        self._used = _column(stepping.tuning.moves)
        chains, _, width = random.ring.shape
        steps = steps or min(max(_MOMENTA // (2 * chains * width), _FEW), _MANY)
        self._random, self._steps, self._device = random, steps, device
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
        for name, one, other in zip((*Tree._fields, *Tuning._fields), self._parts(), expected, strict=True):
            found, asked = one.cpu()[unfinished].double(), other[unfinished].double()
            if not torch.allclose(found, asked, rtol=_ALIKE, atol=_ALIKE, equal_nan=True):
                raise UnsupportedError(f"the kernel's {name} is not that of the model")
        self._state = before

    def block(self, before: int) -> NDArray[np.int64]:
        """Take the steps of one launch, and return how many draws each chain has; ``before`` counts those before."""
        inputs = (self._constants, self._noise, self._ring, self._draws, self._spent)
        self._launch(self._state, *inputs, self._steps, before)
        self._noise = self._next_noise()  # while the GPU is at work
        self._replace_momenta()
        tuning = self.tuning
        moves, draw = (_column(part) for part in torch.stack([tuning.moves.double(), tuning.draw]).cpu())
        self._used = moves
        return draw

    @property
    def steps(self) -> int:
        """The steps of one launch."""
        return self._steps

    def _next_noise(self) -> Tensor:
        noise = 1 - self._moved(self._random.uniform(self._steps))  # never 0
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
    def tree(self) -> Tree:
        """The trees."""
        return Tree(*self._parts()[: len(Tree._fields)])

    @property
    def tuning(self) -> Tuning:
        """What the chains have adapted."""
        return Tuning(*self._parts()[len(Tree._fields) :])

    def _parts(self) -> list[Tensor]:
        sizes = [shape[1:].numel() for shape, _ in self._shapes]
        parts = self._state.split(sizes, 1)
        pairs: Sequence[Any] = list(zip(parts, self._shapes, strict=True))
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


def _column(numbers: Any) -> NDArray[np.int64]:
    """Return the numbers of a column (C, 1) as integers."""
    return np.asarray(numbers)[:, 0].astype(np.int64)
