"""Steps of small networks on a CPU as loops of C, compiled within a second.

Such a program is kernels, small matrix products and factors, random draws, and other calls of torch on fixed memory. It
is run beside the operations that were recorded, at several points, and not used unless both agree.
"""

import ctypes
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, fx

from pyro_dropout.engines.c import library
from pyro_dropout.engines.c.source import Source
from pyro_dropout.engines.engine import CannotError, Loop, Row, Step, Taken, copy_into
from pyro_dropout.engines.program import Program, apart_in_memory

Run = Callable[[], list[Tensor]]

_CLOSE = {torch.float32: 1e-4, torch.float64: 1e-9}
_DIGITS = 64  # by how many units in the last place inputs are shaken
_MORE = 8  # times what that changes may be rounding, such as that of a unit of ReLU which is nearly zero
_AWAY = (0.0, 0.0, 0.3, 3.0)  # how far from the start programs are compared; the second call goes on from the first


class InC:
    """Writes a whole step, with its optimiser, as C."""

    name = "C"

    def loop(self, step: Step) -> Loop:
        """Return what takes the steps."""
        if step.t.is_cuda:
            raise CannotError("the tensors are on a GPU")
        if not step.small:
            raise CannotError("it has too many parameters")
        if not apart_in_memory([*step.flat, *step.row], len(step.changed)):
            raise CannotError("two of its tensors share memory")
        return StepsInC(step)


class StepsInC(Loop):
    """Takes steps on the same tensors at every call: rows, and what the step reads besides, are copied there."""

    name = InC.name

    def __init__(self, step: Step) -> None:
        super().__init__(step)
        program, first = step.recorded, len(step.flat)
        self._outside = program.outside
        self._own = [each.clone() for each in (*step.row, *program.outside())]
        self._run = in_c(program, [*step.flat, *self._own], len(step.changed))
        self._written = [k - first for k in _written(program.graph) if first <= k < first + len(step.row)]

    def one(self, row: Row) -> Taken:
        """Take a step."""
        with torch.no_grad():
            copy_into(self._own, [*row, *self._outside()])
            loss = self._run()[0].clone()
            for k in self._written:
                row[k].copy_(self._own[k])
        return loss, True


def in_c(program: Program, inputs: Sequence[Tensor], writes: int = 0) -> Run:
    """Return a recorded program in C, which runs on these very inputs.

    It writes its first outputs over its first inputs, so many, and returns the others; the next call writes over them.
    """
    graph = program.graph
    source = Source(graph, inputs, writes)
    try:
        run = _right(source, library.compiled(source.text), graph, inputs, writes)
    except OSError as cause:
        raise CannotError(str(cause)) from cause
    if run is None:
        why = "the step in C does not compute what the recorded one does"
        warnings.warn(f"{why}; it is not used. Please report this with your model.", stacklevel=2)
        raise CannotError(why)
    return run


def _written(graph: fx.GraphModule) -> list[int]:
    """Return the numbers of the inputs that a graph writes over, such as running statistics."""
    copied = {node.args[0] for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)}
    return [k for k, place in enumerate(graph.graph.find_nodes(op="placeholder")) if place in copied]


# --- comparing --------------------------------------------------------------------------------------------------------


def _right(
    source: Source, made: ctypes.CDLL, graph: fx.GraphModule, inputs: Sequence[Tensor], writes: int
) -> Run | None:
    """Return a program that runs with a library; None unless it does what was recorded, with the same random numbers.

    A branch that is not taken at the start, such as that of clipping, may be taken elsewhere: both also run from where
    the first call ends, and from values that are further away. The inputs are as before when this returns.
    """
    before = {k: inputs[k].clone() for k in [*range(writes), *_written(graph)]}
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            run = source.run(made)
            return run if _agrees(run, graph, inputs, before, writes) else None
        finally:
            for k, value in before.items():
                inputs[k].copy_(value)


def _agrees(run: Run, graph: fx.GraphModule, inputs: Sequence[Tensor], before: dict[int, Tensor], writes: int) -> bool:
    """Whether a program writes over these inputs, and returns, what a graph does, from ``before`` and further away.

    Numbers that cancel, or that Adam divides by each other when both are nearly zero, are known to fewer digits: by
    how many is seen from inputs whose last digits differ.
    """
    expected, made = fx.Interpreter(graph).run, [node.meta.get("val") for node in graph.graph.nodes if node.args]
    # A loss in float64 of a noise in float32 is known to no more digits than that.
    least = max([0.0, *(_CLOSE.get(each.dtype, 0.0) for each in made if isinstance(each, Tensor))])
    theirs = [before[k].clone() if k in before else each for k, each in enumerate(inputs)]

    def computed(given: list[Tensor], point: int) -> list[Tensor]:
        torch.default_generator.manual_seed(point)
        new = [each.clone() for each in expected(*given)]
        copy_into(given[:writes], new[:writes])
        return [*new[writes:], *(given[k] for k in before)]

    for point, away in enumerate(_AWAY):
        torch.default_generator.manual_seed(point)
        for k in before:
            if theirs[k].is_floating_point():
                theirs[k].add_(torch.randn_like(theirs[k]).abs_(), alpha=away)
            inputs[k].copy_(theirs[k])
        shaken = [_shaken(each) for each in theirs]
        try:
            right = computed(theirs, point)
        except RuntimeError:  # no inverse, say: that far away there is nothing to compare
            if not away:
                raise
            return True
        try:
            near = computed(shaken, point)
        except RuntimeError:  # which says nothing of how well the others are known
            near = right
        torch.default_generator.manual_seed(point)
        mine = [*run(), *(inputs[k] for k in before)]
        if not all(_close(*each, least) for each in zip(mine, right, near, strict=True)):
            return False
    return True


def _shaken(value: Tensor) -> Tensor:
    """Return a copy of a tensor with other last digits."""
    if not value.is_floating_point():
        return value.clone()
    return value + value * torch.randn_like(value) * (_DIGITS * torch.finfo(value.dtype).eps)


def _close(mine: Tensor, theirs: Tensor, shaken: Tensor, least: float) -> bool:
    """Whether two tensors agree, as far as the second one is known: by its distance from what shaken inputs give."""
    slack = max(_CLOSE.get(mine.dtype, 1e-2), least)
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return False
    left, right = mine.double(), theirs.double()
    known = float((shaken.double() - right).nan_to_num(0.0, 0.0, 0.0).abs().amax()) if right.numel() else 0.0
    return torch.allclose(left, right, rtol=slack, atol=slack + _MORE * known, equal_nan=True)
