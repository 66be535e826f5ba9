"""A recorded step as loops in plain C and calls of torch.

Views are not computed: a loop reads memory by strides, as torch does. Large matrix products and what has no form in C
stay calls of torch, on the same memory.
"""

import operator
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from pyro_dropout.engines.agreement import VIEWS, can_be_called, elsewhere, name_of, owner
from pyro_dropout.engines.c.algebra import FACTORS, MOST_ROWS, MOST_TERMS
from pyro_dropout.engines.c.functions import C_TYPES, FUNCTIONS, is_slow, written
from pyro_dropout.engines.c.nests import Nests
from pyro_dropout.engines.engine import CannotError
from pyro_dropout.engines.generated.formulas import COPIES, DRAWS, PRODUCTS, Formula
from pyro_dropout.engines.generated.operations import Call, Lowering
from pyro_dropout.engines.generated.values import (
    Constants,
    Indices,
    Shape,
    UnsupportedError,
    Value,
    broadcast,
    joined,
    number,
    reshaped,
)
from pyro_dropout.engines.torch_internals import OpOverload

_MOST_CALLS = 40  # of torch in one step: each takes some five microseconds
_MOST = 2**18  # elements: with more, several threads of torch may be faster
_FEW, _MOST_FOR_FEW = 3, 2**20  # of which so few never are: 16 members of 1,024 rows and 50 units took a third in C
_SLOW_ELEMENTS = 2**14  # for which functions may be computed that have no vector form: some 0.1 ms
_TERMS = 2**13  # of a sum that is added up one by one
_TURNED, _VIEWED = {"t", "transpose", "permute"}, {"view", "_unsafe_view"}
_BY_INDEX = {*_TURNED, "expand", "unsqueeze", "squeeze", "slice", "select", "detach", "alias"}


class Translation(Lowering):
    """A graph as nests of loops in C.

    Attributes:
        draws: random numbers: the name of their memory, what fills it, and the memory, in the order of torch.
        calls: other operations of torch, with memory in place of nodes.
        over: inputs that are written over at the end, and their values.
        bounds: numbers of rows, and how many rows there are.
        results: the memory of the outputs that are written over no input.
    """

    _taken_apart = frozenset[str]()
    _cheap = 0  # a number in a register is had again for nothing

    def __init__(self, graph: fx.GraphModule, given: Sequence[Tensor], writes: int = 0) -> None:
        self.nests = Nests()
        self.draws: list[tuple[str, str, Tensor]] = []
        self.calls: list[tuple[OpOverload, Any, dict[str, Any], list[Tensor | None]]] = []
        self.over: list[tuple[Value, Value]] = []
        self.bounds: list[tuple[Value, int]] = []
        self.results: list[Tensor] = []
        self._slow, self._called = 0, 0
        self._gone: set[fx.Node] = set()  # inputs that were written over
        values = [self._outside(f"x{k}", each) for k, each in enumerate(given)]
        self._places = dict(zip(graph.graph.find_nodes(op="placeholder"), values, strict=True))
        attributes = dict.fromkeys(str(node.target) for node in graph.graph.find_nodes(op="get_attr"))
        self._held = {id(each): each for each in (getattr(graph, name) for name in attributes)}
        owners = [each.untyped_storage().data_ptr() for each in (*given, *self._held.values())]
        self._single = [owners.count(each) == 1 for each in owners]
        super().__init__(graph, values, Constants(live=True), self.nests, "v")
        self.nests.tensors |= {f"c{k}": each for k, each in enumerate(self._constants.tensors)}
        pairs = zip(values, self.outputs[:writes], strict=False)
        self.over += [(place, broadcast(value, place.shape)) for place, value in pairs if value is not place]
        gone = {place.memory[0] for place, _ in self.over if place.memory is not None}
        for value in self.outputs[writes:]:  # one that shows what is written over would see the new values
            shows = value.memory is not None and value.memory[0] in gone
            self.results.append(self._memory(self._stored(value) if shows else value)[1])

    def _outside(self, name: str, tensor: Tensor) -> Value:
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.dtype not in C_TYPES:
            raise CannotError("a tensor is not on the CPU, is sparse, or not of a type of C")
        return self.nests.outside(name, tensor)

    def _attribute(self, tensor: Tensor) -> Value:
        return self._outside(f"h{list(self._held).index(id(tensor))}", tensor)

    def _memory(self, value: Value) -> tuple[str, Tensor]:
        if value.memory is None and not self.nests.has(value.name):
            value = self._stored(value)
        return self.nests.memory(value)

    def _value(self, node: Any, dtype: torch.dtype = torch.float64) -> Value:
        if isinstance(node, fx.Node) and owner(node) in self._gone:
            raise CannotError("an input is read after it was written over")
        return super()._value(node, dtype)

    def _lower(self, node: fx.Node) -> None:
        if not isinstance(node.target, OpOverload):
            super()._lower(node)
            return
        operation = elsewhere(node, node.target)
        name, val = operation._schema.name.removeprefix("aten::"), node.meta.get("val")
        if name == "copy_":
            self._write_over(node)
        elif name in VIEWS:
            self._values[node] = self._view(node, operation, name)
        elif "empty" in name and all(name_of(user) == "fill_" for user in node.users):
            return  # no value of it is read
        elif "empty" in name and [name_of(user) for user in node.users] == ["normal_"]:
            return  # distributions of torch draw so
        elif name == "normal_" and node.args[0] not in self._values and len(node.args) == 1:
            self._draw(node, name)
        elif "empty" in name or (isinstance(val, Tensor) and val.numel() > _most()):
            raise CannotError(f"{operation}, which has no values or too many")
        elif name in DRAWS:
            self._draw(node, DRAWS[name])
        else:
            try:
                if "device" in node.kwargs and torch.device(node.kwargs["device"] or "cpu").type != "cpu":  # type: ignore[arg-type]
                    raise UnsupportedError("an operation that is not on the CPU")
                if name in FACTORS:
                    self._factor(node, FACTORS[name])
                else:
                    super()._lower(node)
            except UnsupportedError:
                if name not in PRODUCTS:
                    self._count_call(node, operation)
                self._call(node, operation)

    def _count_call(self, node: fx.Node, operation: OpOverload) -> None:
        self._called += 1
        chosen = node.args[1] if operation is torch.ops.aten.index.Tensor else [None]
        by_number = [each.meta["val"].dtype == torch.int64 for each in chosen if each is not None]  # type: ignore[union-attr]
        if not (can_be_called(operation) or (by_number and all(by_number))):  # by truth values, a shape depends on them
            raise CannotError(f"{operation} changes a tensor, draws random numbers or returns a view")
        if self._called > _MOST_CALLS:
            raise CannotError(f"more than {_MOST_CALLS} operations have no form in C, of which the last is {operation}")

    # --- memory -------------------------------------------------------------------------------------------------------

    def _view(self, node: fx.Node, operation: OpOverload, name: str) -> Value | list[Value]:
        """Return a view of memory; of what is in no memory, the same elements where that is as cheap."""
        value = self._value(node.args[0])
        if value.memory is None and not (name in _TURNED and self.nests.in_memory(value)):
            shape = getattr(node.meta.get("val"), "shape", ())
            sides = [[n for n in each if n != 1] for each in (value.shape, shape)]
            if name in _BY_INDEX or (name in _VIEWED and sides[0] == sides[1]):
                return self._new(Call.of(node))  # type: ignore[no-any-return]
        memory, source = self._memory(value)
        try:
            made = operation(source, *node.args[1:], **node.kwargs)
        except RuntimeError:  # torch's own result lies in memory in another order
            memory, source = self.nests.memory(self._stored(value))
            made = operation(source, *node.args[1:], **node.kwargs)
        for each in made if isinstance(made, list | tuple) else [made]:
            if each.dtype != source.dtype or each.untyped_storage().data_ptr() != source.untyped_storage().data_ptr():
                raise CannotError(str(node.target))
        if isinstance(made, list | tuple):
            return [self.nests.view(memory, each) for each in made]
        return self.nests.view(memory, made)

    def _draw(self, node: fx.Node, fill: str) -> None:
        val = node.meta.get("val")
        if not isinstance(val, Tensor) or not val.is_contiguous() or node.kwargs.get("generator") is not None:
            raise CannotError(str(node.target))
        drawn = torch.empty(val.shape, dtype=val.dtype)
        name = f"d{len(self.draws)}"
        self._values[node] = self._outside(name, drawn)
        self.draws.append((name, fill, drawn))

    def _call(self, node: fx.Node, operation: OpOverload) -> None:
        """Add an operation that stays torch's own."""
        read: list[str] = []

        def filled(each: fx.Node) -> Tensor:
            name, tensor = self._memory(self._value(each))
            read.append(name)
            return tensor

        args, named = fx.map_arg((node.args, node.kwargs), filled)
        val, number_of = node.meta.get("val"), len(self.nests.calls)
        used = [each for each in node.users if each.target is operator.getitem]
        examples: dict[Any, Tensor] = {each.args[1]: each.meta["val"] for each in used}
        examples = {0: val} if isinstance(val, Tensor) else examples
        if not examples or any(each.dtype not in C_TYPES or each.numel() > _most() for each in examples.values()):
            raise CannotError(f"{node.target} for nothing, or for what is too large or not of a type of C")
        made = {k: torch.empty(each.shape, dtype=each.dtype) for k, each in examples.items()}
        line = f"if (call({len(self.calls)})) return 1;"
        self.calls.append((operation, args, named, [made.get(k) for k in range(1 + max(made))]))
        values = self.nests.call([(f"t{number_of}_{k}", each) for k, each in made.items()], read, line)
        found = dict(zip(made, values, strict=True))
        self._values[node] = found[0] if isinstance(val, Tensor) else found

    def _of_matrices(
        self, function: str, sizes: Sequence[int], matrices: Sequence[Value], results: Sequence[Tensor]
    ) -> list[Value]:
        """Add a function in C of sizes, of matrices with their strides, and of results: for each of a batch in turn."""
        count = prod(results[0].shape[:-2])
        given, read, number_of = [str(size) for size in sizes], list[str](), len(self.nests.calls)
        for name, view in map(self._memory, matrices):
            start = (view.data_ptr() - self.nests.tensors[name].data_ptr()) // view.itemsize
            *batch, down, right = view.stride()
            given += [f"{name} + {start}" + "".join(f" + e * {each}" for each in batch), str(down), str(right)]
            read.append(name)
        made = [(f"t{number_of}_{k}", each) for k, each in enumerate(results)]
        given += [f"{name} + e * {each.numel() // count}" for name, each in made]
        line = f"for (long e = 0; e < {count}; e++) {function}_{C_TYPES[results[0].dtype][0]}({', '.join(given)});"
        return self.nests.call(made, read, line)

    def _factor(self, node: fx.Node, function: str) -> None:
        value, val = self._value(node.args[0]), node.meta["val"]
        usual = len(node.args) == 1 and not node.kwargs and len(value.shape) <= 3 and value.size
        if not usual or not 1 < value.shape[-1] <= MOST_ROWS:
            raise UnsupportedError("a factor of another kind, or of a large matrix")
        examples = [val] if isinstance(val, Tensor) else val
        made = [torch.empty(each.shape, dtype=each.dtype) for each in examples]
        found = self._of_matrices(function, value.shape[-1:], [value], made)
        self._values[node] = found[0] if isinstance(val, Tensor) else found

    def _write_over(self, node: fx.Node) -> None:
        """Note the copy of a result over an input; no later operation reads that input."""
        target: Any = node.args[0]
        whole = target.op == "placeholder" and target not in self._gone
        if not whole or not self._single[list(self._places).index(target)] or len(node.args) > 2:
            raise CannotError("something else than a whole input is written over")
        place, value = self._places[target], self._value(node.args[1])
        if value.dtype != place.dtype:
            value = self._pair("{0}", value, value, value.shape, place.dtype)
        self.over.append((place, broadcast(value, place.shape)))
        self._gone.add(target)

    # --- operations ---------------------------------------------------------------------------------------------------

    def _text(self, formula: Formula, shape: Shape, dtype: torch.dtype) -> str:
        if not formula.functions <= FUNCTIONS:
            raise UnsupportedError(formula.text)
        slow = prod(shape) if is_slow(formula.text, C_TYPES[dtype]) else 0
        if slow and self._slow + slow > _SLOW_ELEMENTS:
            raise UnsupportedError("too many elements for functions without a vector form")
        self._slow += slow
        # As in ``_asked``, operands are read before a condition is asked.
        names = [f"a{k}" for k in range(len(formula.operands))]
        given = " ".join(f"__auto_type {name} = {{{k}}};" for k, name in enumerate(names))
        return f"({{{{ {given} {written(formula.text, names, C_TYPES[dtype])}; }}}})"

    def _each(self, node: Call, shape: Shape, dtype: torch.dtype) -> Value:
        found = super()._each(node, shape, dtype)
        source = self._value(node.args[0]) if node.name in COPIES else found
        if source.dtype.is_floating_point and not dtype.is_floating_point and dtype != torch.bool:
            raise UnsupportedError(node.name)  # C leaves open what becomes of a number that is too large
        return found

    def _reduced(self, node: Call, kind: str, dtype: torch.dtype) -> Value:
        source = self._value(node.args[0])
        counts = source.dtype == torch.bool and dtype == torch.int64
        terms = source.size // max(prod(node.example.shape), 1)
        plain = counts or (dtype.is_floating_point and source.dtype == dtype)
        if kind != "sum" or not plain or source.size == 0 or terms > _TERMS or node.kwargs.get("dtype") is not None:
            raise UnsupportedError(f"{node.name} of {source.dtype}, or of so many terms")
        return super()._reduced(node, kind, dtype)

    def _stacked(self, node: Call, shape: Shape, dtype: torch.dtype) -> Value:
        dim = node.argument(1, 0) % len(shape)
        parts = [self._value(each) for each in node.args[0]]
        return joined([reshaped(each, (*shape[:dim], 1, *shape[dim + 1 :])) for each in parts], dim, shape, dtype)

    def _triangle(self, node: Call, shape: Shape, dtype: torch.dtype) -> Value:
        value, distance = self._value(node.args[0]), node.argument(1, 0)
        sign = "<=" if node.name == "tril" else ">="

        def at(indices: Indices) -> str:
            *_, i, j = indices
            return _asked(f"{j} - {i} {sign} {distance}", value.at(indices), "0")

        return Value(shape, dtype, at, value.cost + 2)

    def _diagonal(self, node: Call, shape: Shape, dtype: torch.dtype) -> Value:
        """Return a tensor, or zeros, with other elements on a diagonal."""
        scatters = node.name == "diagonal_scatter"
        first, second, *rest = node.args
        other = self._value(first) if scatters else number(0.0, dtype, shape)
        value = self._value(second if scatters else first)
        distance, one, two = (*rest, *(0, 0, 1)[len(rest) :]) if scatters else rest
        if (one % len(shape), two % len(shape)) != (len(shape) - 2, len(shape) - 1):
            raise UnsupportedError("a diagonal of other dimensions than the last two")
        last = value.shape[-1] - 1

        def at(indices: Indices) -> str:
            *outer, i, j = indices
            place = j if distance < 0 else i
            near = value.at((*outer, f"({place} > {last} ? {last} : {place})"))
            return _asked(f"{j} - {i} == {distance}", near, other.at(indices))

        return Value(shape, dtype, at, value.cost + other.cost + 2)

    def _product(self, node: Call, shape: Shape, dtype: torch.dtype) -> Value:
        if node.example.numel() * node.args[-1].meta["val"].shape[-2] not in range(1, MOST_TERMS):
            raise UnsupportedError("a large product")
        return super()._product(node, shape, dtype)

    def _multiplied(self, left: Value, right: Value, shape: Shape, dtype: torch.dtype) -> Value:
        """Return a product: a sum of terms if one factor is a vector, and a call of a function otherwise."""
        *_, rows, columns = shape
        over = left.shape[-1:]
        if 1 not in (rows, columns):
            return self._of_matrices(
                "product", (rows, columns, *over), [left, right], [torch.empty(shape, dtype=dtype)]
            )[0]

        def at(indices: Indices) -> str:
            *each, i, j, r = indices
            return f"({left.at((*each, i, r))} * {right.at((*each, r, j))})"

        return self._stored(Value((*shape, *over), dtype, at, left.cost + right.cost + 1), over, "sum")

    def _are_rows(self, node: fx.Node, value: Value) -> bool:
        rows = self._value(node)
        given = rows.memory is not None and rows.memory[0].startswith("x")
        found = given and rows.dtype == torch.int64 and bool(rows.shape) and value.memory is not None
        self.bounds += [(rows, value.shape[0])] * found
        return found

    _special: ClassVar[dict[str, Callable[..., Value]]] = {
        **{name: Lowering._special[name] for name in ("expand", "slice", "select", "cat", "constant_pad_nd", "mean")},
        **{name: Lowering._special[name] for name in ("t", "transpose", "permute")},
        **{name: Lowering._special[name] for name in ("slice_backward", "select_backward", "index")},
        **dict.fromkeys(("tril", "triu"), _triangle),
        **dict.fromkeys(("diagonal_scatter", "diagonal_backward"), _diagonal),
        **dict.fromkeys(PRODUCTS, _product),
        "stack": _stacked,
    }


def _most() -> int:
    """Return how many elements a tensor may have."""
    return _MOST_FOR_FEW if torch.get_num_threads() <= _FEW else _MOST


def _asked(condition: str, one: str, other: str) -> str:
    """Return a choice of elements that are both read: a loop with reads behind a branch is not vectorised."""
    return f"({{ __auto_type y = {one}; __auto_type n = {other}; {condition} ? y : n; }})"
