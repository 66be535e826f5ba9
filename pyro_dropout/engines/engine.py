"""What an engine is: it is handed a step, a pure function of tensors, and gives back a loop that takes it.

A step changes always the same tensors: parameters, the optimiser's state, and the number of the next step. Every loop
writes over them, so one loop can go on where another one stops. An engine that cannot take a step says why, in words.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from pyro_dropout.engines.program import Found, Function, Program, counting
from pyro_dropout.engines.torch_internals import tree_leaves
from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.protocols import Tree

Row = list[Tensor]  # what a step is given anew: indices of data points, or the points themselves
Gradient = Callable[..., tuple[Tensor, list[Tensor]]]  # (values, t, *inputs, *row) -> (loss, gradients)
Taken = tuple[Tensor, bool]  # the loss before a step, and whether the step was taken

# Steps in one CUDA graph: enough that the launch cost is negligible, few enough that capturing them is quick.
CHAIN = 20

SMALL = 2**20  # the most parameters and moments of a network whose kernels are shorter than what lies between them
LARGE = 2**23  # the most parameters that are copied now and then, so that a training that diverges can return to them
HUGE = 2**26  # the most parameters that steps on a GPU compute anew, which takes more than twice their memory


class CannotError(Exception):
    """An engine cannot take a step; the message says why."""


class WrongStepError(PyroDropoutError):
    """A step is wrong, whichever engine takes it."""


@dataclass(frozen=True)
class Solo:
    """The step of one network, where several are trained together.

    Attributes:
        whole: as that of all of them.
        arguments: its inputs, likewise; the row comes last.
        stacked: a tree like them, with None where all networks share a tensor.
    """

    whole: Function
    arguments: tuple[Tree, ...]
    stacked: tuple[Tree, ...]


@dataclass
class Step:
    """One step of training: functions of tensors, and the tensors that it changes.

    Attributes:
        whole: the step with its optimiser, a pure function (values, state, t, lr, *inputs, *row) -> (values, state,
            loss); None where the optimiser runs beside it.
        values: the parameters, which steps write over.
        state: the optimiser's tensors for each of them, likewise.
        t: the number of the next step, from 1, likewise.
        lr: the learning rate.
        inputs: other inputs: trees of tensors, the same at every step.
        row: an example of what is given anew to each step.
        gradient: the step without its optimiser, a pure function; None where both are one.
        move: changes the parameters and the optimiser's state by a gradient, where they are, and counts the step.
        guarded: whether a step with a ``move`` is left out if its loss or gradient is not finite.
        outside: where tensors are that it may read besides its inputs, to be read anew at every step; without them, the
            step holds what it reads as it is.
        like: recorded programs that may equal its own.
        chain: how many steps may run before the host looks at one, as in a CUDA graph; 0 if each waits for its row.
        solo: the step of one network, if this is that of several.
    """

    whole: Function | None
    values: list[Tensor]
    state: list[list[Tensor]]
    t: Tensor
    lr: Tensor
    inputs: tuple[Tree, ...] = ()
    row: Row = field(default_factory=list)
    gradient: Gradient | None = None
    move: Callable[[list[Tensor]], None] | None = None
    guarded: bool = False
    outside: Sequence[Found] | None = None
    like: Sequence[Program] = ()
    chain: int = CHAIN
    solo: Solo | None = None

    @property
    def leaves(self) -> list[Tensor]:
        """Parameters, then the optimiser's state."""
        return [*self.values, *(slot for own in self.state for slot in own)]

    @property
    def changed(self) -> list[Tensor]:
        """All tensors that a step writes over: the number of the next one comes last."""
        return [*self.leaves, self.t]

    @property
    def in_place(self) -> bool:
        """Whether an optimiser changes the parameters beside the step: new ones take too much memory."""
        return sum(value.numel() for value in self.values) > HUGE if self.t.is_cuda else is_large(self.values)

    @property
    def small(self) -> bool:
        """Whether kernels are shorter than what lies between them."""
        return sum(leaf.numel() for leaf in self.leaves) < SMALL

    @property
    def arguments(self) -> tuple[Tree, ...]:
        """Everything that ``whole`` is given; the row comes last."""
        return (self.values, self.state, self.t, self.lr, *self.inputs, *self.row)

    @property
    def flat(self) -> list[Tensor]:
        """The tensors that ``whole`` is given, without the row."""
        return [*self.changed, self.lr, *tree_leaves(self.inputs)]

    @cached_property
    def recorded(self) -> Program:
        """The whole step, which also counts, recorded once for all engines."""
        if self.whole is None:
            raise CannotError("the optimiser is torch's own, and runs beside the step")
        how: Any = {"outside": self.outside, "like": self.like, "compile": False}
        return Program(counting(self.whole), *self.arguments, **how)


class Loop:
    """What takes steps, one by one or many at once.

    Attributes:
        name: the engine, for users.
        changed: the tensors that steps change, in the order of ``Step.changed``.
        guarded: whether a step that is not finite is left out.
        kept: other tensors that later steps depend on, by the names that they have in a checkpoint.
    """

    name = ""
    guarded = False

    def __init__(self, step: Step) -> None:
        self.changed = step.changed
        self.kept: dict[str, Tensor] = {}

    def ready(self) -> None:
        """Draw what it needs from the generators, after the engine has been chosen."""

    def one(self, row: Row) -> Taken:
        """Take a step."""
        raise NotImplementedError

    def at_once(self, steps: int) -> int:
        """Return how many of some steps ``many`` takes; 0 if they are to be taken one by one."""
        return 0

    def many(self, steps: int, rows: Tensor | None) -> Tensor:
        """Take steps, each with one of the rows, and return the losses."""
        raise NotImplementedError


@runtime_checkable
class Engine(Protocol):
    """Makes loops of steps.

    Attributes:
        name: for users.
    """

    name: str

    def loop(self, step: Step) -> Loop:
        """Return what takes the steps.

        Raises:
            CannotError: it cannot, and the message says why.
        """


class Eager:
    """Takes every step as it is written."""

    name = "eager"

    def loop(self, step: Step) -> Loop:
        """Return what takes the steps."""
        return Direct(step)


class Direct(Loop):
    """Takes steps on their own tensors, eagerly, or with a gradient that an engine has made."""

    def __init__(self, step: Step, gradient: Gradient | None = None, name: str = Eager.name) -> None:
        super().__init__(step)
        self._step, self._gradient, self.name, self.guarded = step, gradient, name, step.guarded

    def one(self, row: Row) -> Taken:
        """Take a step."""
        step = self._step
        with torch.no_grad():
            gradient = self._gradient or step.gradient
            if step.move is None or gradient is None:
                assert step.whole is not None
                *found, loss = tree_leaves(step.whole(step.values, step.state, step.t, step.lr, *step.inputs, *row))
                copy_into(step.leaves, found)
                step.t.add_(1)
                return loss, True
            loss, slopes = gradient(step.values, step.t, *step.inputs, *row)
            if self.guarded:
                sizes = torch.stack([loss.to(step.t), *(size.to(step.t) for size in torch._foreach_norm(slopes))])
                if not bool(torch.isfinite(sizes).all()):
                    return loss, False
            step.move(slopes)
            return loss, True


def is_large(values: Sequence[Tensor]) -> bool:
    """Whether parameters take too much memory for a copy."""
    return sum(value.numel() for value in values) > LARGE


def copy_into(targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy values into the tensors that hold them."""
    with torch.no_grad():
        for target, value in zip(targets, values, strict=True):
            target.copy_(value)


def copied(values: Sequence[Tensor], over: list[Tensor] | None = None) -> list[Tensor]:
    """Return copies of tensors; they are written over earlier ones that are given, if these fit."""
    if not over or [each.shape for each in over] != [each.shape for each in values]:
        return [value.detach().clone() for value in values]
    copy_into(over, values)
    return over


@contextmanager
def exact_products() -> Iterator[None]:
    """Within this context torch multiplies matrices of float32 without rounding their elements to TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
