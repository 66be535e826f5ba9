"""Matrix products that are too thin for a library call: in a traced step they become sums that fuse with other code.

A matrix library is made for products that reuse what they read. A product with one term, or with a side of a dozen,
is bound by memory; written as multiplications it joins the kernel that reads or writes its operands anyway. So is the
R×R matrix AᵀA of a tall A: the library reads A at a fraction of the memory's speed, and much faster when several rows
of A are laid side by side.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

_SMALL = 16  # a side so short that its product is a few multiplications
_LONG = 1024  # a side so long that memory bandwidth decides
_TALL = 2**16
_CHUNK = 2**12  # rows of a tall matrix that one product takes: a million rows give all processors of a GPU one
_ABREAST = 4  # rows of a tall matrix that are laid side by side

aten = torch.ops.aten
Call = Callable[..., fx.Node]  # adds an operation of these arguments


def rewrite_skinny_products(graph: fx.Graph) -> None:
    """Replace skinny ``mm`` and ``bmm`` in a graph of tensor operations; what they compute stays the same."""
    _rewrite(graph, (aten.mm.default, aten.bmm.default, aten.addmm.default), _thin)


def sum_products_with_vectors(graph: fx.Graph, device: str = "cuda") -> None:
    """Replace products with a vector on ``device`` by sums, which inductor fuses with what is around them.

    There a call of a matrix library takes longer than the sum. A graph that is not compiled would make all terms first.
    """
    _rewrite(graph, (aten.mm.default, aten.addmm.default), partial(_summed, device))


def _rewrite(graph: fx.Graph, targets: tuple[Any, ...], made: Callable[..., fx.Node | None]) -> None:
    def call(target: Any, *args: Any) -> fx.Node:
        node = graph.call_function(target, args)
        node.meta["val"] = target(*fx.map_arg(args, lambda each: _shape(each.meta["val"])))
        return node

    for target in targets:
        for node in graph.find_nodes(op="call_function", target=target):
            *added, left, right = node.args
            if node.kwargs or not all(isinstance(side, fx.Node) and "val" in side.meta for side in (left, right)):
                continue
            with graph.inserting_before(node):
                new = made(call, left, right)
                if new is None:
                    continue
                for bias in added:
                    new = call(aten.add.Tensor, new, bias)
            new.meta = dict(node.meta)
            node.replace_all_uses_with(new)
            graph.erase_node(node)


def _shape(value: Tensor) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _thin(call: Call, left: fx.Node, right: fx.Node) -> fx.Node | None:
    a, b = left.meta["val"], right.meta["val"]
    (n, k), m = a.shape[-2:], b.shape[-1]
    if k == 1:
        return call(aten.mul.Tensor, left, right)
    if n == 1 and k <= _SMALL and m >= _LONG and b.stride()[-2:] == (1, k):
        # The right side is stored by columns: sums along memory.
        product = call(aten.mul.Tensor, call(aten.transpose.int, right, -2, -1), left)
        return call(aten.unsqueeze.default, call(aten.sum.dim_IntList, product, [-1]), -2)
    if k <= _SMALL and min(n, m) <= _SMALL and max(n, m) >= _LONG:
        sides = [
            (call(aten.slice.Tensor, left, -1, s, s + 1), call(aten.slice.Tensor, right, -2, s, s + 1))
            for s in range(k)
        ]
        total, *terms = [call(aten.mul.Tensor, *pair) for pair in sides]
        for term in terms:
            total = call(aten.add.Tensor, total, term)
        return total
    if max(n, m) <= _SMALL and k >= _TALL and a.dim() == 2 and a.stride() == (1, n) and b.stride() == (m, 1):
        chunk = next((c for c in (_CHUNK, _CHUNK // 2, _LONG) if k % c == 0), 0)
        return _abreast(call, left, right, chunk) if chunk else None
    return None


def _abreast(call: Call, left: fx.Node, right: fx.Node, chunk: int) -> fx.Node:
    """Return left @ right for left (n, k), right (k, m) and large k, as many wide products and their sum."""
    (n, k), m = left.meta["val"].shape, right.meta["val"].shape[1]
    tall = call(aten.permute.default, left, [1, 0])
    wide, other = (
        call(aten.view.default, side, [k // chunk, chunk // _ABREAST, _ABREAST * width])
        for side, width in ((tall, n), (right, m))
    )
    products = call(aten.bmm.default, call(aten.permute.default, wide, [0, 2, 1]), other)
    total = call(aten.sum.dim_IntList, products, [0])
    blocks = call(aten.view.default, total, [_ABREAST, n, _ABREAST, m])
    # Of all pairs of rows laid side by side, only those of the same row are summed.
    return call(aten.sum.dim_IntList, call(aten.diagonal.default, blocks, 0, 0, 2), [-1])


def _summed(device: str, call: Call, left: fx.Node, right: fx.Node) -> fx.Node | None:
    a, b = left.meta["val"], right.meta["val"]
    rows, columns = a.shape[0], b.shape[1]
    # Products in half precision are added up in float32.
    if min(rows, columns) > 1 or a.device.type != device or a.dtype not in (torch.float32, torch.float64):
        return None
    if rows == 1:
        left = call(aten.t.default, left)
    else:
        right = call(aten.t.default, right)
    return call(aten.sum.dim_IntList, call(aten.mul.Tensor, left, right), [int(rows > 1)], True)
