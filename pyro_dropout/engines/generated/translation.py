"""A recorded step as statements in C: each computes one operation of torch for all elements.

Views are not computed: a statement reads memory by strides, as torch does. Where they lie is asked of torch itself, by
the same views of tensors without values.
"""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from pyro_dropout.engines.engine import CannotError
from pyro_dropout.engines.generated.formulas import (
    COPIES,
    DRAWS,
    PRODUCTS,
    VIEWS,
    can_be_called,
    elsewhere,
    filled_with,
    formula_of,
)
from pyro_dropout.engines.generated.functions import C_TYPES, FUNCTIONS, is_slow, typed
from pyro_dropout.engines.generated.statement import (
    Call,
    Memory,
    Place,
    Statement,
    number,
)
from pyro_dropout.engines.torch_internals import OpOverload

aten = torch.ops.aten

_MOST_CALLS = 40  # of torch in one step: each takes some five microseconds
_MOST = 2**18  # elements: with more, several threads of torch may be faster
_SLOW_ELEMENTS = 2**14  # for which functions may be computed that have no vector form: some 0.1 ms
_TERMS = 2**13  # of a sum that is added up one by one


class Translation:
    """The statements and calls of a graph, in order."""

    def __init__(self, graph: fx.GraphModule, given: Sequence[Tensor]) -> None:
        self.order: list[Statement | Call] = []
        self.results: list[Place] = []
        self.bounds: list[tuple[Place, int]] = []  # numbers of rows, and how many rows there are
        self._slow, self._calls = 0, 0
        self._views: dict[fx.Node, Any] = {}  # tensors without values, whose storage tells the memory
        self._memories: dict[int, Memory] = {}
        self._over: set[int] = set()  # inputs that were written over
        owners = [each.untyped_storage().data_ptr() for each in given]
        self._single = [owners.count(each) == 1 for each in owners]
        self._given = iter(enumerate(given))
        known: dict[object, Tensor] = {}
        for node in graph.graph.nodes:
            if node.op == "placeholder":
                self._views[node] = self._input()
            elif node.op == "get_attr":
                known[node.target] = known[node.target] if node.target in known else self._input()
                self._views[node] = known[node.target]
            elif node.op == "output":
                self.results = [self._realised(each) for each in node.args[0]]
            else:
                self._add(node)

    def _input(self) -> Tensor:
        number, tensor = next(self._given)
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            raise CannotError("a tensor is not on the CPU, or is sparse")
        return self._new(tensor.shape, tensor.stride(), tensor.dtype, number)

    def _new(
        self, size: Sequence[int], stride: Sequence[int] | None, dtype: torch.dtype, given: int | None = None
    ) -> Tensor:
        """Return a tensor without values that stands for new memory."""
        if dtype not in C_TYPES or (given is None and math.prod(size) > _MOST):
            raise CannotError(f"a tensor of shape {tuple(size)} and {dtype} is too large, or not of a type of C")
        made = torch.empty(size, dtype=dtype, device="meta")
        made = made if stride is None else torch.empty_strided(size, stride, dtype=dtype, device="meta")
        self._memories[made.untyped_storage()._cdata] = Memory(made, given)
        return made

    def _memory(self, view: Tensor) -> Memory:
        return self._memories[view.untyped_storage()._cdata]

    def _place(self, node: object) -> Place:
        view = self._view(node)
        memory = self._memory(view)
        if memory.given in self._over:
            raise CannotError("an input is read after it was written over")
        return Place(memory, tuple(view.shape), view.stride(), int(view.storage_offset()))

    def _view(self, node: object) -> Tensor:
        view = self._views.get(node) if isinstance(node, fx.Node) else None
        if not isinstance(view, Tensor):
            raise CannotError(f"{node} is no tensor")
        return view

    def _realised(self, node: object) -> Place:
        """Return where a tensor lies, with memory of its own if it was a constant."""
        place = self._place(node)
        if place.memory.constant is not None:
            whole = place.memory.shape
            value = typed(place.memory.constant, place.memory.c_type)
            place.memory.constant = None
            self._state("{0}", [value], whole)
        return place

    def _result(self, node: fx.Node) -> Tensor:
        """Return new memory for the result of an operation."""
        val = node.meta.get("val")
        if not isinstance(val, Tensor):
            raise CannotError(f"{node} without a shape")
        self._views[node] = made = self._new(tuple(val.shape), None, val.dtype)
        return made

    def _add(self, node: fx.Node) -> None:
        operation = node.target
        if operation is operator.getitem:
            self._views[node] = self._views[node.args[0]][node.args[1]]  # type: ignore[index]
            return
        if not isinstance(operation, OpOverload):
            raise CannotError(str(operation))
        operation = elsewhere(node, operation)
        name = operation._schema.name.removeprefix("aten::")
        value = filled_with(name, node.args)
        if name in VIEWS:
            self._show(node, operation)
        elif value is not None:
            self._memory(self._result(node)).constant = float(value)
        elif name == "copy_":
            self._write_over(node)
        elif name in DRAWS:
            self._draw(node, operation)
        else:
            self._compute_or_call(node, operation, name)

    def _compute_or_call(self, node: fx.Node, operation: OpOverload, name: str) -> None:
        """Add an operation as statements or a product or, where it has no such form, as a call of torch."""
        before = len(self.order)
        try:
            if name in PRODUCTS:
                self._call(node, operation)
            elif name in _SPECIAL:
                _SPECIAL[name](self, node)
            else:
                self._compute(node, name)
        except CannotError:
            if len(self.order) > before:
                raise
            self._calls += 1
            if not can_be_called(operation):
                raise CannotError(f"{operation} changes a tensor, draws random numbers or returns a view") from None
            if self._calls > _MOST_CALLS:
                why = f"more than {_MOST_CALLS} operations have no form in C, of which the last is {operation}"
                raise CannotError(why) from None
            self._call(node, operation)

    def _show(self, node: fx.Node, operation: OpOverload) -> None:
        """Note a view, which torch makes of a tensor without values."""
        source = self._view(node.args[0])
        try:
            made = operation(source, *node.args[1:], **node.kwargs)
        except RuntimeError as cause:  # torch's own result lies in memory in another order
            raise CannotError(str(node.target)) from cause
        for each in made if isinstance(made, list | tuple) else [made]:
            if each.dtype != source.dtype or each.untyped_storage()._cdata != source.untyped_storage()._cdata:
                raise CannotError(str(node.target))
        self._views[node] = made

    def _state(self, formula: str, operands: Sequence[object], target: Tensor, **how: Any) -> None:
        """Add a statement that writes all of a view; operands are nodes, places and literals."""
        write = Place(self._memory(target), tuple(target.shape), target.stride(), int(target.storage_offset()))
        statement = Statement(formula, [], write, c_type=write.memory.c_type, **how)
        statement.casts = statement.casts or [""] * len(operands)
        for operand in operands:
            place = operand if isinstance(operand, Place | str) else self._place(operand)
            if isinstance(place, Place) and place.memory.constant is not None:
                place = typed(place.memory.constant, place.memory.c_type)
            if isinstance(place, str):
                statement.operands.append(place)
                continue
            statement.operands.append(len(statement.reads))
            statement.reads.append(place if place.size == write.size else place.broadcast(write.size))
        if is_slow(formula, statement.c_type):
            self._slow += math.prod(write.size)
            if self._slow > _SLOW_ELEMENTS:
                raise CannotError("too many elements for functions without a vector form")
        self._append(statement)

    def _append(self, made: "Statement | Call") -> None:
        for place in made.writes if isinstance(made, Call) else [made.write]:
            place.memory.written.append(made)
        self.order.append(made)

    def _compute(self, node: fx.Node, name: str) -> None:
        """Add an operation that computes element by element."""
        device = node.kwargs.get("device")
        here = device is None or torch.device(device).type == "cpu"  # type: ignore[arg-type]
        result = self._result(node)
        formula = formula_of(name, node.args, node.kwargs, result.dtype, self._view)
        if formula is None or not here or not formula.functions <= FUNCTIONS:
            raise CannotError(f"{name} of {result.dtype}")
        operands, casts = [], []
        for each, kind in zip(formula.operands, formula.types, strict=True):
            own = self._view(each).dtype if isinstance(each, fx.Node) else kind
            if own is None:
                raise CannotError(f"{name} of {each!r}")
            to = own if kind is None else kind
            if name in COPIES and own.is_floating_point and not to.is_floating_point:
                raise CannotError(name)  # C leaves open what becomes of a number that is too large
            operands.append(each if isinstance(each, fx.Node) else number(each, C_TYPES.get(own, "")))
            casts.append("" if to == own else C_TYPES[to])
        self._state(formula.text, operands, result, casts=casts)

    def _sum(self, node: fx.Node) -> None:
        source, *rest = list[Any](node.args)
        if set(node.kwargs) - {"dtype"} or node.kwargs.get("dtype") is not None or len(rest) > 2:
            raise CannotError(str(node.target))
        view = self._view(source)
        dims = list(rest[0]) if rest and rest[0] else list(range(view.dim()))
        dims = [dim % max(view.dim(), 1) for dim in dims]
        result = self._result(node)
        counts = view.dtype == torch.bool and result.dtype == torch.int64
        if not counts and (not result.dtype.is_floating_point or view.dtype != result.dtype):
            raise CannotError(f"a sum of {view.dtype}")
        kept = [1 if dim in dims else size for dim, size in enumerate(view.shape)]
        terms = math.prod(view.shape[dim] for dim in dims)
        if view.numel() == 0 or terms > _TERMS:
            raise CannotError("a sum of so many terms")
        mean = node.target in (aten.mean.default, aten.mean.dim)
        total = self._new(result.shape, None, result.dtype) if mean else result
        self._state("{0}", [source], total.view(kept).expand(view.shape), adds=True)
        if mean:
            self._state("{0} / {1}", [self._whole(total), typed(terms, C_TYPES[result.dtype])], result)

    def _join(self, node: fx.Node) -> None:
        """Add a stack or a concatenation: each tensor is copied into its part."""
        parts, dim = list(node.args[0]), node.args[1] if len(node.args) > 1 else 0  # type: ignore[arg-type]
        parts = [part for part in parts if node.target is aten.stack.default or self._view(part).shape != (0,)]
        result = self._result(node)
        if any(self._view(part).dtype != result.dtype for part in parts) or not isinstance(dim, int):
            raise CannotError(str(node.target))
        if node.target is aten.stack.default:
            targets = list(result.unbind(dim))
        else:
            targets = list(result.split([self._view(part).shape[dim] for part in parts], dim))
        for part, target in zip(parts, targets, strict=True):
            self._state("{0}", [part], target, apart=True)

    def _part_of_zeros(self, node: fx.Node) -> None:
        """Add the gradient of a slice: zeros, and the slice's gradient in its place."""
        slope, _, *where = node.args
        result = self._result(node)
        view = aten.select.int if node.target is aten.select_backward.default else aten.slice.Tensor
        self._state("{0}", [typed(0.0, C_TYPES[result.dtype])], result)
        self._state("{0}", [slope], view(result, *where))

    def _rows(self, node: fx.Node) -> None:
        """Add the choice of rows by their numbers, (n,), or by those of each network of a fleet, (E, n)."""
        source, index = node.args
        chosen = list(index)  # type: ignore[arg-type]
        numbers = self._view(chosen[0]) if len(chosen) == 1 else None
        if numbers is None or numbers.dtype != torch.int64 or (numbers.dim() != 1 and not numbers.is_contiguous()):
            raise CannotError(str(node.target))
        result, whole, rows = self._result(node), self._place(source), self._place(chosen[0])
        known = rows.memory.given is not None and whole.memory.constant is None
        if not known or result.dim() != numbers.dim() + len(whole.size) - 1:
            raise CannotError(str(node.target))
        self.bounds.append((Place(rows.memory, (numbers.numel(),), rows.stride[-1:], rows.offset), whole.size[0]))
        aside = (0,) * (len(whole.size) - 1)
        rows = Place(rows.memory, tuple(result.shape), (*rows.stride, *aside), rows.offset)
        stride = ((0,) * numbers.dim()) + tuple(whole.stride[1:])
        chosen_place = Place(
            whole.memory, tuple(result.shape), stride, whole.offset, rows, whole.stride[0], whole.size[0]
        )
        self._state("{0}", [chosen_place], result)

    def _draw(self, node: fx.Node, operation: OpOverload) -> None:
        val = node.meta.get("val")
        if not isinstance(val, Tensor) or not val.is_contiguous() or node.kwargs.get("generator") is not None:
            raise CannotError(str(node.target))
        self._append(Call(operation, (), {}, {0: self._whole(self._result(node))}))

    def _call(self, node: fx.Node, operation: OpOverload) -> None:
        """Add an operation that stays torch's own."""
        realised: Any = self._realised
        filled: Any = fx.map_arg((node.args, node.kwargs), realised)
        if isinstance(node.meta.get("val"), Tensor):
            results = {0: self._result(node)}
        else:
            used = [(each.args[1], each) for each in node.users if each.target is operator.getitem]
            results = {k: self._result(each) for k, each in used if isinstance(k, int)}
            self._views[node] = results
        if not results:
            raise CannotError(f"{node.target} for nothing")
        self._append(Call(operation, filled[0], filled[1], {k: self._whole(each) for k, each in results.items()}))

    def _whole(self, view: Tensor) -> Place:
        return Place(self._memory(view), tuple(view.shape), view.stride(), 0)

    def _write_over(self, node: fx.Node) -> None:
        """Add the copy of a result over an input; no later statement reads that input."""
        place = self._place(node.args[0])
        number = place.memory.given
        view = self._view(node.args[0])
        whole = number is not None and view is place.memory.shape and self._single[number]
        if number is None or not whole or node.args[0].op != "placeholder" or len(node.args) > 2:  # type: ignore[union-attr]
            raise CannotError("something else than a whole input is written over")
        value = self._view(node.args[1])
        casts = ["" if value.dtype == view.dtype else place.memory.c_type]
        self._state("{0}", [node.args[1]], view, last=True, casts=casts)
        self._over.add(number)
        self._views[node] = None


_SPECIAL: dict[str, Callable[[Translation, fx.Node], None]] = {
    **dict.fromkeys(("sum", "mean"), Translation._sum),
    **dict.fromkeys(("stack", "cat"), Translation._join),
    **dict.fromkeys(("select_backward", "slice_backward"), Translation._part_of_zeros),
    "index": Translation._rows,
}
