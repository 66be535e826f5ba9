"""The state of one training run: parameters, optimiser, data order and the step, compiled or not.

A run holds its parameters separately from the modules, as the leaves of a step's inputs, so that thousands of steps do
not touch a module; ``publish`` puts them back. Steps of one guide change its own tensors on a CPU, eagerly on a GPU,
and there with a huge network too: parameters and the optimiser's state exist once. A compiled step has the optimiser in
its program. Recorded steps that change parameters, and on a CPU all those of a large network, have a program for the
gradient alone, beside torch's own fused optimiser.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from pyro_dropout.generative.precision import precision_now, products_in
from pyro_dropout.generative.random_state import forked
from pyro_dropout.protocols import Record, Tree
from pyro_dropout.training.batches import CHAIN, Batches, Source
from pyro_dropout.training.compile.chain import Chain
from pyro_dropout.training.compile.decision import HowCompiled
from pyro_dropout.training.compile.functional import (
    Gradients,
    Step,
    StepInPlace,
    UntrainedError,
    numbered,
)
from pyro_dropout.training.compile.program import NeedsCompilerError, Program, apart_in_memory, counting
from pyro_dropout.training.compile.taped_steps import TapedSteps, taped
from pyro_dropout.training.history import is_divergence
from pyro_dropout.training.kept_memory import keep_freed_memory
from pyro_dropout.training.optimisers import Update, clock
from pyro_dropout.training.svi import warn_uncompiled

# The most parameters that are copied now and then, so that a training that diverges can return to them.
_LARGE = 2**23
# The most parameters that recorded and compiled steps on a GPU compute anew: more than twice the memory, but then no
# kernel waits for another one that still reads what it writes over.
_HUGE = 2**26
# The most parameters and moments of a network whose kernels are shorter than what inductor does around them.
_SMALL = 2**20


class TrainingRun:
    """One training run: a step of tensors that is taken repeatedly.

    Args:
        step: (values, state, t, lr, *inputs, index) -> (values, state, loss); index only where there are batches.
        values: the parameters to start from.
        update: the optimiser.
        lr: the base learning rate as a tensor, if it is not the optimiser's, such as one per replica.
        inputs: the other inputs of every step: trees of tensors.
        batches: where mini-batches come from; None for all data at every step.
        write: puts parameters back into their owners.
        compile: "auto", "traced", "plain", True or False; "plain" is as plain C where that is possible, or recorded.
        gradients: the loss and the gradient of a step, for steps in place that are recorded.
        in_place: what takes eager and recorded steps instead, and changes ``values``; compiled ones then change them
            too.
        guarded: whether steps in place of a large network are left out if their loss or gradient is not finite; others
            are taken back, by a copy of the parameters.

    Attributes:
        refused: whether the last step was left out.
        failed: the error of torch that ended the last step, because its numbers have diverged.
    """

    _tapes = True  # whether recorded steps may change the leaves themselves

    def __init__(
        self,
        step: Step,
        values: list[Tensor],
        update: Update,
        *,
        write: Callable[[list[Tensor]], None],
        lr: Tensor | None = None,
        inputs: tuple[Tree, ...] = (),
        batches: Source | None = None,
        compile: HowCompiled = "auto",
        gradients: Gradients | None = None,
        in_place: StepInPlace | None = None,
        guarded: bool = False,
    ) -> None:
        self._step, self._write, self._batches, self._in_place = step, write, batches, in_place
        self._precision = precision_now()
        size = sum(value.numel() for value in values)
        self._large, self._huge = size > _LARGE, size > _HUGE
        self._guarded, self.refused = guarded and self._large, False
        self.failed: Exception | None = None
        # The leaves that a step replaces: parameters first, then the optimiser's state.
        self.leaves, self._shape = tree_flatten((list(values), update.start(values)))
        self._count = len(values)
        self._gradients, self._parted = gradients, False
        self._in_c: Callable[[], list[Tensor]] | None = None
        self.why: list[str] = []  # why faster engines do not take the steps
        self._taped: TapedSteps | None = None
        self.t, self.lr = clock(update, values, 1)
        self.lr = self.lr if lr is None else lr.to(self.lr)
        self._chains = self.t.is_cuda and (batches is None or batches.chained)  # steps in one graph
        self._inputs = inputs
        self._flat_inputs = tree_leaves(inputs)
        self._program: Program | None = None
        self._chain: Chain | None = None
        self.break_off: Callable[[], bool] = lambda: False  # asked after each step: are no more wanted?
        self.compile_seconds = 0.0
        self.traced, self._plain = compile == "traced", compile == "plain"
        if self._plain:
            self._try_in_plain_c()
        elif compile is not False:
            self._try_to_compile(compile)
        keep_freed_memory(self._temporaries(values))

    def _temporaries(self, values: list[Tensor]) -> list[Tensor]:
        """Return tensors of the sizes of those that a step frees, unless it is compiled."""
        if self._program is None:
            return values
        own = values if self._parted else []
        return [*own, *self._program.shapes] if self.traced else own

    @property
    def chained(self) -> bool:
        """Whether several steps run at a time."""
        return self._chain is not None

    @property
    def compiled(self) -> bool:
        """Whether steps are recorded, and compiled unless ``traced``."""
        return self._program is not None

    @property
    def engine(self) -> str:
        """What takes the steps."""
        if self._chain is not None:
            return "inductor with CUDA graphs"
        if self._in_c is not None:
            return "C"
        return "eager" if self._program is None else "recorded" if self.traced else "inductor"

    @property
    def changes_owners(self) -> bool:
        """Whether steps change the tensors of the guide and the model themselves."""
        return self._in_place is not None and (self._program is None or self._parted or self._program.writes > 0)

    @property
    def guarded(self) -> bool:
        """Whether a step that is not finite is not taken, so that the parameters stay good."""
        return self._guarded and self._in_place is not None and (self._program is None or self._parted)

    def _programmed(self, index: list[Tensor]) -> Program:
        """Return the program of a step, or that of its gradient, where the optimiser runs beside it."""
        values, state = tree_unflatten(self.leaves, self._shape)
        rest = (*self._inputs, *index)
        inputs = (values, state, self.t, self.lr, *rest)
        whole, count = tree_leaves(inputs), len(self.leaves)
        small = sum(leaf.numel() for leaf in self.leaves) < _SMALL
        if self._in_place is None and self._tapes and (self.traced or self._plain) and small and not self.t.is_cuda:
            return self._on_own_leaves(rest, index)
        changes = self._in_place is not None and (self._huge or not self.t.is_cuda)
        if self._plain and not (changes and small and not self.t.is_cuda and apart_in_memory(whole, count)):
            raise NeedsCompilerError("it has too many parameters, or two of them share memory")
        carries = self._count if self.t.is_cuda else 0  # a chain hands them on
        how: Any = {"carries": carries, "captured": self._chains}
        if not changes or not apart_in_memory(whole, count):
            return Program(self._step, *inputs, compile=not self.traced, **how)
        if self.t.is_cuda and not self.traced:
            return Program(counting(self._step), *inputs, writes=count + 1, fake=True, **how)
        self._parted = self._gradients is not None and (self.traced or self._large)
        if self._parted:
            assert self._gradients is not None
            gradient = numbered(self._gradients)
            program = Program(gradient, values, self.t, *rest, compile=not self.traced, fake=self._large)
            if self.traced and not self._guarded:
                self._taped = taped(program, [*values, self.t], self._flat_inputs, index, self._optimised)
            return program
        if small:
            self._index = [each.clone() for each in index]  # the same tensors at every step
            inputs = (*inputs[: len(inputs) - len(index)], *self._index)
        program = Program(counting(self._step), *inputs, writes=count + 1, kept=small, plain=self._plain)
        self._in_c = program.in_plain_c()
        self.why += [f"C: {program.why}"] if program.why else []
        return program

    def _on_own_leaves(self, rest: tuple[Tree, ...], index: list[Tensor]) -> Program:
        """Return the program of whole steps that are recorded, and that change copies of the parameters."""
        self.leaves = [leaf.detach().clone(memory_format=torch.contiguous_format) for leaf in self.leaves]
        count = len(self.leaves) + 1
        inputs: tuple[Tree, ...] = (*tree_unflatten(self.leaves, self._shape), self.t, self.lr, *rest)
        if self._plain:
            self._index = [each.clone() for each in index]
            inputs = (*inputs[: len(inputs) - len(index)], *self._index)
            program = Program(counting(self._step), *inputs, writes=count, kept=True, plain=True)
            self._in_c = program.in_plain_c()
            return program
        program = Program(counting(self._step), *inputs, compile=False, writes=count)
        self._taped = taped(program, [*self.leaves, self.t], [self.lr, *self._flat_inputs], index)
        return program

    def _optimised(self, results: list[Tensor]) -> Callable[[], object]:
        """Return what changes the parameters by the gradients among the results of a tape, and counts the step."""
        assert self._in_place is not None
        values, state = tree_unflatten(self.leaves, self._shape)
        update = self._in_place.bound(values, results[1:], state)

        def optimise() -> None:
            update(self.t, self.lr)
            self.t.add_(1)

        return optimise

    def _try_in_plain_c(self) -> None:
        """Compile steps as plain C, or record them if they do not fit in there."""
        try:
            self._try_to_compile(True)
        except Exception as cause:  # what is wrong with the step itself is said where it is recorded
            self.why.append(f"C: {cause}")
            self._plain, self.traced = False, True
            self._parted, self._in_c, self._taped = False, None, None
            self._try_to_compile("traced")

    def _try_to_compile(self, compile: HowCompiled) -> None:
        start = time.perf_counter()
        values, state = tree_unflatten(self.leaves, self._shape)
        index = [] if self._batches is None else self._batches.example()
        try:
            with forked():
                program = self._programmed(index)
                if self._chains and not self._parted:
                    self._order = index[0].expand(CHAIN, *index[0].shape).contiguous() if index else None
                    rows = [()] * CHAIN if self._order is None else [(row,) for row in self._order.unbind()]
                    each = [(*self._inputs, *row) for row in rows]
                    self._chain = Chain(program, values, state, self.t, self.lr, each)
        except Exception as cause:
            if compile is True or isinstance(cause, UntrainedError):
                raise
            self._parted, self._in_c, self._taped = False, None, None
            self.why.append(f"recorded: {cause}")
            warn_uncompiled(cause)
            return
        self._program = program
        self.compile_seconds = time.perf_counter() - start

    def advance(self, steps: int) -> Tensor:
        """Take ``steps`` steps, or fewer but at least one; return the loss before each."""
        if self._chain is not None and steps >= CHAIN:
            return self._replay(self._chain)
        with products_in(self._precision):
            return self._advance(steps)

    def _advance(self, steps: int) -> Tensor:
        count = min(steps, CHAIN if self._batches is None else self._batches.together)
        losses = []
        if self._taped is not None:
            self._taped.begin()
        for inputs in [[]] * count if self._batches is None else self._batches.inputs(count):
            try:
                losses.append(self._next(inputs))
            except (RuntimeError, ValueError) as cause:
                if not is_divergence(cause, self.values):
                    raise
                self.failed = cause
            if self.failed is not None or self.refused or self.break_off():
                break
        return torch.stack(losses) if losses else self.t.new_empty(0)

    def _next(self, index: list[Tensor]) -> Tensor:
        """Take one more step, and return its loss."""
        usual = self._program is not None and (self._batches is None or self._batches.usual(index))
        if usual and self._taped is not None:
            with torch.no_grad():
                return self._taped(index)
        if usual and self._in_c is not None:
            for mine, given in zip(self._index, index, strict=True):
                mine.copy_(given)
            return self._in_c()[0].clone()  # the next step writes over it
        if usual and self._program is not None and not self._parted:
            found = self._program.flat([*self.leaves, self.t, self.lr, *self._flat_inputs, *index])
            if not self._program.writes:  # one that writes over parameters counts by itself
                self.t.add_(1)
            self.leaves, loss = found[: len(self.leaves)], found[-1]
            return loss
        values, state = tree_unflatten(self.leaves, self._shape)
        inputs = (values, state, self.t, self.lr, *self._inputs, *index)
        with torch.no_grad():
            if self._in_place is None:
                *found, loss = tree_leaves(self._step(*inputs))
                self._set_leaves(found)
            else:
                loss, taken = self._in_place(self.guarded, *inputs, recorded=self._program if usual else None)
                self.refused = not taken
        if not self.refused:
            self.t.add_(1)
        return loss

    def _replay(self, chain: Chain) -> Tensor:
        if self._order is not None and isinstance(self._batches, Batches):
            self._order.copy_(self._batches.take(CHAIN))
        for mine, theirs in zip(chain.everything, [*self.leaves, self.t], strict=True):
            if mine is not theirs:
                mine.copy_(theirs)
        chain.replay()
        *self.leaves, self.t = chain.everything
        return chain.losses.clone()

    def _set_leaves(self, found: list[Tensor]) -> None:
        if self._fixed:
            copy_into(self.leaves, found)
        else:
            self.leaves = found

    @property
    def _fixed(self) -> bool:
        """Whether steps read and write the leaves themselves."""
        return self._taped is not None or self._in_c is not None

    @property
    def values(self) -> list[Tensor]:
        """The current parameters."""
        return self.leaves[: self._count]

    def snapshot(self, over: list[Tensor] | None = None) -> list[Tensor]:
        """Return a copy of the current parameters; it is written over an earlier one that is given, if that fits."""
        found = over or []
        if [each.shape for each in found] != [each.shape for each in self.values]:
            return [value.detach().clone() for value in self.values]
        copy_into(found, self.values)
        return found

    def restore(self, values: list[Tensor]) -> None:
        """Restore a snapshot of the parameters; the optimiser's state stays as it is."""
        if self.changes_owners or self._fixed:
            copy_into(self.values, values)
        else:
            self.leaves[: self._count] = [value.clone() for value in values]

    def publish(self) -> None:
        """Put copies of the current parameters back into their owners, unless these have them."""
        if not self.changes_owners:
            self._write(self.snapshot())

    def state(self) -> tuple[dict[str, Tensor], Record]:
        """Return everything that later steps depend on, except the random generators: tensors by name, and the rest."""
        found = {f"leaf.{k:05d}": leaf.detach() for k, leaf in enumerate(self.leaves)}
        found["t"] = self.t
        if self._batches is not None:
            found |= self._batches.state()
        return found, {}

    def set_state(self, tensors: dict[str, Tensor], rest: Record) -> None:
        """Restore a state."""
        device = self.t.device
        if self.changes_owners or self._fixed:
            copy_into(
                [*self.leaves, self.t], [tensors[f"leaf.{k:05d}"] for k in range(len(self.leaves))] + [tensors["t"]]
            )
        else:
            self.leaves = [tensors[f"leaf.{k:05d}"].to(device) for k in range(len(self.leaves))]
            self.t = tensors["t"].to(device)
        if self._batches is not None:
            self._batches.set_state(tensors)


def copy_into(targets: list[Tensor], values: list[Tensor]) -> None:
    """Copy values into the tensors that hold them."""
    with torch.no_grad():
        for target, value in zip(targets, values, strict=True):
            target.copy_(value)
