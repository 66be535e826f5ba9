"""Steps that were recorded once and are replayed without a compiler, operation by operation.

The gradient alone is recorded where the optimiser can be bound to it: torch's fused optimisers are faster than their
operations one by one. On a GPU many steps are captured in one CUDA graph.
"""

from pyro_dropout.engines.engine import Direct, Loop, Step
from pyro_dropout.engines.inductor import Captured
from pyro_dropout.engines.program import Program


class Replayed:
    """Records a step and replays it."""

    name = "recorded"

    def loop(self, step: Step) -> Loop:
        """Return what takes the steps."""
        captured = step.t.is_cuda and step.whole is not None and not step.huge
        if captured or step.gradient is None or step.move is None:
            return Captured(step, step.recorded, self.name)
        given = (step.values, step.t, *step.inputs, *step.row)
        return Direct(step, Program(step.gradient, *given, compile=False, fake=step.large), self.name)
