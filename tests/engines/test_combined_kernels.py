"""Which kernels are launched together."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._inductor.codegen import triton_combo_kernel as combined
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from pyro_dropout.engines import program
from pyro_dropout.engines.combined_kernels import alike_together, by_shape

NAME = "_custom_combo_kernel_horizontal_partition_algorithm"


def kernel(results: int, terms: int) -> Any:
    return SimpleNamespace(group=("cuda", (results, terms)), is_reduction=lambda: terms > 1)


def test_long_reductions_are_with_their_like_and_all_else_together() -> None:
    update, other, batch, small = kernel(1024, 1024), kernel(1024, 1024), kernel(4096, 91), kernel(1024, 3)
    whole, elements = kernel(128, 8192), kernel(2**22, 1)
    groups = by_shape([batch, update, small, whole, elements, other])
    assert groups == [[batch, small, elements], [update, other], [whole]]


def test_sizes_that_are_not_known_yet_are_with_all_else() -> None:
    long, unknown = kernel(1024, 1024), SimpleNamespace(group=("cuda", ("u0", 1024)), is_reduction=lambda: True)
    assert by_shape([unknown, long]) == [[unknown], [long]]


def test_inductor_asks_within_the_context_alone() -> None:
    before = getattr(combined, NAME)
    with alike_together():
        assert getattr(combined, NAME) is not before
    assert getattr(combined, NAME) is before


def test_every_step_that_is_compiled_for_a_gpu_has_its_kernels_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, a step of 784-1024x3-10 took twice as long: its updates shared the small blocks of short sums."""
    usual, seen = getattr(combined, NAME), []
    monkeypatch.setattr(program, "_by_inductor", lambda *given: seen.append(getattr(combined, NAME) is usual))
    graph = make_fx(lambda x: x + 1)(torch.zeros(2))
    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs = [torch.empty(2, device=device) for device in ("cuda", "cpu")]
    for each in inputs:
        program._compile(graph, [each])
    assert seen[:2] == [False, True]
