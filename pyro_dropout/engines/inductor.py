"""Steps that torch's compiler takes: on a CPU call by call, on a GPU many of them in one CUDA graph."""

from typing import Any

from torch import Tensor

from pyro_dropout.engines.chain import Chain
from pyro_dropout.engines.engine import CHAIN, Direct, Loop, Row, Step, Taken, copy_into
from pyro_dropout.engines.program import Program, apart_in_memory, counting
from pyro_dropout.engines.torch_internals import tree_leaves


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
