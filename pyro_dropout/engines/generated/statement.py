"""The words of a program in plain C: memory, places in it, statements over the elements of a shape, calls of torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from pyro_dropout.engines.engine import CannotError
from pyro_dropout.engines.generated import functions
from pyro_dropout.engines.generated.formulas import DRAWS
from pyro_dropout.engines.generated.functions import C_TYPES, typed
from pyro_dropout.engines.torch_internals import OpOverload, tree_leaves, tree_map
from pyro_dropout.engines.written_calls import written


@dataclass(eq=False)
class Memory:
    """What holds a tensor: one that is given, or one of the program's own.

    Attributes:
        shape: a tensor of its shape, without values; its views say where elements lie.
        given: its number among the inputs; None for memory of the program's own.
        constant: the number that all its elements are, if no memory is needed for that.
        written: the statements and calls that write it.
    """

    shape: Tensor
    given: int | None = None
    constant: float | None = None
    written: list["Statement | Call"] = field(default_factory=list, repr=False)

    @property
    def c_type(self) -> str:
        """Its type in C."""
        return C_TYPES[self.shape.dtype]


@dataclass(frozen=True)
class Place:
    """Elements of a memory, by strides; ``rows`` are the numbers of the rows that are read, at strides of their own."""

    memory: Memory
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    rows: "Place | None" = None
    row_stride: int = 0
    row_count: int = 0

    def broadcast(self, size: Sequence[int]) -> "Place":
        """Return the same place as torch reads it together with a larger one."""
        wide = len(size) - len(self.size)
        stride = [0 if mine == 1 else s for mine, s in zip(self.size, self.stride, strict=True)]
        return Place(self.memory, tuple(size), (*[0] * wide, *stride), self.offset)


@dataclass(eq=False)
class Statement:
    """For each element of a shape: read, compute, write, or add to what is written."""

    formula: str
    reads: list[Place]
    write: Place
    adds: bool = False
    apart: bool = False  # writes what no other statement does
    last: bool = False  # writes over an input
    c_type: str = "float"
    operands: list[str | int] = field(default_factory=list)  # literals, and numbers of reads
    casts: list[str] = field(default_factory=list)

    @property
    def size(self) -> tuple[int, ...]:
        """The shape that it runs over."""
        return self.write.size

    def expression(self, names: Sequence[str]) -> str:
        """Return what it computes from the names of what it reads."""
        given = [each if isinstance(each, str) else names[each] for each in self.operands]
        cast = [f"({to}){each}" if to else each for to, each in zip(self.casts, given, strict=True)]
        return functions.written(
            self.formula, [each if each.isidentifier() else f"({each})" for each in cast], self.c_type
        )


@dataclass(eq=False)
class Call:
    """A call of torch: a random draw, a matrix product, or another operation.

    Attributes:
        operation: what is called.
        args: its arguments, with places for tensors.
        named: its named arguments, likewise.
        results: where its results go, by their numbers.
    """

    operation: OpOverload
    args: tuple[Any, ...]
    named: dict[str, Any]
    results: dict[int, Place]

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers."""
        return self.operation.overloadpacket.__name__ in DRAWS

    @property
    def reads(self) -> list[Place]:
        """The tensors that it is given."""
        return [each for each in tree_leaves((self.args, self.named)) if isinstance(each, Place)]

    @property
    def writes(self) -> list[Place]:
        """Where its results go."""
        return list(self.results.values())

    def bound(self, tensor: Callable[[Place], Tensor]) -> Callable[[], object]:
        """Return the call on the tensors of its places."""
        args, named = tree_map(lambda each: tensor(each) if isinstance(each, Place) else each, (self.args, self.named))
        places = [self.results.get(k) for k in range(1 + max(self.results))]
        return written(self.operation, args, named, [None if each is None else tensor(each) for each in places])


def number(value: object, c_type: str) -> str:
    """Return a number as it is written in C, in a type."""
    if c_type in ("float", "double") and isinstance(value, int | float) and not isinstance(value, bool):
        return typed(value, c_type)
    if c_type in ("int", "long long") and isinstance(value, int):
        return f"({c_type}){int(value)}LL"
    raise CannotError(f"{value!r} as {c_type or 'a number'}")
