"""Which kernels inductor launches together, through the setter that torch has for that."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._inductor.codegen import triton_combo_kernel as combined
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from pyro_dropout.engines import program
from pyro_dropout.engines.program import by_shape
from pyro_dropout.engines.torch_internals import combined_by

NAME = "_custom_combo_kernel_horizontal_partition_algorithm"


def reduction(results: int, terms: int) -> Any:
    return SimpleNamespace(group=("cuda", (results, terms)), is_reduction=lambda: terms > 1)


def test_long_reductions_are_with_their_like_and_all_else_together() -> None:
    update, other, batch, small = reduction(1024, 1024), reduction(1024, 1024), reduction(4096, 91), reduction(1024, 3)
    whole, elements = reduction(128, 8192), reduction(2**22, 1)
    unknown = SimpleNamespace(group=("cuda", ("u0", 1024)), is_reduction=lambda: True)
    groups = by_shape([batch, update, small, whole, elements, other, unknown])
    assert groups == [[batch, small, elements, unknown], [update, other], [whole]]


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
def test_every_step_that_is_compiled_for_a_gpu_has_its_kernels_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, a step of 784-1024x3-10 took twice as long: its updates shared the small blocks of short sums."""
    usual, seen = getattr(combined, NAME), []
    monkeypatch.setattr(program, "compile_fx", lambda *given: seen.append(getattr(combined, NAME) is usual))
    graph = make_fx(lambda x: x + 1)(torch.zeros(2))
    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs = [torch.empty(2, device=device) for device in ("cuda", "cpu")]
    for each in inputs:
        program.compiled(graph, [each])
    assert seen[:2] == [False, True]
    with pytest.raises(ZeroDivisionError), combined_by(by_shape):
        raise ZeroDivisionError
    assert getattr(combined, NAME) is usual
