"""Many chains of the no-U-turn sampler in one batch of tensors, each with its own step size and scales from warmup.

One step evaluates the model once for all chains and adds one leaf to the tree of each. No chain waits for another: one
whose trajectory ends draws the next momentum at once. Each chain has random numbers of its own, so its draws do not
depend on how many others there are. With a model on a GPU, long runs go on there, in one kernel.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from pyro_dropout.engines.choose import Compile
from pyro_dropout.engines.engine import CannotError
from pyro_dropout.errors import PyroDropoutError, warn_caller
from pyro_dropout.references.nuts.adaptation import Plan, Tuning, begun, untuned
from pyro_dropout.references.nuts.no_u_turn import Array, Randoms, counts_of, numpy_of, planted
from pyro_dropout.references.nuts.stepping import Energies, Stepping

if TYPE_CHECKING:  # loaded where a GPU is used
    from pyro_dropout.references.nuts.chains_on_gpu import ChainsOnGpu

Tick = Callable[[int, int], None]  # is told how many draws are new, and how many steps have been taken in all

_LANES = 16  # numbers that a processor takes together, at most
_BLOCK = 64  # steps for which random numbers are drawn together
_WORTH_RECORDING = 192  # steps after which the run is worth a recording, which takes as long as about that many
_WORTH_TELLING = 1500  # steps after which a run is long
_WORTH_COMPILING = 3_000  # steps to come that save about as much time as the compiler takes, a few seconds
_WORTH_A_GPU = 8_000  # the same for a GPU's kernel, which takes a few seconds
_CPU = torch.device("cpu")


@dataclass
class ChainResult:
    """The result of one chain."""

    draws: NDArray[np.float64]  # positions after warmup, (draws, d)
    diverged: int  # number of divergent trajectories
    deepest: int  # number of trajectories that reached the maximum depth
    step: float  # the leapfrog step size
    scale: NDArray[np.float64]  # of each coordinate
    steps: int  # number of leapfrog steps, those of warmup included


def run_chains(
    energies: Energies,
    starts: Tensor,
    plan: Plan,
    seed: int,
    tick: Tick = lambda draws, steps: None,
    compile: Compile = False,
    device: torch.device = _CPU,
) -> list[ChainResult]:
    """Run one chain from each row of ``starts``, (chains, d), with one call of ``energies`` per step of all chains.

    ``tick`` is called after every few steps. ``energies`` and ``starts`` are on the CPU. With a GPU as ``device``, the
    chains go on there, if the steps can be written as its kernel and there are enough of them.
    """
    run = _Run(energies, starts, plan, seed, compile, device)
    while run.left:
        tick(run.block(), run.steps)
    return run.results()


class _Run:
    """The chains of one call, which go on block by block until none has draws left."""

    def __init__(
        self, energies: Energies, starts: Tensor, plan: Plan, seed: int, compile: Compile, device: torch.device = _CPU
    ) -> None:
        self._plan, self._compile, self._device = plan, compile, device
        size = starts.shape[1]
        more = -size % _LANES
        self._random = Randoms(seed, len(starts), size, more, rows=_BLOCK)
        _check_starts(*energies(starts))

        def padded(z: Tensor) -> tuple[Tensor, Tensor]:
            energy, slope = energies(z[:, :size])
            return energy, pad(slope, (0, more))

        # Coordinates that stay at 0 fill whole vectors of the processor; nothing else depends on them.
        starts = pad(starts, (0, more))
        energy, slope = padded(starts)
        z, energies_at, slopes = [numpy_of(each) for each in (starts, energy[:, None], slope)]
        tree = planted(z, energies_at, slopes, plan.max_depth + 1)
        tree, tuning = begun(tree, untuned(z), self._random.ring)
        self._stepping = Stepping(padded, plan, tree, tuning)
        self._done = np.zeros(len(starts), int)  # draws of each chain
        self._draws = np.empty((len(starts), plan.samples, size))
        self._spent = np.zeros(len(starts), int)  # steps of each chain until its last draw
        self._cause: Exception | None = None
        self._gpu: ChainsOnGpu | None = None
        self.not_on_gpu: Exception | None = None  # why the chains do not run on the GPU
        self.steps, self.left = 0, True

    def block(self) -> int:
        """Take a number of steps, and return how many draws they gave."""
        self._decide()
        if self._gpu is not None:
            return self._block_on_gpu(self._gpu)
        stepping = self._stepping
        self._random.replace(counts_of(stepping.tuning.moves))
        momenta = self._random.ring
        turns: list[tuple[int, Array, Array]] = []
        for noise in self._random.noise(_BLOCK):
            ended = stepping.leaf(noise)
            self.steps += 1
            if ended:
                left = stepping.turn(noise, momenta)
                turns.append((self.steps, stepping.tuning.draw + 0, stepping.tree.chosen_z + 0))  # copies
                if not left:
                    break
        return self._collected(turns)

    def _block_on_gpu(self, gpu: "ChainsOnGpu") -> int:
        before, self._done = self._done, gpu.block(self.steps)
        self.steps += gpu.steps
        self.left = bool((self._done < self._plan.warmup + self._plan.samples).any())
        if not self.left:
            self._draws, self._spent = gpu.results()
        return int((self._done - before).sum())

    def _collected(self, turns: list[tuple[int, Array, Array]]) -> int:
        """Keep the draws that a block gave, and return how many there are, those of warmup included."""
        before = self._done
        if turns:
            steps, draws, points = zip(*turns, strict=True)
            counts = np.stack([counts_of(draw) for draw in draws])
            turn, chain = np.nonzero(np.diff(counts, axis=0, prepend=before[None]))
            draw = counts[turn, chain] - 1 - self._plan.warmup
            self._spent[chain] = np.array(steps)[turn]  # the last of each chain stays
            kept = draw >= 0
            found = np.stack([numpy_of(point) for point in points])[:, :, : self._draws.shape[2]]
            self._draws[chain[kept], draw[kept]] = found[turn[kept], chain[kept]]
            self._done = counts[-1]
        self.left = bool((self._done < self._plan.warmup + self._plan.samples).any())
        return int((self._done - before).sum())

    def _decide(self) -> None:
        """Record or compile the steps if that pays off; by counts alone, so that the same call decides the same."""
        at_once, how = self._compile is True, self._stepping.how
        if self._gpu is not None or not self._compile or not (at_once or self.steps >= _WORTH_RECORDING):
            return
        slowest = int(self._done.min())
        to_come = self.steps / max(slowest, 1) * (self._plan.warmup + self._plan.samples - slowest)
        if self._device.type == "cuda" and self.not_on_gpu is None and (at_once or to_come > _WORTH_A_GPU):
            try:
                self._to_gpu()
                return
            except Exception as cause:  # then the CPU goes on, with the same answers
                self.not_on_gpu = cause
        if at_once and how == "eager":
            self._try(self._compiled)
        elif how == "eager" and self._cause is None:
            self._try(self._stepping.record)
        elif how == "recorded" and self._cause is None and slowest and to_come > _WORTH_COMPILING:
            self._try(self._compiled)
        if self._cause is not None and how == "eager" and self.steps >= _WORTH_TELLING > self.steps - _BLOCK:
            warn_caller(f"this model cannot be compiled, so sampling is slow: {self._cause}")

    def _to_gpu(self, go_on: "Callable[..., ChainsOnGpu] | None" = None) -> None:
        if go_on is None:
            from pyro_dropout.references.nuts.chains_on_gpu import ChainsOnGpu

            go_on = ChainsOnGpu
        self._random.replace(counts_of(self._stepping.tuning.moves))
        self._gpu = go_on(self._stepping, self._plan, self._random, self._draws, self._spent, self._device)

    def _compiled(self) -> None:
        momenta = torch.from_numpy(self._random.ring)
        self._stepping.compile(momenta.new_zeros(len(momenta), 3), momenta)

    def _try(self, change: Callable[[], None]) -> None:
        try:
            change()
        except Exception as cause:
            if self._compile is True:
                raise PyroDropoutError(f"this model cannot be compiled: {cause} Use compile=False.") from cause
            if self._stepping.how == "recorded" and not isinstance(cause, CannotError):
                told = f"the engine 'C' failed ({type(cause).__name__}: {cause}), so recorded steps go on."
                warn_caller(f"{told} Please report this with your model.")
            self._cause = cause

    def results(self) -> list[ChainResult]:
        """Return the result of each chain."""
        tuning = self._stepping.tuning if self._gpu is None else self._gpu.tuning
        tuning = Tuning(*(numpy_of(part) for part in tuning))
        return [
            ChainResult(
                self._draws[c],
                int(tuning.diverged[c, 0]),
                int(tuning.deepest[c, 0]),
                float(tuning.step[c, 0]),
                tuning.scale[c, : self._draws.shape[2]],
                int(self._spent[c]),
            )
            for c in range(len(self._draws))
        ]


def _check_starts(energy: Tensor, slope: Tensor) -> None:
    for value, finite in zip(energy.tolist(), (energy.isfinite() & slope.isfinite().all(-1)).tolist(), strict=True):
        if not finite:
            raise PyroDropoutError(
                f"log p(y, w) is {-value} at the start of a chain, a draw from the prior: are x and y right, or is the"
                " prior far too wide?"
            )
