"""Which kernels are launched together."""

from types import SimpleNamespace
from typing import Any

from torch._inductor.codegen import triton_combo_kernel as combined

from pyro_dropout.training.compile.combined_kernels import alike_together, by_shape

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
