"""A function of tensors as a graph of plain tensor operations, by ``record`` or by torch's ``make_fx``.

Whatever a step runs through, Pyro's handlers, the gradient and the optimiser, is in that graph.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from pyro_dropout.engines.recorder import Mode, record
from pyro_dropout.engines.torch_internals import FakeTensorMode, TracingContext, as_torch_compiles, tracing
from pyro_dropout.errors import PyroDropoutError

_aten = torch.ops.aten
_READS = (Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.__dlpack__)


def traced(function: Callable[..., list[Tensor]], inputs: list[Tensor]) -> fx.GraphModule:
    """Return a function of tensors as a graph.

    It is traced twice, which must give the same graph: a user's model may draw from Python's or numpy's generators,
    count its calls or read a clock.
    """
    try:
        return _twice(function, inputs)
    except Exception as cause:
        if not reads_values(cause):
            raise
        try:
            with as_torch_compiles():
                return _twice(function, inputs)
        except Exception as again:
            raise (again if reads_values(again) else cause) from None


def reads_values(cause: BaseException) -> bool:
    """Whether an error of ``make_fx`` says that a function reads the value of a tensor, which a graph cannot."""
    return "_local_scalar_dense" in str(cause)


def same(left: fx.GraphModule, right: fx.GraphModule) -> bool:
    """Whether two graphs compute the same with the same constants."""
    if left.code != right.code:
        return False
    names = [node.target for node in left.graph.nodes if node.op == "get_attr"]
    return all(_equal(getattr(left, name), getattr(right, name)) for name in names)


def _equal(left: Tensor, right: Tensor) -> bool:
    """Whether two constants have the same values; NaN equals NaN here."""
    return left is right or (left.shape == right.shape and torch.allclose(left, right, rtol=0, atol=0, equal_nan=True))


def _twice(function: Callable[..., list[Tensor]], inputs: list[Tensor]) -> fx.GraphModule:
    graph = _once(function, inputs)
    if not same(graph, _once(function, inputs)):
        raise PyroDropoutError(
            "it was traced twice and gave two different programs, so something outside torch changes between calls"
            " (Python's or numpy's random numbers, a counter), which a compiled step would hold fixed"
        )
    return graph


def _once(function: Callable[..., list[Tensor]], inputs: list[Tensor]) -> fx.GraphModule:
    def with_masks(*leaves: Tensor) -> list[Tensor]:
        with RecordedMasks(), _SeenReads():  # type: ignore[no-untyped-call]
            return function(*leaves)

    with torch.no_grad():
        graph = None if any(each.is_cuda for each in inputs) else record(with_masks, inputs)
        if graph is None:
            # make_fx notes the shape of every value with a mode of its own for each; to find one here takes a third
            # less time.
            with tracing(TracingContext(FakeTensorMode(allow_fallback_kernels=True))):
                graph = make_fx(with_masks)(*inputs)
    _multiply_single_terms(graph.graph)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def _multiply_single_terms(graph: fx.Graph) -> None:
    """Write products of matrices with one term, as those of a single input have, as multiplications, which fuse."""
    for target in (_aten.mm.default, _aten.bmm.default, _aten.addmm.default):
        for node in graph.find_nodes(op="call_function", target=target):
            given: Any = node.args
            *added, left, right = given
            if node.kwargs or "val" not in left.meta or left.meta["val"].shape[-1] != 1:
                continue
            with graph.inserting_before(node):
                new = graph.call_function(_aten.mul.Tensor, (left, right))
                new.meta = dict(node.meta)
                for bias in added:
                    new = graph.call_function(_aten.add.Tensor, (new, bias))
                    new.meta = dict(node.meta)
            node.replace_all_uses_with(new)
            graph.erase_node(node)


class _SeenReads(TorchFunctionMode):
    """Lets a tracer see that values are read where they go to numpy or into a list, as it sees ``item()``.

    These look at memory, past torch's operations: a graph would hold the values of its first batch.
    """

    def __torch_function__(self, func: Any, types: object, args: Sequence[Any] = (), kwargs: Any = None) -> object:
        if func in _READS and args[0].numel():
            args[0].detach().flatten()[0].item()
        return func(*args, **(kwargs or {}))


class RecordedMasks(Mode):
    """Where operations are recorded, draws masks into new tensors, with the same random numbers.

    torch's dropout fills an empty tensor in place. On a CPU, inductor may move what reads it before what fills it.
    """

    def __torch_dispatch__(self, func: Any, types: object, args: Sequence[Any] = (), kwargs: Any = None) -> object:
        if func is not _aten.bernoulli_.float or args[0].is_cuda or kwargs:
            return func(*args, **(kwargs or {}))
        mask, keep = args[0], args[1] if len(args) > 1 else 0.5
        return mask.copy_(_aten.native_dropout(torch.ones_like(mask), 1 - keep, True)[1])
