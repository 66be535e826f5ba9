"""A step of all chains as two functions of arrays: one leaf for every tree, and what follows the end of trees.

At first the model runs as it is. Recorded, its energy is a list of plain tensor operations. Both times the rest is
numpy's, which is faster there. Compiled, energy and tree are one kernel that writes over the tensors of the state. From
the same two functions the kernel of a GPU is written (``kernel``). All of them compute the same up to rounding.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from pyro_dropout.engines.in_c import in_c
from pyro_dropout.engines.program import Program
from pyro_dropout.references.nuts.adaptation import Plan, Tuning, turned
from pyro_dropout.references.nuts.energy import NoDecompositionError
from pyro_dropout.references.nuts.no_u_turn import Array, Tree, grown, halfway, kit
from pyro_dropout.training.compile.functional import unvalidated

# Positions (C, d) -> energies (C,) and their gradients (C, d).
Energies = Callable[[Tensor], tuple[Tensor, Tensor]]

_FIELDS = len(Tree._fields)


def _in_c(function: Callable[..., list[Array]], state: list[Tensor], *others: Tensor) -> Callable[..., Array]:
    """Return a function of ``others`` in C, which writes all its results but the last one over ``state``."""
    own = [each.clone(memory_format=torch.contiguous_format) for each in others]
    count = len(function(*state, *own)) - 1
    run = in_c(Program(function, *state, *own, compile=False), [*state, *own], count)

    def called(*inputs: Array) -> Tensor:
        for mine, given in zip(own, inputs, strict=True):
            mine.copy_(torch.as_tensor(given))
        return run()[-1]

    return called


class Stepping:
    """Takes steps of all chains, with their trees and what they have adapted so far as its state."""

    def __init__(self, energies: Energies, plan: Plan, tree: Tree, tuning: Tuning) -> None:
        self._energies = self._called = energies
        self._plan, self._state = plan, [*tree, *tuning]
        # Adds one leaf to each tree, and returns whether any tree has ended; takes random numbers (C, 3).
        self.leaf: Callable[..., Array] = self._keeping(self._leaf_of)
        # Does what follows the end of trees, and returns whether any chain has draws left; takes momenta (C, M, d) too.
        self.turn: Callable[..., Array] = self._keeping(self._turn_of)
        self.how = "eager"  # later "recorded" or "compiled"

    @property
    def tree(self) -> Tree:
        """The trees; compiled steps write over these tensors."""
        return Tree(*self._state[:_FIELDS])

    @property
    def tuning(self) -> Tuning:
        """What the chains have adapted; compiled steps write over these tensors."""
        return Tuning(*self._state[_FIELDS:])

    def record(self) -> None:
        """Record the energy."""
        with unvalidated():
            program = Program(self._energies, torch.as_tensor(self._state[0]), compile=False)

        def called(z: Tensor) -> tuple[Tensor, Tensor]:
            try:
                energy, slope = program.flat([z])
            except NoDecompositionError:  # at some of the positions: the model itself says at which
                energy, slope = self._energies(z)
            return energy, slope

        self._called, self.how = called, "recorded"

    def compile(self, noise: Tensor, momenta: Tensor) -> None:
        """Compile both functions, for inputs of these shapes."""
        state = [torch.as_tensor(value).clone(memory_format=torch.contiguous_format) for value in self._state]
        with self.functions() as (leaf_of, turn_of):
            functions = _in_c(leaf_of, state, noise), _in_c(turn_of, state, noise, momenta)
        (self.leaf, self.turn), self._state = functions, state
        self.how = "compiled"

    @contextmanager
    def functions(self) -> Iterator[tuple[Callable[..., list[Array]], Callable[..., list[Array]]]]:
        """Give both functions of the whole state, to be recorded: (*state, noise) and (*state, noise, momenta)."""
        before, self._called = self._called, self._energies
        try:
            with unvalidated():
                yield self._leaf_of, self._turn_of
        finally:
            self._called = before

    def _keeping(self, function: Callable[..., list[Array]]) -> Callable[..., Array]:
        """Return a function that keeps all results but the last one as the state."""

        def kept(*inputs: Array) -> Array:
            with np.errstate(all="ignore"):  # a divergent trajectory may end anywhere
                *state, last = function(*self._state, *inputs)
            self._state[: len(state)] = state
            return last

        return kept

    def _leaf_of(self, *inputs: Array) -> list[Array]:
        *state, noise = inputs
        tree, tuning = Tree(*state[:_FIELDS]), Tuning(*state[_FIELDS:])
        unfinished = tuning.draw < self._plan.warmup + self._plan.samples
        # A chain with all its draws stays where it is.
        step = kit(noise).where(unfinished, tuning.step, 0.0)
        z, half = halfway(tree, step, tuning.scale)
        tree = grown(tree, z, half, *self._of(z), step, tuning.scale, noise)
        ended = ((tree.ended > 0) | (tuning.searching > 0)) & unfinished
        return [*tree, ended.any()]

    def _of(self, z: Array) -> tuple[Array, Array]:
        """Return the energies and gradients at positions."""
        if isinstance(z, Tensor):
            return self._called(z)
        energy, slope = self._called(torch.from_numpy(z))
        return energy.numpy(), slope.numpy()

    def _turn_of(self, *inputs: Array) -> list[Array]:
        *state, noise, momenta = inputs
        tree, tuning = Tree(*state[:_FIELDS]), Tuning(*state[_FIELDS:])
        tree, tuning = turned(tree, tuning, self._plan, noise, momenta)
        return [*tree, *tuning, (tuning.draw < self._plan.warmup + self._plan.samples).any()]
