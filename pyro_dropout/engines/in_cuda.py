"""Steps as CUDA C: a kernel takes many steps of a network in one launch, or of several networks side by side."""

import torch
from torch import Tensor

from pyro_dropout.engines.cuda.source import Recorded
from pyro_dropout.engines.cuda.steps import STATE, StepsOnGpu
from pyro_dropout.engines.engine import CannotError, Loop, Solo, Step
from pyro_dropout.engines.generated.values import UnsupportedError
from pyro_dropout.engines.program import apart_in_memory, counting
from pyro_dropout.engines.torch_internals import tree_flatten, tree_leaves, tree_unflatten
from pyro_dropout.engines.tracing import traced


class InCuda:
    """Writes a step as CUDA C, for as many of the GPU's processors as an estimate says is fastest."""

    name = "CUDA C"

    def loop(self, step: Step) -> Loop:
        """Return what takes the steps."""
        if step.whole is None or not step.chain:
            raise CannotError("the host has something to do between two steps")
        networks = 1 if step.solo is None else len(step.values[0])
        size = sum(each.numel() * each.itemsize for each in step.leaves) // networks
        if size > STATE:
            raise CannotError(f"a step changes {size} bytes of a network, and a kernel may have {STATE}")
        if not apart_in_memory([*step.flat, *step.row], len(step.changed)):
            raise CannotError("two of its tensors share memory")
        try:
            return InLaunches(step)
        except UnsupportedError as cause:
            raise CannotError(str(cause)) from cause


class InLaunches(Loop):
    """Many steps in one launch."""

    name = InCuda.name

    def __init__(self, step: Step) -> None:
        super().__init__(step)
        assert step.whole is not None
        copies = 1 if step.solo is None else len(step.values[0])
        solo = step.solo or Solo(step.whole, step.arguments, ())
        function, (example, spec) = counting(solo.whole), tree_flatten(solo.arguments)
        graph = traced(lambda *given: tree_leaves(function(*tree_unflatten(given, spec))), example)
        own = [k for k, each in enumerate(tree_leaves(solo.stacked)) if each is not None]
        each = range(len(example) - len(step.row), len(example))
        self._clocks = step.t if step.solo is None else step.t.repeat(copies)  # no network waits for another one's
        whole = [*step.leaves, self._clocks, *step.flat[len(step.changed) :], *step.row]
        recorded = Recorded(graph, [value.contiguous() for value in example], len(step.changed), each, copies, own)
        self._steps = StepsOnGpu(recorded, whole)
        # The seed of its random numbers, and how many steps it has taken.
        self.kept = {"noise": torch.zeros(2, dtype=torch.int64)}

    def ready(self) -> None:
        """Draw the seed of the random numbers."""
        self.kept["noise"][0] = torch.randint(2**62, ())

    def at_once(self, steps: int) -> int:
        """Return how many of some steps a launch takes."""
        return min(steps, self._steps.room(int(self.kept["noise"][1])))

    def many(self, steps: int, rows: Tensor | None) -> Tensor:
        """Take steps, each with one of the rows, and return the losses."""
        seed, number = self.kept["noise"].tolist()
        t = self.changed[-1]
        if self._clocks is not t:
            self._clocks.copy_(t.expand_as(self._clocks))
        (losses,) = self._steps.advance(seed, number, steps, [] if rows is None else [rows])
        if self._clocks is not t:
            t.add_(steps)
        self.kept["noise"][1] += steps
        return losses
