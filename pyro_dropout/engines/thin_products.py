"""Matrix products that are too thin for a library call: in a traced step they become sums that fuse with other code.

A matrix library is made for products that reuse what they read. A product with one term, or with a side of a dozen,
is bound by memory; written as multiplications it joins the kernel that reads or writes its operands anyway. So is the
R×R matrix AᵀA of a tall A: the library reads A at a fraction of the memory's speed, and much faster when several rows
of A are laid side by side.
"""

import torch
from torch import fx

_SMALL = 16  # a side so short that its product is a few multiplications
_LONG = 1024  # a side so long that memory bandwidth decides
_TALL = 2**16

_CHUNK = 2**12  # rows of a tall matrix that one product takes: a million rows give all processors of a GPU one
_ABREAST = 4  # rows of a tall matrix that are laid side by side

aten = torch.ops.aten


def rewrite_skinny_products(graph: fx.Graph) -> None:
    """Replace skinny ``mm`` and ``bmm`` in a graph of tensor operations; what they compute stays the same."""
    for target in (aten.mm.default, aten.bmm.default, aten.addmm.default):
        for node in graph.find_nodes(op="call_function", target=target):
            *added, left, right = node.args
            if node.kwargs or not all(isinstance(side, fx.Node) and "val" in side.meta for side in (left, right)):
                continue
            n, k = left.meta["val"].shape[-2:]
            m = right.meta["val"].shape[-1]
            with graph.inserting_before(node):
                if k == 1:
                    new = graph.call_function(aten.mul.Tensor, (left, right))
                elif n == 1 and k <= _SMALL and m >= _LONG and right.meta["val"].stride()[-2:] == (1, k):
                    new = _along_rows(graph, left, right)
                elif k <= _SMALL and min(n, m) <= _SMALL and max(n, m) >= _LONG:
                    new = _written_out(graph, left, right, k)
                elif max(n, m) <= _SMALL and k >= _TALL and _chunk(left, right):
                    new = _abreast(graph, left, right)
                else:
                    continue
                for bias in added:
                    new = graph.call_function(aten.add.Tensor, (new, bias))
            node.replace_all_uses_with(new)
            graph.erase_node(node)


def sum_products_with_vectors(graph: fx.Graph, device: str = "cuda") -> None:
    """Replace products with a vector on ``device`` by sums, which inductor fuses with what is around them.

    There a call of a matrix library takes longer than the sum. A graph that is not compiled would make all terms first.
    """
    call = graph.call_function
    for target in (aten.mm.default, aten.addmm.default):
        for node in graph.find_nodes(op="call_function", target=target):
            *added, left, right = node.args
            if node.kwargs or not all(isinstance(side, fx.Node) and "val" in side.meta for side in (left, right)):
                continue
            rows, columns = left.meta["val"].shape[0], right.meta["val"].shape[1]
            if min(rows, columns) > 1 or not _whole_on(left, device):
                continue
            with graph.inserting_before(node):
                if rows == 1:
                    left = call(aten.t.default, (left,))
                else:
                    right = call(aten.t.default, (right,))
                new = call(aten.sum.dim_IntList, (call(aten.mul.Tensor, (left, right)), [int(rows > 1)], True))
                for bias in added:
                    new = call(aten.add.Tensor, (new, bias))
            new.meta = dict(node.meta)
            node.replace_all_uses_with(new)
            graph.erase_node(node)


def _whole_on(side: fx.Node, device: str) -> bool:
    """Whether a side of a product is on a device, and not in half precision, whose products are added up in float32."""
    val = side.meta["val"]
    return bool(val.device.type == device and val.dtype in (torch.float32, torch.float64))


def _written_out(graph: fx.Graph, left: fx.Node, right: fx.Node, terms: int) -> fx.Node:
    """Return Σ_s left[:, s] right[s, :]."""
    total: fx.Node | None = None
    for s in range(terms):
        column = graph.call_function(aten.slice.Tensor, (left, -1, s, s + 1))
        row = graph.call_function(aten.slice.Tensor, (right, -2, s, s + 1))
        term = graph.call_function(aten.mul.Tensor, (column, row))
        total = term if total is None else graph.call_function(aten.add.Tensor, (total, term))
    assert total is not None
    return total


def _along_rows(graph: fx.Graph, left: fx.Node, right: fx.Node) -> fx.Node:
    """Return left @ right for one row on the left and a right side that is stored by columns, as sums along memory."""
    call = graph.call_function
    product = call(aten.mul.Tensor, (call(aten.transpose.int, (right, -2, -1)), left))
    return call(aten.unsqueeze.default, (call(aten.sum.dim_IntList, (product, [-1])), -2))


def _chunk(left: fx.Node, right: fx.Node) -> int:
    """Return how many rows of a tall matrix one product may take; 0 where the rows are not laid out one by one."""
    a, b = left.meta["val"], right.meta["val"]
    if a.dim() != 2 or a.stride() != (1, a.shape[0]) or b.stride() != (b.shape[1], 1):
        return 0
    chunk = _CHUNK
    while chunk > _LONG and a.shape[1] % chunk:
        chunk //= 2
    return 0 if a.shape[1] % chunk else chunk


def _abreast(graph: fx.Graph, left: fx.Node, right: fx.Node) -> fx.Node:
    """Return left @ right for left (n, k), right (k, m) and large k, as many wide products and their sum."""
    n, k = left.meta["val"].shape
    m, chunk = right.meta["val"].shape[1], _chunk(left, right)
    call = graph.call_function
    tall = call(aten.permute.default, (left, [1, 0]))
    wide = [
        call(aten.view.default, (side, [k // chunk, chunk // _ABREAST, _ABREAST * width]))
        for side, width in ((tall, n), (right, m))
    ]
    products = call(aten.bmm.default, (call(aten.permute.default, (wide[0], [0, 2, 1])), wide[1]))
    total = call(aten.sum.dim_IntList, (products, [0]))
    blocks = call(aten.view.default, (total, [_ABREAST, n, _ABREAST, m]))
    # Of all pairs of rows laid side by side, only those of the same row are summed.
    return call(aten.sum.dim_IntList, (call(aten.diagonal.default, (blocks, 0, 0, 2)), [-1]))
