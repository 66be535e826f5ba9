"""Sums over all weights of a layer, whose gradients are one pass over them: for eager steps on a CPU.

Autograd would keep the squares and logarithms of all weights, and go over them several times on the way back. Compiled
steps need none of this: the compiler fuses what is written out.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from pyro_dropout.mathematics.gaussian_rows import gram_log_det_and_inverse
from pyro_dropout.protocols import Context


def is_traced() -> bool:
    """Whether operations are being recorded for a compiled program; a mode that only counts them records nothing."""
    return any(not getattr(mode, "only_counts", False) for mode in _get_current_dispatch_mode_stack())


def runs_on_cpu(value: Tensor) -> bool:
    """Whether operations on a tensor run now, one by one, on a CPU: not recorded, not mapped."""
    return value.device.type == "cpu" and not is_traced() and torch._C._functorch.peek_interpreter_stack() is None


class _SumOfSquares(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(values: Tensor) -> Tensor:
        norm: Tensor = torch.linalg.vector_norm(values)
        return norm.square()

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Context, slope: Tensor) -> Tensor:
        (values,) = ctx.saved_tensors
        found: Tensor = values * (2 * slope)
        return found


class _Widths(torch.autograd.Function):
    @staticmethod
    def forward(scale: Tensor) -> tuple[Tensor, ...]:
        squares = torch.stack([torch.linalg.vector_norm(each).square() for each in scale])
        logs = torch.stack([each.log().sum() for each in scale])
        return squares, logs, *(each.square() for each in scale)

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Tensor], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Context, by_square: Tensor | None, by_log: Tensor | None, *slopes: Tensor | None) -> Tensor:
        (scale,) = ctx.saved_tensors
        found = torch.empty_like(scale)
        for k, (out, width, slope) in enumerate(zip(found, scale, slopes, strict=True)):
            shared = scale.new_zeros(()) if by_square is None else by_square[k]
            if slope is None:
                torch.mul(width, 2 * shared, out=out)
            else:
                torch.add(slope, shared, out=out).mul_(width).mul_(2)
            if by_log is not None:
                out.addcdiv_(by_log[k], width)
        return found


class _ScaledColumns(torch.autograd.Function):
    @staticmethod
    def forward(directions: Tensor, scale: Tensor, determinant: bool) -> tuple[Tensor, ...]:
        columns = [torch.mul(scale, column) for column in directions.unbind(-1)]
        squares = torch.stack([torch.linalg.vector_norm(column).square() for column in columns])
        small = scale.new_zeros(1, 1)
        log_det, inverse = gram_log_det_and_inverse(directions) if determinant else (small.squeeze(), small)
        return inverse, log_det, squares, *columns

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Tensor, Tensor, bool], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(output[0])
        ctx.save_for_backward(*inputs[:2], output[0])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(
        ctx: Context, _: Tensor | None, by_log_det: Tensor | None, by_square: Tensor | None, *slopes: Tensor | None
    ) -> tuple[Tensor, Tensor, None]:
        directions, scale, inverse = ctx.saved_tensors
        by_direction, by_scale = torch.empty_like(directions), torch.zeros_like(scale)
        for r, (out, column, slope) in enumerate(
            zip(by_direction.unbind(-1), directions.unbind(-1), slopes, strict=True)
        ):
            # The slope in σ∘a: that of whoever used it, and 2σ∘a for each unit of Σ(σ∘a)².
            twice = 0.0 if by_square is None else 2 * float(by_square[r])
            whole = torch.addcmul(torch.zeros_like(scale) if slope is None else slope, scale, column, value=twice)
            torch.mul(whole, scale, out=out)
            by_scale.addcmul_(whole, column)
        if by_log_det is not None:
            weights = 2 * by_log_det * inverse
            if directions.stride(-1) > 1:  # column by column in memory
                by_direction.mT.addmm_(weights, directions.mT)
            else:
                by_direction.addmm_(directions, weights)
        return by_direction, by_scale, None


@dataclass(frozen=True)
class ScaledColumns:
    """The columns of σA, and sums over them; returned by ``scaled_columns``.

    Attributes:
        columns: σ∘a for each column a of A.
        squares: Σ(σ∘a)² of each column, (R,).
        log_det: log det(I + AᵀA); 0 where it was not asked for.
    """

    columns: tuple[Tensor, ...]
    squares: Tensor
    log_det: Tensor


def scaled_columns(directions: Tensor, scale: Tensor, determinant: bool = True) -> ScaledColumns:
    """Return σ∘a for each column a of A, (K, R), and sums over them; fastest where each column lies together in memory.

    Example:
        >>> import torch
        >>> from pyro_dropout.mathematics.whole_sums import scaled_columns
        >>> scaled_columns(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([10.0, 1.0])).columns
        (tensor([10.,  3.]), tensor([20.,  4.]))
    """
    _, log_det, squares, *columns = _ScaledColumns.apply(directions, scale, determinant)  # type: ignore[no-untyped-call]
    return ScaledColumns(tuple(columns), squares, log_det)


def sum_of_squares(values: Tensor) -> Tensor:
    """Return Σ v².

    Example:
        >>> import torch
        >>> from pyro_dropout.mathematics.whole_sums import sum_of_squares
        >>> v = torch.tensor([3.0, 4.0], requires_grad=True)
        >>> sum_of_squares(v).backward()
        >>> v.grad
        tensor([6., 8.])
    """
    found: Tensor = _SumOfSquares.apply(values)  # type: ignore[no-untyped-call]
    return found


@dataclass(frozen=True)
class Widths:
    """Sums and squares of the widths σ of L components; returned by ``width_parts``.

    Attributes:
        squares: Σ σ² of each component, (L,).
        logs: Σ log σ of each component, (L,).
        variances: σ² of each component, L tensors.
    """

    squares: Tensor
    logs: Tensor
    variances: tuple[Tensor, ...]


def width_parts(scale: Tensor) -> Widths:
    """Return Σ σ², Σ log σ and σ² of each component, (L, *shape).

    Example:
        >>> import torch
        >>> from pyro_dropout.mathematics.whole_sums import width_parts
        >>> width_parts(torch.ones(1, 3))
        Widths(squares=tensor([3.]), logs=tensor([0.]), variances=(tensor([1., 1., 1.]),))
    """
    squares, logs, *variances = _Widths.apply(scale)  # type: ignore[no-untyped-call]
    return Widths(squares, logs, tuple(variances))
