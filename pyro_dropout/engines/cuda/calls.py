"""What a graph of tensor operations is made of: calls of operations, tensors that it holds, and random numbers."""

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from pyro_dropout.engines.cuda.values import UnsupportedError, Value, flat_index, number
from pyro_dropout.engines.generated.formulas import elsewhere


class Constants:
    """Tensors that a graph holds, to be read from the GPU's memory."""

    def __init__(self, *, live: bool = False) -> None:
        self.tensors: list[Tensor] = []
        self.live = live

    def value(self, tensor: Tensor) -> Value:
        """Return a tensor's elements."""
        if self.live and tensor.is_cuda:
            return self._held(tensor)
        tensor, shape = tensor.detach().cpu(), tuple(tensor.shape)
        if tensor.numel() and bool((tensor == tensor.reshape(-1)[0]).all()):
            return number(tensor.reshape(-1)[0].item(), tensor.dtype, shape)
        return self._held(tensor.contiguous())

    def _held(self, tensor: Tensor) -> Value:
        name, shape = f"c{len(self.tensors)}", tuple(tensor.shape)
        self.tensors.append(tensor)
        return Value(shape, tensor.dtype, lambda at: f"{name}[{flat_index(at, shape)}]")


class Draws:
    """Random numbers that a function draws, each kind one after another.

    Attributes:
        counts: how many numbers of each kind one call draws, by what fills a tensor with them and its type.
        places: where those of each operation begin.
    """

    def __init__(self) -> None:
        self.counts: dict[tuple[str, torch.dtype], int] = {}
        self.places: dict[fx.Node, tuple[tuple[str, torch.dtype], int]] = {}

    def value(self, kind: str, node: fx.Node) -> Value:
        """Return the numbers that an operation draws."""
        example: Tensor = node.meta["val"]
        if node.kwargs.get("generator") is not None:
            raise UnsupportedError("a kernel has no generator of random numbers but torch's own")
        key, shape = (kind, example.dtype), tuple(example.shape)
        begin = self.counts.get(key, 0)
        self.counts[key] = begin + prod(shape)
        self.places[node] = key, begin
        name = self.name(key)
        return Value(shape, example.dtype, lambda at: f"{name}[{begin} + {flat_index(at, shape)}]")

    @staticmethod
    def name(key: tuple[str, torch.dtype]) -> str:
        """Return the name of the numbers of a kind."""
        return f"{key[0]}{key[1].itemsize}"


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
        operation: Any = elsewhere(node, node.target)  # type: ignore[arg-type]
        name = operation._schema.name.removeprefix("aten::")
        return cls(name, node.args, dict(node.kwargs), node.meta["val"])

    def argument(self, place: int, default: Any = None) -> Any:
        """Return an argument, or what it is if it is left out."""
        return self.args[place] if len(self.args) > place else default
