"""Steps that were recorded once: replayed operation by operation, or compiled by inductor.

The gradient alone is recorded where the optimiser can run beside it, in place. On a GPU many steps are captured in one
CUDA graph.
"""

import torch
from torch import Tensor

from pyro_dropout.engines.engine import Direct, Loop, Row, Step, Taken, copy_into
from pyro_dropout.engines.program import Program
from pyro_dropout.engines.torch_internals import tree_leaves


class Replayed:
    """Records a step and replays it; beside it, torch's fused optimisers are faster than their operations one by one.

    Attributes:
        name: for users.
        compiles: whether inductor compiles what was recorded.
    """

    name = "recorded"
    compiles = False

    def loop(self, step: Step) -> Loop:
        """Return what takes the steps."""
        alone = step.whole is None or step.in_place or not (self.compiles or step.t.is_cuda)
        if alone and step.gradient is not None and step.move is not None:
            given = (step.values, step.t, *step.inputs, *step.row)
            return Direct(step, Program(step.gradient, *given, compile=self.compiles), self.name)
        program = step.recorded
        if self.compiles:
            program.compile(tree_leaves(step.arguments))
        return Captured(step, program, self.name)


class Inductor(Replayed):
    """Compiles a step with inductor."""

    name = "inductor"
    compiles = True


class Captured(Loop):
    """Whole steps by a program, and on a GPU ``Step.chain`` of them in one CUDA graph."""

    def __init__(self, step: Step, program: Program, name: str) -> None:
        super().__init__(step)
        self._step, self._program, self.name = step, program, name
        self._chain = Chain(step, program) if step.chain and step.t.is_cuda else None
        if self._chain is not None:
            self.name = f"{name} with CUDA graphs"

    def one(self, row: Row) -> Taken:
        """Take a step."""
        *changed, loss = self._program.flat([*self._step.flat, *row])
        copy_into(self.changed, changed)
        return loss, True

    def at_once(self, steps: int) -> int:
        """Return how many of some steps the graph takes."""
        return self._step.chain if self._chain is not None and steps >= self._step.chain else 0

    def many(self, steps: int, rows: Tensor | None) -> Tensor:
        """Take the steps of the graph."""
        assert self._chain is not None
        if rows is not None:
            self._chain.rows[0].copy_(rows)
        return self._chain.replay()


class Chain:
    """Some steps captured in one CUDA graph, which change the tensors of the step: a replay costs one launch.

    Attributes:
        rows: the rows that the steps are given, (steps, ...) each.
    """

    def __init__(self, step: Step, program: Program) -> None:
        self._step, self._program = step, program
        whole = [each.expand(step.chain, *each.shape) for each in step.row]
        self.rows = [each.clone(memory_format=torch.contiguous_format) for each in whole]
        # Every replay reads the memory that it was captured with, so all of it must live as long as the graph.
        self._ahead = torch.arange(step.chain, device=step.t.device, dtype=step.t.dtype)
        self._losses = self._warmed_up()
        self._graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(self._graph):
            leaves, losses = step.leaves, []
            for k, time in enumerate((step.t + self._ahead).unbind()):
                *leaves, _, loss = self._taken(leaves, time, k)
                losses.append(loss)
            torch._foreach_copy_(step.leaves, leaves)
            step.t.add_(step.chain)
            self._losses.copy_(torch.stack(losses))

    def _taken(self, leaves: list[Tensor], time: Tensor, k: int) -> list[Tensor]:
        """Return the leaves after one step, the number of the next one, and the loss."""
        step = self._step
        return self._program.flat([*leaves, time, *step.flat[len(step.changed) :], *(each[k] for each in self.rows)])

    def _warmed_up(self) -> Tensor:
        """Let lazy initialisation and autotuning happen outside the capture; return a place for the losses."""
        step = self._step
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), torch.cuda.stream(stream):
            for _ in range(3):
                *_, loss = self._taken(step.leaves, step.t, 0)
        torch.cuda.current_stream().wait_stream(stream)
        return torch.zeros((step.chain, *loss.shape), dtype=loss.dtype, device=step.t.device)

    def replay(self) -> Tensor:
        """Take all steps of the chain, and return their losses."""
        self._graph.replay()
        return self._losses.clone()
