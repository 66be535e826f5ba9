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

from pyro_dropout.engines.inductor import Chain
from pyro_dropout.engines.program import Program, counting


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


def chain_of(
    step: Any, steps: int, values: Any = None, state: Any = None, t: Any = None, lr: Any = None
) -> tuple[Chain, Capture]:
    capture = Capture()
    start = [values or [torch.zeros(3)], state or [[torch.zeros(3)]]]
    start += [torch.tensor(1.0) if t is None else t, torch.tensor(0.5) if lr is None else lr]

    @contextlib.contextmanager
    def graph(_: Any) -> Iterator[None]:
        with capture:
            yield

    @contextlib.contextmanager
    def nothing(_: Any) -> Iterator[None]:
        yield

    stream = SimpleNamespace(wait_stream=lambda other: None)
    with (
        mock.patch.object(torch.cuda, "Stream", return_value=stream),
        mock.patch.object(torch.cuda, "current_stream", return_value=stream),
        mock.patch.object(torch.cuda, "stream", nothing),
        mock.patch.object(torch.cuda, "CUDAGraph", return_value=None),
        mock.patch.object(torch.cuda, "graph", graph),
    ):
        inputs = [(torch.full((3,), float(k)),) for k in range(steps)]
        made = Chain(step, *start, inputs)
    return made, capture


def descend(values: Any, state: Any, t: Any, lr: Any, x: Any) -> Any:
    moved = [value - lr * (value - x) / t for value in values]
    return moved, [[s + 1 for s in each] for each in state], (values[0] - x).square().sum()


def test_what_a_captured_chain_reads_lives_as_long_as_the_chain() -> None:
    chain, capture = chain_of(descend, 4)
    assert len(capture.read) >= 8  # the parameter, its state, t, its offsets, lr, and the data of four steps
    assert [place for place, storage in capture.read.items() if storage.expired()] == []
    del chain


def test_a_chain_takes_its_steps_one_after_another() -> None:
    chain, _ = chain_of(descend, 4)
    value = torch.zeros(3)
    for k in range(4):
        value = value - 0.5 * (value - k) / (1 + k)
    torch.testing.assert_close(chain.values[0], value)
    assert chain.t.item() == 5
    assert chain.state[0][0].tolist() == [4.0] * 3


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.deep)])
def test_a_chain_of_steps_that_write_over_their_parameters_has_no_copies_of_them(compile: bool) -> None:
    values, state, t, lr = [torch.zeros(3)], [[torch.ones(3)]], torch.tensor(1.0), torch.tensor(0.5)
    program = Program(counting(descend), values, state, t, lr, torch.zeros(3), writes=3, compile=compile)
    assert program.writes == 3
    chain, _ = chain_of(program, 4, values, state, t, lr)
    assert chain.values[0] is values[0]
    assert chain.state[0][0] is state[0][0]
    assert chain.t is t
    value = torch.zeros(3)
    for k in range(4):  # those that warmed it up are taken back
        value = value - 0.5 * (value - k) / (1 + k)
    torch.testing.assert_close(values[0], value)
    assert (t.item(), state[0][0].tolist()) == (5, [5.0] * 3)


def test_a_warm_up_that_fails_leaves_the_parameters_as_they_were() -> None:
    values, state, t, lr = [torch.zeros(3)], [[torch.ones(3)]], torch.tensor(1.0), torch.tensor(0.5)
    program = Program(counting(descend), values, state, t, lr, torch.zeros(3), writes=3, compile=False)
    calls = []

    def breaks(*given: Any, **more: Any) -> Any:
        calls.append(given)
        if len(calls) == 2:
            raise MemoryError
        return Program.flat(program, *given, **more)

    with mock.patch.object(program, "flat", breaks), pytest.raises(MemoryError):
        chain_of(program, 4, values, state, t, lr)
    assert (values[0].tolist(), state[0][0].tolist(), t.item()) == ([0.0] * 3, [1.0] * 3, 1.0)
