"""What is left out of a recorded step changes no number."""

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from pyro_dropout.engines.simplify_graph import simplify_graph


def lightened(function: Callable[..., Any], *inputs: Tensor) -> Any:
    made = make_fx(function)(*inputs)
    simplify_graph(made.graph)
    made.recompile()
    return made


def same(function: Callable[..., Any], *inputs: Tensor) -> int:
    """Check that the lighter graph gives and writes the same, from the same random numbers; return its size."""
    made = lightened(function, *[each.clone() for each in inputs])
    for _ in range(2):
        mine, theirs = [each.clone() for each in inputs], [each.clone() for each in inputs]
        torch.manual_seed(3)
        expected = function(*theirs)
        torch.manual_seed(3)
        found = made(*mine)
        for left, right in zip([*found, *mine], [*expected, *theirs], strict=True):
            assert torch.equal(left, right)
            assert left.stride() == right.stride()
    return len(made.graph.nodes)


X = torch.arange(1.0, 10.0).reshape(3, 3)


def test_two_draws_stay_two() -> None:
    same(lambda x: [torch.randn(3) + x, torch.randn(3) + x, torch.rand_like(x), torch.rand_like(x)], X)


def test_an_operation_of_a_user_is_not_left_out() -> None:
    @torch.library.custom_op("lighter_test::draw", mutates_args=())
    def draw(x: Tensor) -> Tensor:  # it does not say that it is random
        return x + torch.rand(3, 3)

    draw.register_fake(lambda x: torch.empty_like(x))
    first, second = lightened(lambda x: [draw(x) * 2, draw(x) * 2], X)(X)
    assert not torch.equal(first, second)


def test_what_is_written_between_two_readings_is_read_twice() -> None:
    def step(x: Tensor) -> list[Tensor]:
        before = x.exp().sum()
        kept = x * torch.ones_like(x)  # a copy of what x was
        x.add_(1.0)
        return [before, x.exp().sum(), kept.clone()]

    same(step, X)


def test_a_tensor_that_was_written_into_may_be_again() -> None:
    def step(x: Tensor) -> list[Tensor]:
        again = x.mul_(0.5)
        first = again.exp()
        x.add_(1.0)
        return [first * 2, again.exp() * 3]

    same(step, X)


def test_a_part_of_what_is_written_into_is_read_twice() -> None:
    def step(x: Tensor) -> list[Tensor]:
        row, column = x[0], x.unbind(1)[1]
        first = row.exp() + column.exp()
        x.add_(1.0)
        return [first * 2, (row.exp() + column.exp()) * 3]

    same(step, X)


def test_parts_that_torch_calls_unsafe_are_read_twice() -> None:
    def gated(x: Tensor) -> Tensor:  # as torch's GRU does
        one, other = ((x * 2).unsafe_chunk(2) for _ in range(2))
        return one[0].add_(one[1]) + other[0].mul_(3.0)

    x = torch.tensor([1.0, 2.0])
    made = make_fx(gated)(x)
    simplify_graph(made.graph)
    made.recompile()
    assert torch.equal(made(x), gated(x))


def test_ones_that_are_written_into_are_no_ones() -> None:
    def step(x: Tensor) -> list[Tensor]:
        mask = torch.ones_like(x)
        mask.mul_(2.0)
        return [x * mask]

    same(step, X)


def test_a_transposed_square_is_not_its_original() -> None:
    assert same(lambda x: [x.t() * 2, x.t().t() * 2, x.t().contiguous() + x], X) > 6


def test_two_outputs_stay_two_tensors() -> None:
    made = lightened(lambda x: [torch.zeros_like(x), torch.zeros_like(x)], X)
    first, second = made(X)
    assert first.data_ptr() != second.data_ptr()


def test_a_product_with_ones_that_is_larger_or_of_another_type_stays() -> None:
    same(lambda x: [x[0] * torch.ones(3, 3), x * torch.ones(3, 3, dtype=torch.float64), x.t() * torch.ones(3, 3)], X)


STEPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda a, b: a + b,
    "product": lambda a, b: a * b,
    "turn": lambda a, b: a.t(),
    "there and back": lambda a, b: a.unsqueeze(0).squeeze(0),
    "ones": lambda a, b: a * torch.ones(3, 3),
    "write": lambda a, b: a.mul_(0.5),
    "draw": lambda a, b: a + torch.randn(3, 3),
    "root": lambda a, b: a.abs().sqrt(),
    "copy": lambda a, b: b.clone(),
    "row": lambda a, b: a[0] + torch.zeros(3, 3),
    "write into a row": lambda a, b: a[1].add_(0.5) + torch.zeros(3, 3),
    "parts": lambda a, b: torch.stack(b.unbind(1)) * a,
    "detach": lambda a, b: a.detach(),
    "flat": lambda a, b: a.reshape(9).view(3, 3),
}


@pytest.mark.parametrize("long", [6, pytest.param(25, marks=pytest.mark.deep)])
@given(data=st.data())
@settings(max_examples=30)
def test_programs_of_all_kinds(long: int, data: st.DataObject) -> None:
    words = data.draw(st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=long))
    pairs = [data.draw(st.tuples(st.integers(0, 99), st.integers(0, 99))) for _ in words]

    def program(x: Tensor, y: Tensor) -> list[Tensor]:
        values = [x, y]
        for word, (left, right) in zip(words, pairs, strict=True):
            values.append(STEPS[word](values[left % len(values)], values[right % len(values)]))
        return [value.clone() for value in values]

    same(program, X, X.flip(0) / 4)


def test_powers_products_and_quotients_with_one_are_left_out() -> None:
    made = make_fx(lambda x: (x**1.0) * 1 / 1 + x)(torch.randn(3))
    simplify_graph(made.graph)
    made.recompile()
    x = torch.tensor([-0.0, float("nan"), 2.0])
    assert [node.op for node in made.graph.nodes] == ["placeholder", "call_function", "output"]
    torch.testing.assert_close(made(x), x + x, rtol=0, atol=0, equal_nan=True)


def test_a_product_with_one_that_changes_the_type_stays() -> None:
    made = make_fx(lambda x: (x * 1.0).exp())(torch.arange(3))
    simplify_graph(made.graph)
    made.recompile()
    torch.testing.assert_close(made(torch.arange(3)), torch.arange(3.0).exp())


def test_the_gradient_of_an_only_slice_is_a_view() -> None:
    made = make_fx(lambda g: torch.ops.aten.select_backward(g.exp(), [1, 3], 0, 0) + 1)(torch.randn(3))
    simplify_graph(made.graph)
    made.recompile()
    assert "aten.select_backward" not in made.code
    torch.testing.assert_close(made(torch.zeros(3)), torch.full((1, 3), 2.0))
    several = make_fx(lambda g: torch.ops.aten.select_backward(g.exp(), [2, 3], 0, 1) + 1)(torch.randn(3))
    simplify_graph(several.graph)
    several.recompile()
    torch.testing.assert_close(several(torch.zeros(3)), torch.tensor([[1.0] * 3, [2.0] * 3]))


def test_what_a_last_write_reads_is_not_what_it_writes() -> None:
    """The gradients of p·q are q and p: they are read after p has changed, so they stay copies."""

    def step(p: Tensor, q: Tensor) -> list[Tensor]:
        slopes = [q * 1, p * 1]
        torch._foreach_sub_([p, q], slopes)
        return [p, q]

    made = make_fx(step)(torch.ones(2), torch.ones(2))
    simplify_graph(made.graph)
    made.recompile()
    found = made(torch.full((2,), 5.0), torch.full((2,), 3.0))
    torch.testing.assert_close(found, [torch.full((2,), 2.0), torch.full((2,), -2.0)])
