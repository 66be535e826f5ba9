"""Many chains of the no-U-turn sampler in one batch of tensors, each with its own step size and scales from warmup.

One step evaluates the model once for all chains and adds one leaf to the tree of each. No chain waits for another: one
whose trajectory ends draws the next momentum at once. Each chain has random numbers of its own, so its draws do not
depend on how many others there are.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from pyro_dropout.mathematics.errors import PyroDropoutError
from pyro_dropout.references.nuts.adaptation import Plan, begun, untuned
from pyro_dropout.references.nuts.no_u_turn import HALF, LEAF, Array, planted
from pyro_dropout.references.nuts.stepping import Energies, Stepping
from pyro_dropout.training.compile.decision import Compile

Tick = Callable[[int, int], None]  # is told how many draws are new, and how many steps have been taken in all

_LANES = 16  # numbers that a processor takes together, at most
_BLOCK = 64  # steps for which random numbers are drawn together
_WORTH_RECORDING = 192  # steps after which the run is worth a recording, which takes as long as about that many
_WORTH_TELLING = 1500  # steps after which a run is long
_WORTH_COMPILING = 12_000  # steps to come that save about as much time as the compiler takes, half a minute


@dataclass
class ChainResult:
    """The result of one chain.

    Attributes:
        draws: positions after warmup, (draws, d).
        diverged: number of divergent trajectories.
        deepest: number of trajectories that reached the maximum depth.
        step: the leapfrog step size.
        scale: the scale of each coordinate.
        steps: number of leapfrog steps, those of warmup included.
    """

    draws: NDArray[np.float64]
    diverged: int
    deepest: int
    step: float
    scale: NDArray[np.float64]
    steps: int


def run_chains(
    energies: Energies,
    starts: Tensor,
    plan: Plan,
    seed: int,
    tick: Tick = lambda draws, steps: None,
    compile: Compile = False,
) -> list[ChainResult]:
    """Run one chain from each row of ``starts``, (chains, d), with one call of ``energies`` per step of all chains.

    ``tick`` is called after every few steps.
    """
    run = _Run(energies, starts, plan, seed, compile)
    while run.left:
        tick(run.block(), run.steps)
    return run.results()


class _Run:
    """The chains of one call, which go on block by block until none has draws left."""

    def __init__(self, energies: Energies, starts: Tensor, plan: Plan, seed: int, compile: Compile) -> None:
        self._plan, self._compile = plan, compile
        size = starts.shape[1]
        more = -size % _LANES
        self._random = _Randoms(seed, len(starts), size, more, starts.device)
        self._on_cpu = starts.device.type == "cpu"
        _check_starts(*energies(starts))

        def padded(z: Tensor) -> tuple[Tensor, Tensor]:
            energy, slope = energies(z[:, :size])
            return energy, pad(slope, (0, more))

        # Coordinates that stay at 0 fill whole vectors of the processor; nothing else depends on them.
        starts = pad(starts, (0, more))
        energy, slope = padded(starts)
        first: list[Array] = [starts, energy[:, None], slope]
        z, energies_at, slopes = [_numpy(each) for each in first] if self._on_cpu else first
        tree = planted(z, energies_at, slopes, plan.max_depth + 1)
        tree, tuning = begun(tree, untuned(z), self._random.momenta(not self._on_cpu))
        self._stepping = Stepping(padded, plan, tree, tuning)
        self._done = np.zeros(len(starts), int)  # draws of each chain
        self._draws = np.empty((len(starts), plan.samples, size))
        self._spent = np.zeros(len(starts), int)  # steps of each chain until its last draw
        self._cause: Exception | None = None
        self.steps, self.left = 0, True

    def block(self) -> int:
        """Take a number of steps, and return how many draws they gave."""
        self._decide()
        stepping = self._stepping
        numbers = self._random.block(_whole(stepping.tuning.moves), stepping.on_torch)
        momenta = self._random.momenta(stepping.on_torch)
        turns: list[tuple[int, Array, Array]] = []
        for noise in numbers:
            ended = stepping.leaf(noise)
            self.steps += 1
            # To ask a GPU would be to wait for it, so there everything that may be needed is done.
            if not self._on_cpu or ended:
                left = stepping.turn(noise, momenta)
                turns.append((self.steps, stepping.tuning.draw + 0, stepping.tree.chosen_z + 0))  # copies
                if self._on_cpu and not left:
                    break
        return self._collected(turns)

    def _collected(self, turns: list[tuple[int, Array, Array]]) -> int:
        """Keep the draws that a block gave, and return how many there are, those of warmup included."""
        before = self._done
        if turns:
            steps, draws, points = zip(*turns, strict=True)
            counts = np.stack([_whole(draw) for draw in draws])
            turn, chain = np.nonzero(np.diff(counts, axis=0, prepend=before[None]))
            draw = counts[turn, chain] - 1 - self._plan.warmup
            self._spent[chain] = np.array(steps)[turn]  # the last of each chain stays
            kept = draw >= 0
            found = np.stack([_numpy(point) for point in points])[:, :, : self._draws.shape[2]]
            self._draws[chain[kept], draw[kept]] = found[turn[kept], chain[kept]]
            self._done = counts[-1]
        self.left = bool((self._done < self._plan.warmup + self._plan.samples).any())
        return int((self._done - before).sum())

    def _decide(self) -> None:
        """Record or compile the steps if that pays off; by counts alone, so that the same call decides the same."""
        how, total = self._stepping.how, self._plan.warmup + self._plan.samples
        slowest = int(self._done.min())
        to_come = self.steps / max(slowest, 1) * (total - slowest)
        if self._compile is True and how == "eager":
            self._try(self._compiled)
        if self._compile != "auto" or self.steps < _WORTH_RECORDING:
            return
        if how == "eager" and self._cause is None:
            self._try(self._stepping.record)
        elif how == "recorded" and self._cause is None and slowest and to_come > _WORTH_COMPILING:
            self._try(self._compiled)
        if self._cause is not None and how == "eager" and self.steps >= _WORTH_TELLING > self.steps - _BLOCK:
            warnings.warn(f"this model cannot be compiled, so sampling is slow: {self._cause}", stacklevel=2)

    def _compiled(self) -> None:
        momenta = self._random.momenta(True)
        self._stepping.compile(momenta.new_zeros(len(momenta), 3), momenta)

    def _try(self, change: Callable[[], None]) -> None:
        try:
            change()
        except Exception as cause:
            if self._compile is True:
                raise PyroDropoutError(f"this model cannot be compiled: {cause} Use compile=False.") from cause
            self._cause = cause

    def results(self) -> list[ChainResult]:
        """Return the result of each chain."""
        tuning = self._stepping.tuning
        return [
            ChainResult(
                self._draws[c],
                int(tuning.diverged[c, 0]),
                int(tuning.deepest[c, 0]),
                float(tuning.step[c, 0]),
                _numpy(tuning.scale)[c, : self._draws.shape[2]],
                int(self._spent[c]),
            )
            for c in range(len(self._draws))
        ]


class _Randoms:
    """Random numbers of each chain: noise for the leaves of a block, and momenta in a ring, (chains, M, d).

    Momenta that a block has used are replaced before the next one, which uses at most one in each step. Their last
    coordinates, of which there are ``more``, are 0.
    """

    def __init__(self, seed: int, chains: int, size: int, more: int, device: torch.device) -> None:
        self._uniform = [np.random.default_rng([seed, c, 0]) for c in range(chains)]
        self._normal = [np.random.default_rng([seed, c, 1]) for c in range(chains)]
        self._size, self._ring = size, np.zeros((chains, _BLOCK, size + more))
        for row, random in zip(self._ring, self._normal, strict=True):
            row[:, :size] = random.standard_normal((_BLOCK, size))
        self._used = np.zeros(chains, int)
        self._device = device
        self._tensor: Tensor | None = None

    def momenta(self, on_torch: bool) -> Array:
        """Return the ring, as a tensor or as an array."""
        if not on_torch:
            return self._ring
        if self._tensor is None:
            self._tensor = torch.from_numpy(self._ring).to(self._device)  # on a CPU, it is the same memory
        return self._tensor

    def block(self, used: NDArray[np.int64], on_torch: bool) -> Sequence[Array]:
        """Return the noise of each step, (chains, 3); ``used`` counts the momenta used by each chain."""
        for c, random in enumerate(self._normal):
            rows = np.arange(self._used[c], used[c]) % _BLOCK
            self._ring[c, rows, : self._size] = random.standard_normal((len(rows), self._size))
        self._used = used
        if self._device.type != "cpu":
            self._tensor = None
        noise = 1 - np.stack([random.random((_BLOCK, 3)) for random in self._uniform], 1)  # never 0
        noise[..., [LEAF, HALF]] = -np.log(noise[..., [LEAF, HALF]])
        with np.errstate(divide="ignore"):  # 1 gives infinite noise, by which the leaf is chosen
            noise[..., LEAF] = -np.log(noise[..., LEAF])
        return torch.from_numpy(noise).to(self._device).unbind(0) if on_torch else list(noise)


def _numpy(values: Array) -> NDArray[Any]:
    """Return tensors and arrays as arrays."""
    found: NDArray[Any] = values.cpu().numpy() if isinstance(values, Tensor) else values
    return found


def _whole(numbers: Array) -> NDArray[np.int64]:
    """Return the numbers of a column (C, 1) as integers."""
    return _numpy(numbers)[:, 0].astype(int)


def _check_starts(energy: Tensor, slope: Tensor) -> None:
    for value, finite in zip(energy.tolist(), (energy.isfinite() & slope.isfinite().all(-1)).tolist(), strict=True):
        if not finite:
            raise PyroDropoutError(
                f"log p(y, w) is {-value} at the start of a chain, a draw from the prior; check that x and y are what"
                " the model expects, and that the prior is not far too wide."
            )
