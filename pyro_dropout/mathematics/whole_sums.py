"""Sums over all weights of a layer, whose gradients are one pass over them: for eager steps on a CPU.

Autograd would keep the squares and logarithms of all weights, and go over them several times on the way back. Compiled
steps need none of this: the compiler fuses what is written out.
"""

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from pyro_dropout.protocols import Context


def is_traced() -> bool:
    """Whether operations are being recorded for a compiled program."""
    return bool(_get_current_dispatch_mode_stack())


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


class _WidthSums(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(scale: Tensor) -> tuple[Tensor, Tensor]:
        return torch.linalg.vector_norm(scale).square(), scale.log().sum()

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Context, by_square: Tensor, by_log: Tensor) -> Tensor:
        (scale,) = ctx.saved_tensors
        return torch.reciprocal(scale).mul_(by_log).add_(scale * (2 * by_square))


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


def width_sums(scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return Σ σ² and Σ log σ.

    Example:
        >>> import torch
        >>> from pyro_dropout.mathematics.whole_sums import width_sums
        >>> width_sums(torch.ones(3))
        (tensor(3.), tensor(0.))
    """
    squares, logs = _WidthSums.apply(scale)  # type: ignore[no-untyped-call]
    return squares, logs
