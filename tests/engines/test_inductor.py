"""Which kernels inductor fuses and launches together, through the hooks that torch has for that."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.choices import InductorChoices
from torch._inductor.codegen import triton_combo_kernel as combined
from torch._inductor.dependencies import MemoryDep, WeakDep
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from pyro_dropout.engines import program
from pyro_dropout.engines.fused_kernels import by_shape, needs, updates_apart
from pyro_dropout.engines.program import Program
from pyro_dropout.engines.torch_internals import combined_by, fused_if

NAME = "_custom_combo_kernel_horizontal_partition_algorithm"


def reduction(results: int, terms: int) -> Any:
    return SimpleNamespace(group=("cuda", (results, terms)), is_reduction=lambda: terms > 1)


def test_long_reductions_are_with_their_like_and_all_else_together() -> None:
    update, other, batch, small = reduction(1024, 1024), reduction(1024, 1024), reduction(4096, 91), reduction(1024, 3)
    whole, elements = reduction(128, 8192), reduction(2**22, 1)
    unknown = SimpleNamespace(group=("cuda", ("u0", 1024)), is_reduction=lambda: True)
    groups = by_shape([batch, update, small, whole, elements, other, unknown])
    assert groups == [[batch, small, elements, unknown], [update, other], [whole]]


def kernel(name: str, *reads: Any, sums: bool = False) -> Any:
    places = {each if isinstance(each, WeakDep) else MemoryDep(each, torch.tensor(0), (), ()) for each in reads}
    return SimpleNamespace(
        get_buffer_names=lambda: {name}, read_writes=SimpleNamespace(reads=places), is_reduction=lambda: sums
    )


def test_a_sum_of_parameters_stays_apart_from_their_update(monkeypatch: pytest.MonkeyPatch) -> None:
    total = kernel("total", "weights", sums=True)
    update, over = kernel("update", "weights", "slope"), kernel("over", "update", WeakDep("total", "weights"))
    bias = kernel("bias", "update", sums=True)
    assert (needs(bias, update), needs(update, total)) == (True, False)
    assert not needs(over, total)  # it only has to come later
    monkeypatch.setattr(InductorChoices, "can_fuse", staticmethod(lambda *given: True))
    pairs = ((total, update), (over, total), (update, bias), (update, over))
    with fused_if(updates_apart):
        assert [V.choices.can_fuse(None, *pair, 1) for pair in pairs] == [False, False, True, True]
    assert V.choices.can_fuse(None, total, update, 1)


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
def test_every_step_that_is_compiled_for_a_gpu_has_its_kernels_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, a step of 784-1024x3-10 took twice as long: its updates shared the small blocks of short sums."""
    usual, seen = getattr(combined, NAME), []
    monkeypatch.setattr(program, "compile_fx", lambda *given: seen.append(getattr(combined, NAME) is usual))
    graph = make_fx(lambda x: x + 1)(torch.zeros(2))
    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs = [torch.empty(2, device=device) for device in ("cuda", "cpu")]
    for each in inputs:
        program._compile(graph, [each])
    assert seen[:2] == [False, True]
    with pytest.raises(ZeroDivisionError), combined_by(by_shape):
        raise ZeroDivisionError
    assert getattr(combined, NAME) is usual


@pytest.mark.deep
def test_a_program_takes_the_same_steps_with_and_without() -> None:
    def step(values: list[Tensor], x: Tensor) -> tuple[list[Tensor], Tensor]:
        return [value - 0.1 * value * x for value in values], torch.stack([v.square().sum() for v in values]).sum()

    values, x = [torch.randn(40, 30), torch.randn(30)], torch.rand(30)
    expected, total = step(values, x)
    with fused_if(updates_apart):
        made = Program(step, values, x, writes=2)
    found, same = made(values, x)
    assert all(one is other for one, other in zip(found, values, strict=True))
    torch.testing.assert_close(values, expected)
    torch.testing.assert_close(same, total)
