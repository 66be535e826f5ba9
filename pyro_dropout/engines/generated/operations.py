"""Operations of torch by what becomes of them in C and CUDA C, besides those with a formula for each element."""

from collections.abc import Sequence
from typing import Any

from torch import fx

VIEWS = {
    *("detach", "alias", "view", "_unsafe_view", "expand", "unsqueeze", "squeeze", "select", "t", "transpose"),
    *("permute", "slice", "diagonal", "unbind", "split", "split_with_sizes"),
}
DRAWS = {"rand": "uniform_", "randn": "normal_", "rand_like": "uniform_", "randn_like": "normal_"}
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}
_FILLS = {"zeros": 0, "zeros_like": 0, "new_zeros": 0, "ones": 1, "ones_like": 1, "new_ones": 1}
_VALUES = {"full": 1, "full_like": 1, "new_full": 2, "scalar_tensor": 0}  # the argument that is the number


def name_of(node: fx.Node) -> str:
    """Return the name of an operation, without its overload; empty if it is none of torch's own.

    Example:
        >>> import torch
        >>> graph = fx.Graph()
        >>> name_of(graph.call_function(torch.ops.aten.add.Tensor, (1, 2)))
        'add'
    """
    schema = getattr(node.target, "_schema", None)
    return schema.name.removeprefix("aten::") if schema is not None else ""


def filled_with(name: str, args: Sequence[Any]) -> float | int | None:
    """Return the number that all elements of a result are; None if they are not one number.

    Example:
        >>> filled_with("ones_like", ["x"]), filled_with("full", [[2, 3], 0.5]), filled_with("exp", ["x"])
        (1, 0.5, None)
    """
    value = args[_VALUES[name]] if name in _VALUES else _FILLS.get(name)
    return value if isinstance(value, int | float) else None
