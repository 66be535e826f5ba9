"""A CUDA graph reads the same memory at every replay: whatever it read when it was captured must stay alive.

There is no GPU where these tests run, so capturing is played by a mode that notes which tensors an operation reads.
"""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from pyro_dropout.engines.engine import Step
from pyro_dropout.engines.program import Program
from pyro_dropout.engines.replayed import Chain


class Capture(TorchDispatchMode):
    """Notes the storages that operations read and that none of them made."""

    def __init__(self) -> None:
        super().__init__()
        self.made: set[int] = set()
        self.read: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in (leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)):
            place = tensor.untyped_storage().data_ptr()
            if place not in self.made:
                self.read.setdefault(place, StorageWeakRef(tensor.untyped_storage()))
        result = func(*args, **(kwargs or {}))
        for tensor in (leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, torch.Tensor)):
            place = tensor.untyped_storage().data_ptr()
            if place not in self.read:
                self.made.add(place)
        return result


def descend(values: Any, state: Any, t: Any, lr: Any, x: Any) -> Any:
    moved = [value - lr * (value - x) / t for value in values]
    return moved, [[s + 1 for s in each] for each in state], (values[0] - x).square().sum()


def step_of(chain: int = 4) -> Step:
    start = [torch.zeros(3)], [[torch.zeros(3)]], torch.tensor(1.0), torch.tensor(0.5)
    return Step(descend, *start, row=[torch.zeros(3)], chain=chain)


def chain_of(step: Step, program: Program) -> tuple[Chain, Capture]:
    """Capture steps, each of which is given its number, by operations that change nothing afterwards."""
    capture = Capture()

    @contextlib.contextmanager
    def graph(_: Any) -> Iterator[None]:
        with capture:
            yield

    @contextlib.contextmanager
    def nothing(_: Any) -> Iterator[None]:
        yield

    def numbered(each: Chain) -> torch.Tensor:
        found = warmed_up(each)
        for k in range(step.chain):
            each.rows[0][k] = k
        return found

    warmed_up = Chain._warmed_up
    stream = SimpleNamespace(wait_stream=lambda other: None)
    with (
        mock.patch.object(torch.cuda, "Stream", return_value=stream),
        mock.patch.object(torch.cuda, "current_stream", return_value=stream),
        mock.patch.object(torch.cuda, "stream", nothing),
        mock.patch.object(torch.cuda, "CUDAGraph", return_value=None),
        mock.patch.object(torch.cuda, "graph", graph),
        mock.patch.object(Chain, "_warmed_up", numbered),
    ):
        made = Chain(step, program)
    return made, capture


def moved(steps: int) -> torch.Tensor:
    value = torch.zeros(3)
    for k in range(steps):
        value = value - 0.5 * (value - k) / (1 + k)
    return value


def test_what_a_captured_chain_reads_lives_as_long_as_the_chain() -> None:
    step = step_of()
    chain, capture = chain_of(step, step.recorded)
    assert len(capture.read) >= 5  # the parameter, its state, t, its offsets, lr, and the data
    del step
    assert [place for place, storage in capture.read.items() if storage.expired()] == []
    del chain


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.deep)])
def test_a_chain_takes_its_steps_one_after_another_on_the_tensors_of_the_step(compile: bool) -> None:
    step = step_of()
    program = step.recorded
    if compile:
        program.compile([*step.flat, *step.row])
    chain_of(step, program)
    torch.testing.assert_close(step.values[0], moved(4))  # those that warmed it up are taken back
    assert (step.t.item(), step.state[0][0].tolist()) == (5, [4.0] * 3)


def test_what_the_steps_are_given_is_copied() -> None:
    """Each replay writes into the memory of the chain: the tensors of the first step stay the user's."""
    step = step_of()
    chain, _ = chain_of(step, step.recorded)
    assert chain.rows[0].untyped_storage().data_ptr() != step.row[0].untyped_storage().data_ptr()
    assert step.row[0].tolist() == [0.0] * 3
