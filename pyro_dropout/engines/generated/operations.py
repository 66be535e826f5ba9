"""From the tensor operations of a recorded function to loops in C.

Each operation becomes an expression of its inputs. It gets a loop of its own if it is a sum, or if its value is used
more than once or is dear.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from pyro_dropout.engines.agreement import elsewhere, name_of
from pyro_dropout.engines.generated.formulas import DRAWS, PRODUCTS, Formula, filled_with, formula_of
from pyro_dropout.engines.generated.loops import Loops
from pyro_dropout.engines.generated.values import (
    Constants,
    Draws,
    Indices,
    Shape,
    UnsupportedError,
    Value,
    broadcast,
    c_type,
    joined,
    number,
    permuted,
    reshaped,
    shifted,
    within,
)
from pyro_dropout.engines.torch_internals import OpOverload

_DEAR = 8  # about how many short operations a function takes
_CHEAP = 3  # operations that may be computed again wherever they are needed
_SHORT = {"absolute", "larger", "smaller"}  # functions that are no dearer than arithmetic
_SAME = {"clone", "detach", "alias", "lift_fresh_copy", "contiguous", "lift_fresh"}
_RESHAPED = {"view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "_reshape_alias", "flatten"}
_REDUCED = {"sum": "sum", "amax": "max", "amin": "min", "any": "any", "all": "all", "prod": "prod"}
# They have a formula, but a kernel computes what torch takes them apart into, each part once.
_TAKEN_APART = frozenset(
    {
        *("mse_loss", "mse_loss_backward", "binary_cross_entropy_with_logits", "silu", "silu_backward", "masked_fill"),
        *("leaky_relu", "leaky_relu_backward", "softplus", "softplus_backward", "hardtanh", "hardtanh_backward"),
    }
)


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
        return cls(name, node.args, dict(node.kwargs), node.meta.get("val"))

    def argument(self, place: int, default: Any = None) -> Any:
        """Return an argument, or what it is if it is left out."""
        return self.args[place] if len(self.args) > place else default


class Lowering:
    """A graph of tensor operations as loops."""

    _taken_apart, _cheap = _TAKEN_APART, _CHEAP

    def __init__(
        self,
        graph: fx.GraphModule,
        inputs: Sequence[Value],
        constants: Constants,
        loops: Loops,
        prefix: str,
        draws: Draws | None = None,
    ) -> None:
        self._graph, self._constants, self._loops, self._prefix = graph, constants, loops, prefix
        self._draws = draws
        self._values: dict[fx.Node, Any] = {}
        self._known: dict[fx.Node, Tensor] = {}  # values that depend on nothing but constants
        self._count = 0
        places = iter(inputs)
        self._last = [node for node in graph.graph.nodes if node.op == "placeholder"][-1]  # the rows of a batch
        self.outputs: list[Value] = []
        for node in graph.graph.nodes:
            if node.op == "placeholder":
                self._values[node] = next(places)
            elif node.op == "get_attr":
                held = node.meta["val"] = getattr(graph, node.target)
                if constants.live:
                    self._values[node] = self._attribute(held)
                else:
                    self._known[node] = held
            elif node.op == "output":
                self.outputs = [self._value(each) for each in node.args[0]]
            else:
                self._lower(node)

    def _attribute(self, tensor: Tensor) -> Value:
        """Return a tensor that the graph holds, and that may change."""
        return self._constants.value(tensor)

    def _value(self, node: Any, dtype: torch.dtype = torch.float64) -> Value:
        if not isinstance(node, fx.Node):
            return number(node, dtype)
        if node in self._known and node not in self._values:
            self._values[node] = self._constants.value(self._known[node])
        return self._values[node]  # type: ignore[no-any-return]

    def _lower(self, node: fx.Node) -> None:
        if not isinstance(node.target, OpOverload):
            many, which = node.args
            self._values[node] = self._shared(node, self._values[many][which])  # type: ignore[index]
            return
        inputs = node.all_input_nodes
        if self._draws is not None and name_of(node) in DRAWS:
            self._values[node] = self._draws.value(DRAWS[name_of(node)], node)
            return
        if all(each in self._known for each in inputs) and not node.target._schema.is_mutable:
            if torch.Tag.nondeterministic_seeded in node.target.tags:
                raise UnsupportedError("the model draws random numbers of its own")
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: self._known[each])
            named = {**kwargs, "device": torch.device("cpu")} if "device" in kwargs else kwargs
            found = node.target(*args, **named)
            if isinstance(found, Tensor):
                self._known[node] = found
                return
        self._values[node] = self._shared(node, self._new(Call.of(node)))

    def _shared(self, node: fx.Node, value: Any) -> Any:
        """Return a value, stored if it is used more than once or is dear."""
        if not isinstance(value, Value) or value.name is not None:
            return value
        dear = value.cost > self._cheap and (len(node.users) > 1 or value.cost >= _DEAR)
        return self._stored(value) if dear else value

    def _stored(self, value: Value, over: Shape | None = None, kind: str = "") -> Value:
        self._count += 1
        return self._loops.stored(f"{self._prefix}{self._count}", value, over, kind)

    def _new(self, node: Call) -> Any:
        name = node.name
        if name in ("split_with_sizes", "split"):
            return self._split(node)
        if name == "log_sigmoid_forward":
            example = node.example[0]
            parts = [replace(node, name=each, example=example) for each in ("log_sigmoid", "log_sigmoid_buffer")]
            return [self._each(each, tuple(example.shape), example.dtype) for each in parts]
        if not isinstance(node.example, Tensor):
            raise UnsupportedError(f"a kernel has no {name}")
        shape, dtype = tuple(node.example.shape), node.example.dtype
        own = self._special.get(name)
        if own is not None:
            return own(self, node, shape, dtype)
        if name in _SAME:
            return self._value(node.args[0])
        if name in _RESHAPED and self._value(node.args[0]).dtype == dtype:
            return reshaped(self._value(node.args[0]), shape)
        fill = filled_with(name, node.args)
        if fill is not None:
            return number(fill, dtype, shape)
        if name in _REDUCED:
            return self._reduced(node, _REDUCED[name], dtype)
        return self._each(node, shape, dtype)

    # --- operations one by one ----------------------------------------------------------------------------------------

    def _each(self, node: Call, shape: Shape, dtype: torch.dtype) -> Value:
        """Return an operation on elements."""
        formula = formula_of(node.name, node.args, node.kwargs, dtype, lambda each: each.meta["val"])
        if formula is None or node.name in self._taken_apart:
            raise UnsupportedError(f"a kernel has no {node.name} with {len(node.args)} arguments {sorted(node.kwargs)}")
        kind, text = c_type(dtype), self._text(formula, shape, dtype)
        parts, casts = [], []
        for operand, t in zip(formula.operands, formula.types, strict=True):
            parts.append(broadcast(self._value(operand, t or dtype), shape))
            casts.append("" if t in (None, parts[-1].dtype) else f"({c_type(t)})")

        def at(indices: Indices) -> str:
            found = [f"({cast}{part.at(indices)})" for cast, part in zip(casts, parts, strict=True)]
            return f"(({kind})({text.format(*found)}))"

        dear = "/" in text or bool(formula.functions - _SHORT)
        cost = 0 if node.name == "_to_copy" else _DEAR if dear else 1
        return Value(shape, dtype, at, cost + sum(part.cost for part in parts))

    def _text(self, formula: Formula, shape: Shape, dtype: torch.dtype) -> str:
        """Return a formula with the functions of the language."""
        return formula.text.replace("_(", "(")

    def _pair(self, text: str, left: Value, right: Value, shape: Shape, dtype: torch.dtype) -> Value:
        left, right, kind = broadcast(left, shape), broadcast(right, shape), c_type(dtype)
        return Value(
            shape,
            dtype,
            lambda at: text.format(f"(({kind}){left.at(at)})", f"(({kind}){right.at(at)})"),
            1 + left.cost + right.cost,
        )

    def _permuted(self, node: Call, *_: Any) -> Value:
        value = self._value(node.args[0])
        order = list(range(len(value.shape)))
        name = node.name
        if name.endswith("permute"):
            order = list(node.args[1])
        else:
            a, b = node.args[1:] if len(node.args) > 1 else (0, len(order) - 1)
            order[a], order[b] = order[b], order[a]
        return permuted(value, order)

    def _sliced(self, node: Call, shape: Shape, _: torch.dtype) -> Value:
        value = self._value(node.args[0])
        start, end, step = node.argument(2), node.argument(3), node.argument(4, 1)
        dim = node.argument(1, 0) % len(value.shape)
        begin, _end, step = slice(start, end, step).indices(value.shape[dim])
        return shifted(value, dim, begin, step, shape)

    def _selected(self, node: Call, *_: Any) -> Value:
        value = self._value(node.args[0])
        dim = node.args[1] % len(value.shape)
        index, shape = str(node.args[2] % value.shape[dim]), value.shape[:dim] + value.shape[dim + 1 :]
        return Value(shape, value.dtype, lambda at: value.at((*at[:dim], index, *at[dim:])), value.cost)

    def _split(self, node: Call) -> list[Value]:
        value = self._value(node.args[0])
        dim = node.argument(2, 0) % len(value.shape)
        found, start = [], 0
        for part in node.example:
            found.append(shifted(value, dim, start, 1, tuple(part.shape)))
            start += part.shape[dim]
        return found

    def _joined(self, node: Call, shape: Shape, dtype: torch.dtype) -> Value:
        parts = [self._value(each) for each in node.args[0]]
        dim = node.argument(1, 0) % len(shape)
        return joined([part for part in parts if part.size], dim, shape, dtype)

    def _padded(self, node: Call, shape: Shape, dtype: torch.dtype) -> Value:
        value, sides = self._value(node.args[0]), list(node.args[1])
        fill = node.argument(2, 0)
        for k in range(len(sides) // 2):
            dim = len(shape) - 1 - k
            for place in (2 * k, 2 * k + 1):
                less, sides[place] = max(-sides[place], 0), max(sides[place], 0)
                left = (*value.shape[:dim], value.shape[dim] - less, *value.shape[dim + 1 :])
                value = shifted(value, dim, less if place == 2 * k else 0, 1, left)
            grown = (*value.shape[:dim], shape[dim], *value.shape[dim + 1 :])
            value = within(value, number(fill, dtype, grown), dim, sides[2 * k], grown)
        return value

    def _part(self, node: Call, shape: Shape, dtype: torch.dtype) -> Value:
        """Return a tensor, or zeros as in the gradient of a slice, with another one in place of a slice of it."""
        kind, scatters = node.name.split("_")[0], node.name.endswith("scatter")
        other = self._value(node.args[0]) if scatters else number(0.0, dtype, shape)
        value, dim = self._value(node.args[1] if scatters else node.args[0]), node.argument(2, 0) % len(shape)
        if node.argument(5, 1) != 1:
            raise UnsupportedError(f"a kernel has no {node.name} with a step")
        if kind == "select":
            value = reshaped(value, (*value.shape[:dim], 1, *value.shape[dim:]))
            return within(value, other, dim, node.args[3] % shape[dim], shape)
        return within(value, other, dim, slice(node.argument(3), None).indices(shape[dim])[0], shape)

    # --- sums ---------------------------------------------------------------------------------------------------------

    def _reduced(self, node: Call, kind: str, dtype: torch.dtype) -> Value:
        value = self._value(node.args[0])
        dims = node.argument(1)
        dims = [dims] if isinstance(dims, int) else list(dims or range(len(value.shape)))
        dims = sorted(dim % len(value.shape) for dim in dims) if value.shape else []
        keep = bool(node.kwargs.get("keepdim", node.argument(2, False)))
        kept = [k for k in range(len(value.shape)) if k not in dims]
        turned = permuted(value, [*kept, *dims]) if value.shape else value
        cast = Value(turned.shape, dtype, lambda at: f"(({c_type(dtype)}){turned.at(at)})", turned.cost)
        found = self._total(cast, tuple(value.shape[k] for k in dims), kind)
        return reshaped(found, tuple(1 if k in dims else s for k, s in enumerate(value.shape))) if keep else found

    def _mean(self, node: Call, shape: Shape, dtype: torch.dtype) -> Value:
        total = self._reduced(node, "sum", dtype)
        count = self._value(node.args[0]).size // max(total.size, 1)
        return self._pair("({0} / {1})", total, number(count, dtype), shape, dtype)

    def _total(self, terms: Value, over: Shape, kind: str = "sum") -> Value:
        if all(size == 1 for size in over):
            return reshaped(terms, terms.shape[: len(terms.shape) - len(over)])
        return self._stored(terms, over, kind)

    def _product(self, node: Call, shape: Shape, dtype: torch.dtype) -> Value:
        *added, left, right = (self._value(arg) for arg in node.args)
        scales = {name: node.kwargs.get(name, 1) for name in ("alpha", "beta")}
        if set(node.kwargs) - set(scales):
            raise UnsupportedError(f"a kernel has no {node.name} with {sorted(node.kwargs)}")
        product = self._multiplied(left, right, shape, dtype)
        if scales["alpha"] != 1:
            product = self._pair("({0} * {1})", product, number(scales["alpha"], dtype), shape, dtype)
        if added and scales["beta"] != 1:
            added = [self._pair("({0} * {1})", added[0], number(scales["beta"], dtype), added[0].shape, dtype)]
        for bias in added:
            product = self._pair("({0} + {1})", product, bias, shape, dtype)
        return product

    def _multiplied(self, left: Value, right: Value, shape: Shape, dtype: torch.dtype) -> Value:
        self._count += 1
        return self._loops.product(f"{self._prefix}{self._count}", left, right, shape, dtype)

    # --- elements that are chosen by numbers which a kernel reads -----------------------------------------------------

    def _gathered(self, node: Call, shape: Shape, dtype: torch.dtype) -> Value:
        value, dim, index = self._value(node.args[0]), node.args[1] % max(len(shape), 1), self._value(node.args[2])

        def at(indices: Indices) -> str:
            return value.at((*indices[:dim], f"(int)({index.at(indices)})", *indices[dim + 1 :]))

        return Value(shape, value.dtype, at, value.cost + index.cost + 2)

    def _rows(self, node: Call, shape: Shape, dtype: torch.dtype) -> Value:
        """Return rows by their numbers, (n,), or by those of each network of a fleet, (E, n)."""
        value, index = self._value(node.args[0]), node.args[1]
        if len(index) != 1 or not self._are_rows(index[0], value):
            raise UnsupportedError("a kernel has no indices but those of a batch")
        numbers, count = self._value(index[0]), value.shape[0]
        sides = len(numbers.shape)

        def at(indices: Indices) -> str:
            return value.at((f"row({numbers.at(indices[:sides])}, {count})", *indices[sides:]))

        return Value(shape, value.dtype, at, value.cost + 2)

    def _are_rows(self, node: fx.Node, value: Value) -> bool:
        """Whether these are numbers of rows of a tensor: those of a batch."""
        return node is self._last and len(node.meta["val"].shape) == 1

    def _scattered(self, node: Call, shape: Shape, dtype: torch.dtype) -> Value:
        other, index, source = self._value(node.args[0]), self._value(node.args[2]), self._value(node.args[3])
        dim, kind = node.args[1] % len(shape), c_type(dtype)
        if any(index.shape[k] != shape[k] for k in range(len(shape)) if k != dim):
            raise UnsupportedError("a kernel has no scatter_add of a part")

        def at(indices: Indices) -> str:  # the terms that are added to each element come last
            *own, term = indices
            there = (*own[:dim], term, *own[dim + 1 :])
            return f"(({kind})({index.at(there)} == {own[dim]} ? {source.at(there)} : 0))"

        terms = Value((*shape, index.shape[dim]), dtype, at, 2 + index.cost + source.cost)
        return self._pair("({0} + {1})", other, self._total(terms, terms.shape[-1:]), shape, dtype)

    def _placed(self, node: Call, shape: Shape, dtype: torch.dtype) -> Value:
        other, index, source = self._value(node.args[0]), self._value(node.args[2]), self._value(node.args[3], dtype)
        dim = node.args[1] % len(shape)
        own = tuple(1 if k == dim else size for k, size in enumerate(other.shape))
        if node.kwargs or index.shape != own:
            raise UnsupportedError(f"a kernel has no {node.name} of several elements, or with {sorted(node.kwargs)}")
        source = broadcast(source, own)

        def at(indices: Indices) -> str:
            there = (*indices[:dim], "0", *indices[dim + 1 :])
            return f"({index.at(there)} == {indices[dim]} ? {source.at(there)} : {other.at(indices)})"

        return Value(other.shape, other.dtype, at, 2 + index.cost + source.cost + other.cost)

    def _summed_up(self, node: Call, shape: Shape, dtype: torch.dtype) -> Value:
        value, dim = self._value(node.args[0]), node.args[1] % max(len(shape), 1)

        def at(indices: Indices) -> str:
            *own, term = indices
            return f"({term} <= {own[dim]} ? {value.at((*own[:dim], term, *own[dim + 1 :]))} : 0)"

        terms = Value((*value.shape, value.shape[dim]), dtype, at, 1 + value.cost)
        return self._total(terms, terms.shape[-1:])

    _special: ClassVar[dict[str, Callable[["Lowering", Call, Shape, torch.dtype], Value]]] = {
        **dict.fromkeys(PRODUCTS, _product),
        **dict.fromkeys(("t", "transpose", "permute"), _permuted),
        "mean": _mean,
        "expand": lambda self, node, shape, _: broadcast(self._value(node.args[0]), shape),
        "slice": _sliced,
        "select": _selected,
        "cat": _joined,
        "constant_pad_nd": _padded,
        **dict.fromkeys(("slice_scatter", "select_scatter", "slice_backward", "select_backward"), _part),
        "gather": _gathered,
        "index": _rows,
        "scatter_add": _scattered,
        "scatter": _placed,
        "cumsum": _summed_up,
    }
