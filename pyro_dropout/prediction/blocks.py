"""Runs all pairs of draws and data points in blocks that fit into memory, and can repeat a run with the same draws.

A block is some draws at some points: one forward pass, reduced over its draws before anything is kept. To repeat the
very same draws, a second pass needs the random state at the start and the blocks that the first pass used.
"""

import functools
import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from pyro import poutine
from torch import Tensor
from tqdm.auto import tqdm

from pyro_dropout.generative.random_state import forked, random_state, seeded, set_random_state
from pyro_dropout.generative.trial_run import evaluating, quietly
from pyro_dropout.mathematics.errors import PyroDropoutError
from pyro_dropout.prediction.draws.weight_draws import PerExample, Weights, WholeFunctions
from pyro_dropout.prediction.snapshot import fingerprint
from pyro_dropout.training.compile.functional import Parameters, unvalidated
from pyro_dropout.training.compile.program import Program

Reduce = Callable[..., Any]  # outputs (T, N, D) and what belongs to the N points -> tensors without T

_CPU_ROWS = 8192  # more rows do not make a row faster
_CUDA_ROWS = 2**20
_TRIAL_ROWS = 1024


@dataclass(frozen=True)
class Block:
    """Some draws at some points.

    Attributes:
        drawn: the draws whose weights are made together.
        draws: those of them that this block runs.
        points: the data points.
    """

    drawn: slice
    draws: slice
    points: slice

    @property
    def count(self) -> int:
        """How many draws it runs."""
        return int(self.draws.stop - self.draws.start)

    @property
    def rows(self) -> int:
        """How many pairs of a draw and a point it has."""
        return self.count * int(self.points.stop - self.points.start)

    def within(self, rows: int) -> Iterator["Block"]:
        """Yield the block in parts of at most ``rows`` rows, or of one row: draws are split first, then points."""
        if self.rows <= max(1, rows):
            yield self
            return
        for half in _halves(self.draws) if self.count > 1 else _halves(self.points):
            parts = (half, self.points) if self.count > 1 else (self.draws, half)
            yield from Block(self.drawn, *parts).within(rows)


class Walk:
    """All draws at all points.

    Args:
        weights: how to put the posterior's weights into the model.
        x: the data points.
        samples: how many draws.
        chunk: rows of one forward pass; by default what fits.
        seed: for the random numbers; without one they come from torch's generators in their current state.
        compile: whether a block is compiled.
    """

    def __init__(
        self,
        weights: PerExample | WholeFunctions,
        x: Tensor,
        samples: int,
        *,
        chunk: int | None,
        seed: int | None,
        compile: bool,
    ) -> None:
        self.weights, self.x, self.samples, self.seed, self.compile = weights, x, samples, seed, compile
        self._start = random_state()
        self._print: Any = None
        self._programs: dict[Any, Program] = {}
        with self._trial():
            self.like = self._outputs_of(x[:1])
            most = weights.most(samples, x[:1])
            rows = chunk or (self._rows_that_fit() if x.is_cuda else _CPU_ROWS)
        points = _even(len(x), rows)
        draws = _even(samples, min(most, max(1, rows // points)))
        self._blocks = [Block(drawn, drawn, p) for drawn in _cuts(samples, draws) for p in _cuts(len(x), points)]

    # --- the two passes -----------------------------------------------------------------------------------------------

    def first(self, label: str, reduce: Reduce, receive: Callable[[Block, Any], None], progress: bool = False) -> None:
        """Run all blocks, and pass every result to ``receive``; for each point the draws come in order."""
        with seeded(self.seed, self.x.device):
            self._start = random_state()
            self._blocks = self._walk(label, reduce, receive, (), progress)

    def again(self, label: str, reduce: Reduce, receive: Callable[[Block, Any], None], *of_points: Tensor) -> None:
        """Run the same blocks with the same draws; the generators are restored on exit."""
        if self._fingerprint() != self._print:
            raise PyroDropoutError(
                "the model, the posterior or x has changed since predict(), so its draws cannot be repeated, and"
                " they were not kept. Call predict() again, or use keep_samples=True."
            )
        with forked():
            set_random_state(self._start)
            self._walk(label, reduce, receive, of_points, False)

    def remember(self) -> None:
        """Record the values of all parameters, so that a second pass can check that they are the same."""
        self._print = self._fingerprint()

    def _walk(
        self, label: str, reduce: Reduce, receive: Any, of_points: tuple[Tensor, ...], progress: bool
    ) -> list[Block]:
        """Run all blocks, and return those that were run: smaller ones if memory ran out."""
        self.weights.begin()
        todo, taken = deque(self._blocks), []
        held, weights = None, {}
        total = self.samples * len(self.x)
        with (
            evaluating(self.weights.model, self.weights.posterior),
            tqdm(total=total, disable=not progress, unit="row", unit_scale=True, desc="predict") as bar,
        ):
            while todo:
                block = todo.popleft()
                if block.drawn != held:
                    held, weights = block.drawn, self.weights.draw(block.drawn.stop - block.drawn.start, self.x)
                result = self._tried(block, label, reduce, weights, of_points)
                if result is None:
                    # What did not fit once will not fit later: the remaining blocks are split too.
                    todo = deque(part for each in (block, *todo) for part in each.within(block.rows // 2))
                    continue
                receive(block, result)
                taken.append(block)
                bar.update(block.rows)
        return taken

    def _tried(self, block: Block, label: str, reduce: Reduce, weights: Weights, of_points: tuple[Tensor, ...]) -> Any:
        """Return a block's result; None, with random states restored, if memory runs out."""
        before = random_state()
        first = block.drawn.start
        own = {k: w[block.draws.start - first : block.draws.stop - first] for k, w in weights.items()}
        inputs = [each[block.points] for each in (self.x, *of_points)]
        try:
            if self.compile:
                return self._compiled(label, reduce, block.count, own, inputs)
            return reduce(self.weights.outputs(own, inputs[0], block.count), *inputs[1:])
        except torch.OutOfMemoryError:
            if block.rows == 1:
                raise
        # Only here is the traceback released, which holds the tensors of the failed pass.
        set_random_state(before)
        if self.x.is_cuda:
            torch.cuda.empty_cache()
        return None

    # --- compiled blocks ----------------------------------------------------------------------------------------------

    @functools.cached_property
    def _parameters(self) -> Parameters:
        return Parameters(self.weights.model, self.weights.posterior, self, (self.x[:1],), {})

    def differentiable_loss(self, model: Any, guide: Any, x: Tensor) -> Tensor:
        """Run one draw, so that callers can see which parameters it uses."""
        return self._outputs_of(x)

    def _compiled(self, label: str, reduce: Reduce, count: int, weights: Weights, inputs: list[Tensor]) -> Any:
        values = self._parameters.values
        key = (label, count, *((each.shape, each.dtype) for each in inputs))
        if key not in self._programs:

            def run(values: list[Tensor], weights: Weights, x: Tensor, *of_points: Tensor) -> Any:
                with unvalidated(), poutine.block(), self._parameters.replaced(values):
                    return reduce(self.weights.outputs(weights, x, count), *of_points)

            try:
                with quietly(self.weights.model, self.weights.posterior):
                    self._programs[key] = Program(run, values, weights, *inputs)
            except torch.OutOfMemoryError:
                raise
            except Exception as cause:
                raise PyroDropoutError(
                    f"this model or posterior cannot be compiled for prediction: {cause} Use compile=False."
                ) from cause
        return self._programs[key](values, weights, *inputs)

    # --- before the first step ----------------------------------------------------------------------------------------

    @contextmanager
    def _trial(self) -> Iterator[None]:
        """Within this context a run has no side effects on random states or networks."""
        with forked(), evaluating(self.weights.model, self.weights.posterior):
            yield

    def _outputs_of(self, x: Tensor, count: int = 1) -> Tensor:
        """Return the outputs of one draw at a few points."""
        return self.weights.outputs(self.weights.draw(count, x), x, count)

    def _rows_that_fit(self) -> int:
        """Return how many rows use half of the free memory, from the peak of a small block."""
        x, device = self.x[:_TRIAL_ROWS], self.x.device
        self._outputs_of(x)  # libraries allocate their workspace on first use
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        self._outputs_of(x)
        peak = max(1, torch.cuda.max_memory_allocated(device) - before)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + unused
        fits = max(1, min(_CUDA_ROWS, int(free / 2 * len(x) / peak)))
        return int(2 ** math.floor(math.log2(fits)))  # so that a seed gives the same draws every time

    def _fingerprint(self) -> list[Any]:
        with self._trial():
            return fingerprint(self.weights.model, self.weights.posterior, self, self.x)


def _halves(whole: slice) -> list[slice]:
    middle = (whole.start + whole.stop) // 2
    return [slice(whole.start, middle), slice(middle, whole.stop)]


def _cuts(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def _even(total: int, most: int) -> int:
    """Return a size of at most ``most`` that divides ``total`` evenly if one near it does: fewer shapes to compile."""
    most = min(total, most)
    for size in range(most, max(most // 2, most - 4096), -1):
        if total % size == 0:
            return size
    return math.ceil(total / math.ceil(total / most))
