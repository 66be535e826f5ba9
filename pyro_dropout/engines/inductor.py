"""Steps that torch's compiler takes: on a CPU call by call, on a GPU many of them in one CUDA graph."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyro_dropout.engines.engine import CHAIN, Direct, Loop, Row, Step, Taken, copy_into
from pyro_dropout.engines.program import Function, Program, apart_in_memory, counting
from pyro_dropout.engines.torch_internals import tree_leaves
from pyro_dropout.protocols import Tree


class Inductor:
    """Compiles a step with inductor.

    A large network on a CPU has a program for the gradient alone, beside torch's own fused optimiser.
    """

    name = "inductor"

    def loop(self, step: Step) -> Loop:
        """Return what takes the steps."""
        if step.gradient is not None and (step.whole is None or (step.large and not step.t.is_cuda)):
            program = Program(step.gradient, step.values, step.t, *step.inputs, *step.row, fake=step.large)
            return Direct(step, program, self.name)
        if step.t.is_cuda:
            return whole_on_gpu(step, compile=True, name=self.name)
        program = step.recorded
        if program.writable:
            program.compile([*tree_leaves(step.arguments), *program.outside()])
        else:
            program = step.program()
        return Captured(step, program, self.name)


def whole_on_gpu(step: Step, *, compile: bool, name: str) -> Loop:
    """Return what takes whole steps on a GPU."""
    assert step.whole is not None
    count = len(step.changed)
    how: Any = {"compile": compile, "carries": len(step.values), "captured": step.chained}  # a chain hands them on
    if step.huge and apart_in_memory([*step.flat, *step.row], count):
        program = Program(counting(step.whole), *step.arguments, writes=count, fake=True, **how)
    else:
        program = Program(step.whole, *step.arguments, **how)
    return Captured(step, program, name)


class Captured(Loop):
    """Whole steps by a program, and on a GPU ``CHAIN`` of them in one CUDA graph."""

    def __init__(self, step: Step, program: Program, name: str) -> None:
        super().__init__(step)
        self._step, self._program, self.name = step, program, name
        self._order: Tensor | None = None
        self._chain: Chain | None = None
        if step.chained and step.t.is_cuda:
            if step.row:
                self._order = step.row[0].expand(CHAIN, *step.row[0].shape).contiguous()
            rows = [()] * CHAIN if self._order is None else [(row,) for row in self._order.unbind()]
            each = [(*step.inputs, *row) for row in rows]
            self._chain = Chain(program, step.values, step.state, step.t, step.lr, each, copied=False)
            self.name = f"{name} with CUDA graphs"

    def one(self, row: Row) -> Taken:
        """Take a step."""
        step, program = self._step, self._program
        found = program.flat([*step.flat, *row])
        if not program.writes:  # one that writes over its inputs also counts
            copy_into(step.leaves, found[: len(step.leaves)])
            step.t.add_(1)
        return found[-1], True

    def at_once(self, steps: int) -> int:
        """Return how many of some steps the graph takes."""
        return CHAIN if self._chain is not None and steps >= CHAIN else 0

    def many(self, steps: int, rows: Tensor | None) -> Tensor:
        """Take the steps of the graph."""
        assert self._chain is not None
        if self._order is not None and rows is not None:
            self._order.copy_(rows)
        self._chain.replay()
        return self._chain.losses.clone()


class Chain:
    """A number of steps captured in one CUDA graph: a replay costs one launch.

    It starts from these parameters, optimiser state, number of the next step and learning rate. ``inputs`` holds the
    other inputs of each step; what changes between replays is copied into them. A program that writes over its inputs
    has these tensors themselves; the results of any other step are copied into the chain's tensors after the last one:
    into these, unless they are ``copied`` first.
    """

    def __init__(
        self,
        step: Function | Program,
        values: list[Tensor],
        state: list[list[Tensor]],
        t: Tensor,
        lr: Tensor,
        inputs: Sequence[tuple[Tree, ...]],
        *,
        copied: bool = True,
    ) -> None:
        writes = isinstance(step, Program) and step.writes > 0
        copied = copied and not writes
        self.values = [v.clone() for v in values] if copied else values
        self.state = [[s.clone() for s in each] for each in state] if copied else state
        self.t, self.lr, self.inputs = t.clone() if copied else t, lr.clone(), inputs
        # Every replay reads the memory that it was captured with, so all of it must live as long as the graph.
        self.ahead = torch.arange(len(inputs), device=t.device, dtype=t.dtype)
        self.losses = self._warmed_up(step, writes)
        self.graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(self.graph):
            values, state, losses = self.values, self.state, []
            times = [self.t] * len(inputs) if writes else (self.t + self.ahead).unbind()
            kept = {"casts": step.casts(values)} if isinstance(step, Program) else {}
            for each, time in zip(inputs, times, strict=True):
                values, state, *_, loss = step(values, state, time, self.lr, *each, **kept)
                losses.append(loss)
            if not writes:
                torch._foreach_copy_(self.everything[:-1], [*values, *(s for each in state for s in each)])
                self.t.add_(len(inputs))
            self.losses.copy_(torch.stack(losses))

    def _warmed_up(self, step: Function | Program, writes: bool) -> Tensor:
        """Let lazy initialisation and autotuning happen outside the capture; return a place for the losses."""
        kept = [each.to("cpu", copy=True) for each in self.everything] if writes else []
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.no_grad(), torch.cuda.stream(stream):
                for _ in range(3):
                    *_, loss = step(self.values, self.state, self.t, self.lr, *self.inputs[0])
        finally:
            torch.cuda.current_stream().wait_stream(stream)
            with torch.no_grad():
                for mine, before in zip(self.everything, kept, strict=False):
                    mine.copy_(before)
        return torch.zeros((len(self.inputs), *loss.shape), dtype=loss.dtype, device=self.t.device)

    def replay(self) -> None:
        """Take all steps of the chain."""
        self.graph.replay()

    @property
    def everything(self) -> list[Tensor]:
        """All tensors that a step changes: parameters, the optimiser's state, and last the number of the step."""
        return [*self.values, *(s for each in self.state for s in each), self.t]
