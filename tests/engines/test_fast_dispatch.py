"""Torch's functions compute what the operations that they replace do."""

import pytest
import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map_only

from pyro_dropout.engines.fast_dispatch import _METHODS, FUNCTIONS, fast_dispatch

X, POSITIVE = torch.randn(3, 3), torch.rand(3, 3) + 0.5
ARGUMENTS: dict[str, tuple[object, ...]] = {
    "aten.bmm.default": (X[None], X[None]),
    "aten.addmm.default": (X, X, X),
    "aten.mm.default": (X, X),
    "aten.permute.default": (X, [1, 0]),
    "aten.stack.default": ([X, X], 1),
    "aten.cat.default": ([X, X], 1),
    "aten.unsqueeze.default": (X, 1),
    "aten.clamp_min.default": (X, 0.1),
    "aten.clamp_max.default": (X, 0.1),
    "aten.select.int": (X, 1, 2),
    "aten.squeeze.dim": (X[None], 0),
    "aten.sum.dim_IntList": (X, [0], True),
    "aten.transpose.int": (X, 0, 1),
    "aten.unbind.int": (X, 1),
    "aten.view.default": (X, [1, 9]),
    "aten.expand.default": (X, [2, 3, -1]),
    "aten.pow.Tensor_Scalar": (POSITIVE, 0.3),
}


@pytest.mark.parametrize("operation", [*FUNCTIONS, *_METHODS], ids=str)
def test_the_function_is_the_operation(operation: OpOverload) -> None:
    few = sum(argument.default_value is None for argument in operation._schema.arguments if not argument.kwarg_only)
    second = 0.7 if "Scalar" in str(operation) else X
    arguments = ARGUMENTS.get(str(operation), (POSITIVE, second)[:few])
    graph, inputs = fx.Graph(), [value for value in tree_leaves(arguments) if isinstance(value, Tensor)]
    places = iter([graph.placeholder(f"x{k}") for k in range(len(inputs))])
    node = graph.call_function(operation, tree_map_only(Tensor, lambda _: next(places), arguments))
    graph.output(node)
    expected = operation(*arguments)
    swift = fast_dispatch(fx.GraphModule(torch.nn.Module(), graph))
    found = swift(*inputs)
    assert operation not in [each.target for each in swift.graph.nodes]
    torch.testing.assert_close(found, type(found)(expected) if isinstance(found, tuple) else expected, rtol=0, atol=0)
