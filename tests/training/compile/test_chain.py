"""A CUDA graph reads the same memory at every replay: whatever it read when it was captured must stay alive.

There is no GPU where these tests run, so capturing is played by a mode that notes which tensors an operation reads.
"""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from pyro_dropout.training.compile.program import Chain


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


def chain_of(step: Any, steps: int) -> tuple[Chain, Capture]:
    capture = Capture()

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
        made = Chain(step, [torch.zeros(3)], [[torch.zeros(3)]], torch.tensor(1.0), torch.tensor(0.5), inputs)
    return made, capture


def descend(values: Any, state: Any, t: Any, lr: Any, x: Any) -> Any:
    moved = [value - lr * (value - x) / t for value in values]
    return moved, [[s + 1 for s in each] for each in state], (values[0] - x).square().sum()


def test_what_a_captured_chain_reads_lives_as_long_as_the_chain() -> None:
    chain, capture = chain_of(descend, 4)
    assert len(capture.read) >= 8  # the parameter, its state, t, its offsets, lr, and the data of four steps
    assert [place for place, storage in capture.read.items() if storage.expired()] == []
    del chain


def test_the_watcher_notices_what_is_let_go() -> None:
    offset = [torch.arange(4.0)]

    def careless(values: Any, state: Any, t: Any, lr: Any, x: Any) -> Any:
        return descend(values, state, t + offset[0].sum(), lr, x)

    chain, capture = chain_of(careless, 4)
    place = offset[0].untyped_storage().data_ptr()
    assert place in capture.read
    offset.clear()
    assert capture.read[place].expired()
    del chain


def test_a_chain_takes_its_steps_one_after_another() -> None:
    chain, _ = chain_of(descend, 4)
    value = torch.zeros(3)
    for k in range(4):
        value = value - 0.5 * (value - k) / (1 + k)
    torch.testing.assert_close(chain.values[0], value)
    assert chain.t.item() == 5
    assert chain.state[0][0].tolist() == [4.0] * 3
