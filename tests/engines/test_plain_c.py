"""A step in plain C computes what torch computes, and what has no plain form is refused."""

from collections.abc import Callable, Sequence
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from pyro_dropout.engines import agreement, in_c
from pyro_dropout.engines.c.source import Source
from pyro_dropout.engines.engine import CannotError
from pyro_dropout.engines.in_c import compiled, compiler
from pyro_dropout.engines.program import Program
from pyro_dropout.engines.recorder import record

aten = torch.ops.aten
pytestmark = pytest.mark.skipif(not compiler(), reason="there is no C compiler")


def ran(function: Callable[..., list[Tensor]], *inputs: Tensor, seed: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    """Return the results of a function in plain C and in torch, with what each leaves in its inputs."""
    mine, theirs = [each.clone() for each in inputs], [each.clone() for each in inputs]
    run = in_c_of(function, *mine)
    torch.manual_seed(seed)
    found = run()
    torch.manual_seed(seed)
    expected = function(*theirs)
    return [*found, *mine], [*expected, *theirs]


def in_c_of(function: Callable[..., list[Tensor]], *inputs: Tensor, writes: int = 0) -> Callable[[], list[Tensor]]:
    """Return a function in C on these inputs, also where it is wrong."""
    program = Program(function, *[each.clone() for each in inputs], compile=False)
    with mock.patch.object(agreement, "_close", return_value=True):
        return in_c.in_c(program, inputs, writes)


def agrees(function: Callable[..., list[Tensor]], *inputs: Tensor) -> None:
    found, expected = ran(function, *inputs)
    for k, (left, right) in enumerate(zip(found, expected, strict=True)):
        # a few units in the last place: torch's own functions and these have up to two each
        slack = 8 * torch.finfo(right.dtype).eps if right.dtype.is_floating_point else 0
        tiny = torch.finfo(right.dtype).tiny if right.dtype.is_floating_point else 0
        torch.testing.assert_close(left, right, rtol=slack, atol=tiny, equal_nan=True, msg=lambda m, k=k: f"{k}: {m}")


@pytest.mark.thinned(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_function_of_one_element(dtype: torch.dtype) -> None:
    big = 80.0 if dtype == torch.float32 else 600.0
    odd = [0.0, -0.0, 1.0, -1.0, 1e-20, -1e-20, 1e-7, -1e-7, 0.6249, 0.6251, float("inf"), -float("inf"), float("nan")]
    tiny = torch.finfo(dtype).tiny
    ends = [tiny, tiny / 8, -tiny, big, -big, 2 * big, -2 * big, torch.finfo(dtype).max]
    spread = torch.cat([torch.linspace(-big, big, 97), torch.linspace(-1.5, 1.5, 68)])
    x = torch.cat([torch.tensor([*odd, *ends], dtype=dtype), spread.to(dtype)])[:150]

    def functions(x: Tensor) -> list[Tensor]:
        positive = x.abs()
        return [
            *(x.exp(), positive.log(), x.log(), x.expm1(), x.log1p(), x.tanh()),
            *(positive.sqrt(), x.sqrt(), positive.rsqrt(), x.reciprocal(), -x, x.abs(), x.square()),
            *(
                x.relu(),
                x.clamp_min(0.3),
                x.clamp_max(0.3),
                x.clamp(-0.2, 0.4),
                x**2,
                x**3,
                x**0.5,
                x**-1,
                x**-2,
                x**-0.5,
            ),
            *(x.xlogy(positive), (x * 0).xlogy(x), x.xlogy(x)),
            *(x < 0.5, x <= x, x > -1, x >= 0, x == 1, x != x, torch.where(x > 0, x, -2 * x)),
            aten.threshold_backward(x, x, 0.1),
        ]

    for part in x.split(50):  # few enough for double precision
        agrees(functions, part)


def test_functions_in_which_digits_cancel() -> None:
    x = torch.cat([torch.linspace(-60, 60, 121), torch.tensor([float("nan"), 300.0, -300.0])])

    def functions(x: Tensor) -> list[Tensor]:
        y = x.relu().clamp_max(1)
        slopes = [aten.sigmoid_backward(x, x.sigmoid()), aten.tanh_backward(x, x.tanh())]
        return [x.sigmoid(), F.binary_cross_entropy_with_logits(x, y, reduction="none"), *slopes]

    found, expected = ran(functions, x)
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_shapes_views_and_types(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    x, y, z = torch.randn(4, 1, 6, dtype=dtype), torch.randn(5, 6, dtype=dtype), torch.randn(7, 4, dtype=dtype).t()
    number, other = torch.tensor(0.3, dtype=dtype), torch.tensor(2.0, dtype=torch.float64)

    def views(x: Tensor, y: Tensor, z: Tensor, number: Tensor, other: Tensor) -> list[Tensor]:
        both = x + y
        turned = both.permute(2, 0, 1)
        return [
            *(
                both,
                turned * 2,
                (turned - 1).select(1, 2).clone(),
                both[1:, ::2, 3:] * number,
                both.transpose(0, 2) + 1,
            ),
            *(z * z, z.t() / 3, both.view(20, 6).t() + 0, y * other, (y > 0).to(dtype) * y, number * other),
            *(torch.stack([y, y * 2], -1), torch.cat([y, 3 * y[:2]], 0), y.split(2)[1] + 1, y.unbind(1)[3] * number),
            *(torch.zeros_like(y) + 2, torch.ones(3, dtype=dtype), torch.full((2,), 0.1, dtype=dtype) * number),
            *(aten.select_backward(y, [3, 5, 6], 0, 1), aten.slice_backward(y, [5, 13], 1, 1, 13, 2)),
            *((y > 0) & (y < 1), y.double() + 0.1, y.float() * 3, y.diagonal() * 2, y.expand(2, 5, 6) - 1),
            y.new_zeros(2, 2).exp(),
            *((number + y[:1, :1]).diagonal() * 2, (y * 2).diagonal() + 1, (y * 2).unbind(0)[1] * 2),
        ]

    agrees(views, x, y, z, number, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    x, y = torch.rand(3, 4, 5, dtype=dtype), torch.rand(700, 9, dtype=dtype)

    def sums(x: Tensor, y: Tensor) -> list[Tensor]:
        turned = x.permute(2, 0, 1)
        return [
            *(
                x.sum(),
                x.sum(0),
                x.sum(1),
                x.sum(2),
                x.sum((0, 2)),
                x.sum((0, 1), keepdim=True),
                x.sum(-1, keepdim=True),
            ),
            *(x.mean(), x.mean((1, 2)), turned.sum(0), turned.sum(1), turned.sum((1, 2)), (turned * 2).mean(1)),
            *(y.sum(), y.sum(0), y.sum(1), (y - y.mean(0)).square().sum(0), (y * y).sum() - y.sum()),
            *(x[:1, :1, :1].sum(), x[:, :1].sum(1) + x.sum(), x.expand(2, 3, 4, 5).mean(0)),
        ]

    found, expected = ran(sums, x, y)
    slack = 100 * torch.finfo(dtype).eps  # in another order
    torch.testing.assert_close(found, expected, rtol=slack, atol=slack)


def test_operations_that_stay_torch_s_own() -> None:
    x, y = torch.randn(6, 4), torch.tensor([2.0, 3.0, 4.0])

    def step(x: Tensor, y: Tensor) -> list[Tensor]:
        square = x.t() @ x + torch.eye(4)
        factor, _ = aten.linalg_cholesky_ex(square + torch.eye(4))
        size = torch.linalg.slogdet(square).logabsdet
        inverse = torch.cholesky_inverse(factor) * 2
        large = (x.softmax(0).cumsum(0) >= 0.5).sum(0)
        return [factor + 1, size * 2, inverse, torch.diag_embed(y * 2), large, large == 3, y.lgamma()]

    found, expected = ran(step, x, y)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_inputs_are_written_over_after_all_reads() -> None:
    x, y, t = torch.randn(3, 5), torch.randn(5, 3), torch.tensor(2.0)

    def step(x: Tensor, y: Tensor, t: Tensor) -> list[Tensor]:
        new, other, loss = x * 0.9 + y.t(), y + x.t() * t, (x * x).sum() * t
        product = x @ y
        turned, following = x.t() * 3, t + 1
        x.copy_(new)
        y.copy_(other)
        t.copy_(following)
        return [loss, product, turned]

    found, expected = ran(step, x, y, t)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_outputs_are_written_over_inputs_that_others_show() -> None:
    """The inputs are exchanged, one of them transposed, and the last outputs show them."""
    a, b, c, x = torch.arange(9.0).reshape(3, 3), torch.arange(9.0, 18.0).reshape(3, 3), torch.ones(2), torch.randn(3)
    given = [value.clone() for value in (a, b, c, x)]
    run = in_c_of(lambda a, b, c, x: [b.mT, a, c, a, a + x, b[1]], *given, writes=3)
    for found, expected in zip([*run(), *given], [a, a + x, b[1], b.mT, a, c, x], strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_what_is_written_over_an_input_is_also_returned_or_multiplied() -> None:
    x, y, z = torch.randn(3, 5), torch.randn(5, 3), torch.randn(3, 5)

    def step(x: Tensor, y: Tensor, z: Tensor) -> list[Tensor]:
        new, other = x * 0.9 + 1, z.exp() - x
        product = other @ y
        x.copy_(new)
        z.copy_(other)
        return [new, product, (product.t() + 1).reshape(9)[:7] * 2]

    found, expected = ran(step, x, y, z)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_inputs_that_lie_turned_in_memory_are_written_over(dtype: torch.dtype) -> None:
    x, y = torch.randn(20, 9, dtype=dtype).t(), torch.randn(9, 20, dtype=dtype)

    def step(x: Tensor, y: Tensor) -> list[Tensor]:
        new, other = 0.9 * x + y, y * 2 - x
        turned = new.t() + 1
        x.copy_(new)
        y.copy_(other)
        return [turned]

    x, turned = torch.empty_strided((9, 20), (1, 9), dtype=dtype).copy_(x), x
    found, expected = ran(step, x, y)
    torch.testing.assert_close(found, expected)
    assert torch.equal(turned, x)


def test_parts_of_several_tensors_and_the_logarithm_of_a_sigmoid() -> None:
    x, y = torch.randn(4, 10, 6), torch.randn(4, 6)

    def step(x: Tensor, y: Tensor) -> list[Tensor]:
        parts = torch.stack([each * (k + 1) for k, each in enumerate(x.unbind(1))], 1)
        longer = torch.cat([x[:, 3:5], y[:, None], parts[:, :7]], 1)
        sums = torch.cat([y, x.sum(1) * 2, y[:, :3]], 1).sum(1)
        value, buffer = aten.log_sigmoid_forward(30 * y)
        slope = aten.log_sigmoid_backward(y, 30 * y, buffer)
        return [parts, longer, sums, F.pad(y, (2, 20)) + 1, value, slope]

    found, expected = ran(step, x, y)
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6)


def test_a_truth_value_that_c_does_not_write_is_left_to_torch() -> None:
    agrees(lambda x: [torch.ne(x > 0, True).float()], torch.randn(6))


def test_rows_are_chosen_by_their_numbers() -> None:
    x, y, index = torch.randn(6, 3), torch.randn(6), torch.tensor([5, 0, -1, 2, -6])
    agrees(lambda x, y, index: [x[index] * 2, y[index] + 1, x[1:][index[1:3]]], x, y, index)
    agrees(lambda x, y, index: [x.t()[:, index.abs() % 6] + 1, (x + 1)[index]], x, y, index)
    each = torch.tensor([[5, 0], [-1, 2], [3, -6]])  # the rows of each network of a fleet
    agrees(lambda x, y, each: [x[each] * 2, y[each] + 1], x, y, each)
    for wrong in (6, -7):
        for index, then in (
            (each.clone(), torch.tensor([[0, 1], [2, 3], [wrong, 0]])),
            (torch.tensor([0, 1]), torch.tensor([0, wrong])),
        ):
            run = in_c_of(lambda x, index: [x[index] * 2], x, index)
            index.copy_(then)
            with pytest.raises(IndexError, match="out of range"):
                run()


# --- what is refused --------------------------------------------------------------------------------------------------


def written_twice(x: Tensor) -> list[Tensor]:
    x.copy_(x + 1)
    return [x * 2]


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (lambda x: [x.digamma(), x.logcumsumexp(0), x**2.5, F.gelu(x), F.gelu(x, approximate="tanh")], [torch.rand(3)]),
        (lambda x: [torch.linalg.cholesky_ex(x, check_errors=True).L], [torch.eye(3)]),
        (lambda x: [x.sum(), x.amax()], [torch.rand(2**13 + 1)]),
        (lambda x: [x.exp(), x.tanh()], [torch.randn(2**14 - 7, dtype=torch.float64)]),
        (lambda n: [n + 1, n.sum(), n * n - 3, n & 6, 1 - n, n > 2, n / 2], [torch.arange(7)]),
        (lambda x, y: [torch.add(x, y, alpha=2), torch.rsub(x, y, alpha=3)], [torch.rand(3), torch.rand(3)]),
        (lambda x: [x.clamp(min=0.0), x.clamp(max=0.1), x.clamp(-0.1, 0.1), x.clamp(min=-x)], [torch.randn(9)]),
        (lambda x: [torch.cat([x, x[:0], torch.zeros(0)]), (x > 0).sum(), (x > 0).sum(0)], [torch.randn(4, 3)]),
        (lambda x: [(x > 0).any(), (x > 9).any(1), (x > 0).any(-1, keepdim=True)], [torch.randn(4, 3)]),
        (lambda x: [~(x > 0), x.isfinite(), (x > 0) ^ (x < 1), (x > 0) * (x < 1)], [torch.randn(4, 3)]),
        (lambda x, y: [torch.div(x, y, rounding_mode="floor"), F.mse_loss(x, y)], [torch.rand(3), torch.rand(3)]),
        (
            lambda x, y: [torch.logaddexp(x, y), torch.maximum(x, y), torch.minimum(x, y)],
            [torch.tensor([1.0, -torch.inf, -torch.inf, 2.0]), torch.tensor([1.0, -torch.inf, torch.nan, -torch.inf])],
        ),
        (
            lambda x: [F.layer_norm(x, (3,)), x.softmax(-1), F.silu(x), F.softplus(x), F.leaky_relu(x), F.elu(x)],
            [torch.randn(4, 3)],
        ),
        (lambda x: [(x + 1).add_(2).mul_(x).relu_()], [torch.randn(3)]),
        (lambda x: [F.pad(x, (0, 2)), F.pad(x, (1, 0, 2, 3), value=4.0), F.pad(x, (-1, 1))], [torch.randn(4, 3)]),
        (lambda x: [x.masked_fill(x > 0, -3.0), x.t().masked_fill(x.t() > 0, 1.0) * 2], [torch.randn(4, 3)]),
    ],
)
def test_whatever_makes_new_tensors_is_computed_or_called(
    function: Callable[..., list[Tensor]], inputs: Sequence[Tensor]
) -> None:
    found, expected = ran(function, *inputs)
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (lambda x: [torch.linalg.matrix_exp(x + k) for k in range(41)], [torch.eye(3)]),
        (lambda x: [x + 1], [torch.ones(2**20 + 1)]),
        (lambda x: [x + 1], [torch.ones(3, dtype=torch.bfloat16)]),
        (lambda x: [torch.bernoulli(x)], [torch.ones(3)]),
        (lambda x: [(x + 1).as_strided((2,), (1,))], [torch.ones(3)]),
        (lambda x: [x.add_(1)], [torch.ones(3)]),
        (written_twice, [torch.ones(3)]),
    ],
)
def test_what_has_no_plain_form_is_refused(function: Callable[..., list[Tensor]], inputs: Sequence[Tensor]) -> None:
    graph = record(function, [each.clone() for each in inputs])
    assert graph is not None
    with pytest.raises(CannotError):
        Source(graph, inputs)


def test_what_shares_memory_is_not_written_over() -> None:
    def step(x: Tensor, y: Tensor) -> list[Tensor]:
        x.copy_(y * 2)
        return [y + 0]

    graph = record(step, [torch.ones(3), torch.ones(3)])
    assert graph is not None
    whole = torch.ones(3)
    assert Source(graph, [whole, torch.ones(3)])
    with pytest.raises(CannotError, match="written over"):
        Source(graph, [whole, whole])


def test_what_rounding_decides_need_not_agree() -> None:
    """As in Adam's first step where a gradient is zero but for rounding; what is not made of it must still agree."""
    torch.manual_seed(0)
    x, y = torch.randn(20, 900), torch.randn(900, 30)  # so many that torch adds them up in parts

    def signs(x: Tensor, y: Tensor) -> list[Tensor]:
        rest = x @ y - (x.double() @ y.double()).float()
        return [rest / (rest.abs() + 1e-9), x.sum()]

    program = Program(signs, x, y, compile=False)
    found = in_c.in_c(program, [x, y])()
    assert not torch.equal(found[0], signs(x, y)[0])
    wrong = mock.patch.object(in_c, "Run", return_value=lambda: [found[0], found[1] + 0.1])
    with wrong, pytest.warns(match="in C"), pytest.raises(CannotError, match="does not compute"):
        in_c.in_c(program, [x, y])


def test_a_wrong_step_is_found_where_other_last_digits_have_no_inverse() -> None:
    def root(x: Tensor) -> list[Tensor]:
        return [torch.linalg.cholesky_ex(x, check_errors=True).L, x.sum()]

    x = torch.ones(2, 2, dtype=torch.float64) + torch.diag(torch.tensor([0.0, 4e-15], dtype=torch.float64))
    shaken = mock.patch.object(agreement, "_shaken", lambda each: each - 1)  # which has none
    right = root(x)
    wrong = mock.patch.object(in_c, "Run", return_value=lambda: [right[0], right[1] + 0.1])
    with shaken, wrong, pytest.warns(match="in C"), pytest.raises(CannotError, match="does not compute"):
        in_c.in_c(Program(root, x, compile=False), [x])


def test_an_error_of_the_compiler_is_told_by_no_library() -> None:
    with pytest.raises(CannotError, match="C compiler failed"):
        compiled("this is no C")
    assert compiled("int segment0(void *const *p) { return 0; }")


def test_what_the_graph_holds_is_not_written_over() -> None:
    held = torch.ones(3)

    def step(x: Tensor) -> list[Tensor]:
        x.copy_(held * 2)
        return [held + 0]

    graph = record(step, [torch.ones(3)])
    assert graph is not None
    assert Source(graph, [torch.ones(3)])
    with pytest.raises(CannotError, match="written over"):
        Source(graph, [held])


def test_an_error_of_torch_ends_the_step() -> None:
    x, y = torch.eye(3), torch.zeros(3)

    def step(x: Tensor, y: Tensor) -> list[Tensor]:
        factor = torch.linalg.cholesky_ex(x, check_errors=True).L
        y.copy_(factor.sum(0))
        return [factor]

    run = in_c_of(step, x, y)
    run()
    assert y.tolist() == [1, 1, 1]
    x.neg_()
    with pytest.raises(torch.linalg.LinAlgError):
        run()
    assert y.tolist() == [1, 1, 1]
    x.neg_()
    assert torch.equal(run()[0], x)


def test_large_tensors_are_in_c_where_torch_has_few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members of an ensemble are stacked: without C their steps took three times as long on one thread."""
    x, rows = torch.randn(16, 1024, 8), torch.randn(16, 8, 30)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    agrees(lambda x, rows: [(x @ rows).relu().sum((1, 2))], x, rows)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    with pytest.raises(CannotError, match="too many"):
        in_c_of(lambda x, rows: [(x @ rows).relu().sum((1, 2))], x, rows)


def test_where_last_digits_decide_whether_there_is_a_number_nothing_is_known() -> None:
    theirs, shaken = torch.tensor([1.5e11, 1.0]), torch.tensor([float("nan"), 1.0])
    assert agreement._close(theirs * torch.tensor([1.001, 1.0]), theirs, shaken, 0.0)
    assert not agreement._close(theirs * torch.tensor([1.001, 1.001]), theirs, shaken, 0.0)  # the other is known
    assert not agreement._close(theirs * 1.001, theirs, theirs * (1 + 1e-7), 0.0)
