"""Several compiled steps in one CUDA graph: a replay costs one launch, and each step reads what the last one wrote."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pyro_dropout.engines.program import Function, Program
from pyro_dropout.protocols import Tree


class Chain:
    """A number of compiled steps captured in one CUDA graph.

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
