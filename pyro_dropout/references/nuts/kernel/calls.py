"""What a graph of tensor operations is made of: calls of operations, and tensors that stay the same."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from pyro_dropout.references.nuts.kernel.values import Value, flat_index, number


class Constants:
    """Tensors that stay the same, to be read from the GPU's memory."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def value(self, tensor: Tensor) -> Value:
        """Return a tensor's elements."""
        tensor, shape = tensor.detach().cpu(), tuple(tensor.shape)
        if tensor.numel() and bool((tensor == tensor.reshape(-1)[0]).all()):
            return number(tensor.reshape(-1)[0].item(), tensor.dtype, shape)
        name = f"c{len(self.tensors)}"
        self.tensors.append(tensor.contiguous())
        return Value(shape, tensor.dtype, lambda at: f"{name}[{flat_index(at, shape)}]")


@dataclass(frozen=True)
class Call:
    """One operation of a graph: its name without its overload, its arguments, and an example of its result."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    example: Any

    @classmethod
    def of(cls, node: fx.Node) -> "Call":
        """Return the operation of a node."""
        name = getattr(node.target, "_schema").name.removeprefix("aten::")  # noqa: B009
        return cls(name, node.args, dict(node.kwargs), node.meta["val"])

    def argument(self, place: int, default: Any = None) -> Any:
        """Return an argument, or what it is if it is left out."""
        return self.args[place] if len(self.args) > place else default
