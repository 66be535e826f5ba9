"""Runs all pairs of draws and data points in blocks that fit into memory.

A block is some draws at some points: one forward pass, reduced over its draws before anything is kept. How many rows
fit is measured by running the model on one point and on two.
"""

import functools
import math
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from pyro import poutine
from torch import Tensor
from tqdm.auto import tqdm

from pyro_dropout.engines.program import Program
from pyro_dropout.engines.torch_internals import TorchDispatchMode, tree_leaves
from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.generative.inputs import AnyInputs, copies, leaves_of, takes_all
from pyro_dropout.generative.model_call import ModelCall
from pyro_dropout.generative.process_state import forked, random_state, seeded, set_random_state
from pyro_dropout.generative.trial_run import evaluating, quietly
from pyro_dropout.prediction.weight_draws import WholeFunctions
from pyro_dropout.protocols import Weights
from pyro_dropout.training.compile.functional import Parameters, unvalidated
from pyro_dropout.training.history import is_out_of_memory, unless_out_of_memory


class _Sizes(TorchDispatchMode):
    """Records how many bytes each operation returns; a view that repeats its rows has no memory for them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.each: list[int] = []

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.each.append(sum(min(leaf.nbytes, leaf.untyped_storage().nbytes()) for leaf in tensors))
        return result


def bytes_per_row(run: Callable[[int], object]) -> int:
    """Return by how many bytes the largest result of an operation grows with a row; ``run`` takes how many."""
    sizes: list[list[int]] = []
    for rows in (1, 2):
        with _Sizes() as seen:
            run(rows)
        sizes.append(seen.each)
    if len(sizes[0]) != len(sizes[1]):  # it does other things with two rows
        return max(sizes[1]) // 2
    return max((two - one for one, two in zip(*sizes, strict=True)), default=0)


Result = TypeVar("Result")
Reduce = Callable[[Tensor], Result]  # outputs (T, N, D) of a block -> its result

_CPU_ROWS = 8192  # more rows do not make a row faster
_CPU_BYTES = 2**30  # of the largest tensor in a forward pass; a pass holds a few of them
_CUDA_ROWS = 2**20
_TRIAL_ROWS = 1024


@dataclass(frozen=True)
class Block:
    """Some draws at some points, or of some replicas of a fleet.

    Attributes:
        drawn: the draws whose weights are made together.
        draws: those of them that this block runs.
        points: the data points, or the replicas.
        whole: whether its points stay together.
    """

    drawn: slice
    draws: slice
    points: slice
    whole: bool = False

    @property
    def count(self) -> int:
        """How many draws it runs."""
        return int(self.draws.stop - self.draws.start)

    @property
    def rows(self) -> int:
        """How many pairs of a draw and a point it has."""
        return self.count * int(self.points.stop - self.points.start)

    @property
    def smallest(self) -> bool:
        """Whether it cannot be divided."""
        return self.rows == 1 or (self.whole and self.count == 1)

    def within(self, rows: int) -> Iterator["Block"]:
        """Yield the block in parts of at most ``rows`` rows, if it can be: draws are divided first, then points."""
        if self.rows <= max(1, rows) or self.smallest:
            yield self
            return
        whole = self.draws if self.count > 1 else self.points
        middle = (whole.start + whole.stop) // 2
        for half in (slice(whole.start, middle), slice(middle, whole.stop)):
            parts = (half, self.points) if self.count > 1 else (self.draws, half)
            yield from Block(self.drawn, *parts, self.whole).within(rows)


Receive = Callable[[Block, Result], None]  # is given the results; for each point the draws come in order


def run_blocks(
    blocks: list[Block],
    run: Callable[[Block], Result],
    receive: Receive[Result],
    prepare: Callable[[Block], None] = lambda block: None,
) -> None:
    """Run blocks in order; smaller ones if memory runs out.

    ``prepare`` is called before a block, and not repeated by the halves of one that did not fit.
    """
    todo = deque(blocks)
    while todo:
        block = todo.popleft()
        prepare(block)
        before = random_state()
        # The smallest block cannot be halved, so torch's error is raised.
        result = run(block) if block.smallest else unless_out_of_memory(functools.partial(run, block))
        if result is None:
            set_random_state(before)
            # What did not fit once will not fit later: the remaining blocks are split too.
            todo = deque(part for each in (block, *todo) for part in each.within(block.rows // 2))
            continue
        receive(block, result)


class Walk:
    """All draws at all points.

    Args:
        weights: how to put the posterior's weights into the model.
        x: the data points.
        samples: how many draws.
        chunk: rows of one forward pass; by default what fits.
        seed: for the random numbers; without one they come from torch's generators in their current state.
        compile: whether a block is compiled.
        together: draws whose weights are made together; by default what fits.
    """

    def __init__(
        self,
        weights: WholeFunctions,
        x: AnyInputs,
        samples: int,
        *,
        chunk: int | None = None,
        seed: int | None = None,
        compile: bool = False,
        together: int | None = None,
    ) -> None:
        self.weights, self.x, self.samples, self.seed, self.compile = weights, x, samples, seed, compile
        self._programs: dict[Hashable, Program] = {}
        whole = takes_all(weights.model)
        self._some = x if whole else x[:1]
        with forked(), evaluating(weights.model, weights.posterior):
            self.like = weights.one(self._some)
            most = weights.most(samples, self._some)
            rows = chunk or self._rows_that_fit(whole)
        points = len(x) if whole else _even(len(x), max(1, rows // (together or 1)))
        self.together = draws = together or _even(samples, min(most, max(1, rows // points)))
        self.blocks = [Block(drawn, drawn, p, whole) for drawn in cuts(samples, draws) for p in cuts(len(x), points)]

    def run(self, reduce: Reduce[Result], receive: Receive[Result], progress: bool = False) -> None:
        """Run all blocks, and pass every result to ``receive``; compiled blocks are of the first ``reduce``."""
        held: slice | None = None
        weights: Weights = {}
        call = ModelCall(self.weights.model, (self.x,))

        def draw(block: Block) -> None:
            nonlocal held, weights
            if block.drawn != held:
                held, weights = block.drawn, self.weights.draw(block.drawn.stop - block.drawn.start, call)

        def run(block: Block) -> Result:
            first = block.drawn.start
            own = {k: w[block.draws.start - first : block.draws.stop - first] for k, w in weights.items()}
            x = self.x[block.points]
            if self.compile:
                return self._compiled(reduce, block.count, own, x)
            return reduce(self.weights.outputs(own, x, block.count))

        def pass_on(block: Block, result: Result) -> None:
            receive(block, result)
            bar.update(block.rows)

        total = self.samples * len(self.x)
        with (
            seeded(self.seed, self.x.device),
            evaluating(self.weights.model, self.weights.posterior),
            tqdm(total=total, disable=not progress, unit="row", unit_scale=True, desc="predict") as bar,
        ):
            self.weights.begin()
            run_blocks(self.blocks, run, pass_on, draw)

    @functools.cached_property
    def _parameters(self) -> Parameters:
        return Parameters(self.weights.model, self.weights.posterior, self.weights, (self._some,), {})

    def _compiled(self, reduce: Reduce[Result], count: int, weights: Weights, x: AnyInputs) -> Result:
        values = self._parameters.values
        key = (count, *((each.shape, each.dtype) for each in leaves_of(x)))
        if key not in self._programs:

            def run(values: list[Tensor], weights: Weights, x: AnyInputs) -> Result:
                with unvalidated(), poutine.block(), self._parameters.replaced(values):
                    return reduce(self.weights.outputs(weights, x, count))

            try:
                with quietly(self.weights.model, self.weights.posterior):
                    self._programs[key] = Program(run, values, weights, x)
            except Exception as cause:
                if is_out_of_memory(cause):
                    raise
                raise PyroDropoutError(
                    f"this model or posterior cannot be compiled for prediction: {cause} Use compile=False."
                ) from cause
        found: Result = self._programs[key](values, weights, x)
        return found

    def _rows_that_fit(self, whole: bool) -> int:
        """Return how many rows one pass may have, a power of two, so that a seed gives the same draws.

        On the CPU they keep the largest tensor small, whatever the machine; on a GPU they use half of the free memory.
        """
        if not self.x.is_cuda:
            each = 1 if whole else bytes_per_row(lambda rows: self.weights.one(copies(self._some, rows)))
            most = min(_CPU_ROWS, _CPU_BYTES // max(1, each))
        else:
            x, device = self.x if whole else self.x[:_TRIAL_ROWS], self.x.device
            self.weights.one(x)  # libraries allocate their workspace on first use
            before = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
            self.weights.one(x)
            peak = max(1, torch.cuda.max_memory_allocated(device) - before)
            unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
            free = torch.cuda.mem_get_info(device)[0] + unused
            most = min(_CUDA_ROWS, int(free / 2 * len(x) / peak))
        return 1 << max(0, most.bit_length() - 1)


def cuts(total: int, size: int) -> list[slice]:
    """Return slices of at most ``size`` that cover ``total`` items."""
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def _even(total: int, most: int) -> int:
    """Return a size of at most ``most`` that divides ``total`` evenly if one near it does: fewer shapes to compile."""
    most = min(total, most)
    for size in range(most, max(most // 2, most - 4096), -1):
        if total % size == 0:
            return size
    return math.ceil(total / math.ceil(total / most))
