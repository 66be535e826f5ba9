"""Operations that stay torch's own in a step in plain C: those of linear algebra, and a few others."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten

MOST = 8  # in one step
# Torch's compiler calls most of these too; what it writes as a kernel is faster there.
_OPERATIONS = {
    str(each): each
    for each in (
        *(aten._linalg_slogdet.default, aten.linalg_lu_solve.default),
        *(aten.linalg_cholesky_ex.default, aten.cholesky_inverse.default),
        *(aten._softmax.default, aten.cumsum.default),  # of the few components of a mixture
        *(aten.logsumexp.default, aten.nll_loss_forward.default, aten.nll_loss_backward.default),  # of classes
    )
}
BY_TORCH = set(_OPERATIONS.values())


def told(args: Any, number_of: Callable[[fx.Node], int]) -> Any:
    """Return arguments as JSON values, with tensors by their numbers; an error if one is something else."""
    if isinstance(args, fx.Node):
        return {"tensor": number_of(args)}
    if isinstance(args, list | tuple):
        return [told(each, number_of) for each in args]
    if args is None or isinstance(args, bool | int | float):
        return args
    raise TypeError(f"{args!r} cannot be written down")


def bound_call(name: str, args: Any, tensors: Sequence[Tensor], outs: Sequence[Sequence[Any]]) -> Callable[[], None]:
    """Return a call of an operation on tensors, whose results are written into others.

    Args:
        name: of the operation, as torch prints it.
        args: its arguments, as ``told`` returns them.
        tensors: the tensors among them.
        outs: for each result that is used, its number and the tensor that holds it.

    Example:
        >>> from pyro_dropout.training.compile.plain_c.by_torch import bound_call
        >>> out = torch.empty(1, 1)
        >>> bound_call("aten.cholesky_inverse.default", [{"tensor": 0}], [torch.full((1, 1), 2.0)], [[0, out]])()
        >>> out
        tensor([[0.2500]])
    """
    operation, given = _OPERATIONS[name], _filled(args, tensors)

    def run() -> None:
        with torch.no_grad():
            found = operation(*given)
        results = found if isinstance(found, list | tuple) else [found]
        for number, out in outs:
            out.copy_(results[number])

    return run


def _filled(args: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(args, dict):
        return tensors[args["tensor"]]
    return [_filled(each, tensors) for each in args] if isinstance(args, list) else args
