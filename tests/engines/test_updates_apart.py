"""Which operations inductor fuses where it writes over inputs."""

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.choices import InductorChoices
from torch._inductor.dependencies import MemoryDep, WeakDep

from pyro_dropout.engines.program import Program
from pyro_dropout.engines.updates_apart import needs, updates_apart


def kernel(name: str, *reads: Any, sums: bool = False) -> Any:
    places = {each if isinstance(each, WeakDep) else MemoryDep(each, torch.tensor(0), (), ()) for each in reads}
    return SimpleNamespace(
        get_buffer_names=lambda: {name}, read_writes=SimpleNamespace(reads=places), is_reduction=lambda: sums
    )


def test_a_sum_of_parameters_stays_apart_from_their_update() -> None:
    total = kernel("total", "weights", sums=True)
    update, over = kernel("update", "weights", "slope"), kernel("over", "update", WeakDep("total", "weights"))
    bias = kernel("bias", "update", sums=True)
    assert needs(bias, update)
    assert not needs(update, total)
    assert not needs(over, total)  # it only has to come later
    asked = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InductorChoices, "can_fuse", staticmethod(lambda *given: asked.append(given) or True))
        with updates_apart():
            answers = [InductorChoices.can_fuse(None, *pair, 1) for pair in ((total, update), (over, total))]
            others = [InductorChoices.can_fuse(None, *pair, 1) for pair in ((update, bias), (update, over))]
    assert (answers, others, len(asked)) == ([False, False], [True, True], 2)


def test_inductor_decides_as_before_after_the_context() -> None:
    before = InductorChoices.can_fuse
    with contextlib.suppress(ZeroDivisionError), updates_apart():
        assert InductorChoices.can_fuse is not before
        raise ZeroDivisionError
    assert InductorChoices.can_fuse is before


@pytest.mark.deep
def test_a_program_takes_the_same_steps_with_and_without() -> None:
    def step(values: list[Tensor], x: Tensor) -> tuple[list[Tensor], Tensor]:
        return [value - 0.1 * value * x for value in values], torch.stack([v.square().sum() for v in values]).sum()

    values, x = [torch.randn(40, 30), torch.randn(30)], torch.rand(30)
    expected, total = step(values, x)
    with updates_apart():
        program = Program(step, values, x, writes=2)
    found, same = program(values, x)
    assert all(one is other for one, other in zip(found, values, strict=True))
    torch.testing.assert_close(values, expected)
    torch.testing.assert_close(same, total)
