"""Two matrix products in one kernel on a GPU, where they have the same shape and neither needs the other.

A product of a batch with a layer of a thousand units has a few dozen tiles, for more than a hundred processors, so two
of them take hardly longer than one. The products with the means and with the variances of a Gaussian layer are such a
pair, and so are their gradients; in other networks the gradients of the weights of two layers are.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, no_type_check

import torch
from torch import Tensor, fx

from pyro_dropout.engines.aliasing import is_mutable, owner

aten = torch.ops.aten

# Measured: smaller products were not, and larger ones fill all processors by themselves.
_LEAST, _MOST = 2**25, 2**29  # multiplications
_TILE = 64
_TILES, _TERMS = 256, 1024  # the most tiles that a product has, and the most terms that its numbers are the sums of
_ALIGNED = 16  # what the rows of a matrix begin at a multiple of, so that several numbers are read at once


# Products take their sides however they lie in memory; otherwise inductor would copy a side for each of its products.
@torch.library.custom_op("pyro_dropout::two_products", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def two_products(a: Tensor, b: Tensor, c: Tensor, d: Tensor, turned: Sequence[bool]) -> tuple[Tensor, Tensor]:
    """Return A·B and C·D of the same shapes in float32, of matrices some of which are given transposed."""
    first, second = _places(a, b, c, d, turned)
    a, b, c, d = _turned((a, b, c, d), turned)
    alike = a.stride() == c.stride() and b.stride() == d.stride()
    if alike and in_tensor_cores(a.device):
        _launch(a, b, first, c, d, second)
    else:
        torch.mm(a, b, out=first)
        torch.mm(c, d, out=second)
    return first, second


@two_products.register_fake
def _places(a: Tensor, b: Tensor, c: Tensor, d: Tensor, turned: Sequence[bool]) -> tuple[Tensor, Tensor]:
    left, right = _turned((a, b), turned[:2])
    shape = (left.shape[0], right.shape[1])
    return a.new_empty(shape), c.new_empty(shape)


def _turned(matrices: Sequence[Tensor], turned: Sequence[bool]) -> list[Tensor]:
    return [each.t() if turns else each for each, turns in zip(matrices, turned, strict=True)]


def in_tensor_cores(device: torch.device) -> bool:
    """Whether torch multiplies matrices of float32 in TF32 there, as the kernel does."""
    if device.type != "cuda" or torch.version.hip or torch.get_float32_matmul_precision() == "highest":
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _launch(a: Tensor, b: Tensor, first: Tensor, c: Tensor, d: Tensor, second: Tensor) -> None:
    (m, k), n = a.shape, b.shape[1]
    # Hopper's own instructions want both sides along the sum; Triton uses the older ones where a program has two warps.
    along = a.stride(1) == 1 and b.stride(0) == 1
    depth = 16 if k % 32 else 32
    grid = (-(-m // _TILE) * -(-n // _TILE), 2)
    sides = (*a.stride(), *b.stride())
    how = {"DEPTH": depth, "EVEN": k % depth == 0, "num_warps": 4 if along else 2, "num_stages": 4}
    _kernel()[grid](a, b, first, c, d, second, m, n, k, *sides, TILE=_TILE, **how)


@functools.cache
def _kernel() -> Any:
    import triton
    import triton.language as tl

    @triton.jit
    @no_type_check
    def product(
        a, b, first, c, d, second, M, N, K, am, ak, bk, bn, TILE: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr
    ):
        if tl.program_id(1) == 0:
            left, right, place = a, b, first
        else:
            left, right, place = c, d, second
        high = tl.cdiv(M, TILE)
        rows = tl.program_id(0) % high * TILE + tl.arange(0, TILE)
        columns = tl.program_id(0) // high * TILE + tl.arange(0, TILE)
        terms = tl.arange(0, DEPTH)
        # Rows and columns beyond the last are others again, and are not stored.
        left += (rows % M)[:, None] * am + terms[None, :] * ak
        right += terms[:, None] * bk + (columns % N)[None, :] * bn
        total = tl.zeros((TILE, TILE), dtype=tl.float32)
        for done in range(0, K, DEPTH):
            if EVEN:
                x, y = tl.load(left), tl.load(right)
            else:
                x = tl.load(left, mask=terms[None, :] < K - done, other=0.0)
                y = tl.load(right, mask=terms[:, None] < K - done, other=0.0)
            total = tl.dot(x, y, total, input_precision="tf32")
            left += DEPTH * ak
            right += DEPTH * bk
        inside = (rows[:, None] < M) & (columns[None, :] < N)
        tl.store(place + rows[:, None] * N + columns[None, :], total, mask=inside)

    return product


def in_one_kernel(matrix: Tensor) -> bool:
    """Whether the kernel multiplies such matrices, and torch does it in the same precision."""
    return matrix.dtype == torch.float32 and in_tensor_cores(matrix.device)


def pair_products(graph: fx.Graph, fits: Callable[[Tensor], bool] = in_one_kernel) -> None:
    """Join products of the same shape that do not need each other, two by two, in a graph of tensor operations.

    Args:
        graph: is changed.
        fits: whether a matrix can be a side of such a product.

    Example:
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> a, b = torch.ones(256, 512), torch.ones(512, 512)
        >>> made = make_fx(lambda a, b: [a @ b, (a @ b.exp()).relu()])(a, b)
        >>> pair_products(made.graph, lambda matrix: True)
        >>> [node.target.__name__ for node in made.graph.nodes if node.op == "call_function"]
        ['exp.default', 'two_products.default', 'getitem', 'getitem', 'relu.default']
    """
    written = {owner(node.all_input_nodes[0]) for node in graph.nodes if is_mutable(node)}
    waiting: dict[object, fx.Node] = {}
    for node in graph.find_nodes(op="call_function", target=aten.mm.default):
        shape = _shape(node, fits)
        if shape is None or any(owner(side) in written for side in node.all_input_nodes):
            continue
        first = waiting.pop(shape, None)
        if first is None:
            waiting[shape] = node
            continue
        later = _depending_on(first)
        if node in later:
            waiting[shape] = node
        else:
            _join(graph, first, node, later)


def _shape(node: fx.Node, fits: Callable[[Tensor], bool]) -> object:
    """Return what two products have in common that can be a pair; None for one that has room for no other."""
    left, right = (side.meta.get("val") if isinstance(side, fx.Node) else None for side in node.args)
    if not isinstance(left, Tensor) or not isinstance(right, Tensor) or node.kwargs:
        return None
    (m, k), n = left.shape, right.shape[1]
    tiles = -(-m // _TILE) * -(-n // _TILE)
    sized = _LEAST <= m * k * n <= _MOST and tiles <= _TILES and k <= _TERMS and k % _ALIGNED == 0
    if not sized or not all(_aligned(side) and fits(side) for side in (left, right)):
        return None
    return m, k, n, left.stride(), right.stride()


def _aligned(matrix: Tensor) -> bool:
    """Whether a matrix lies in memory row by row, or column by column, and each begins where it is read fastest."""
    short, long = sorted(matrix.stride())
    return short == 1 and long % _ALIGNED == 0


def _depending_on(node: fx.Node) -> set[fx.Node]:
    """Return all nodes that need a node, itself among them."""
    found, todo = {node}, [node]
    while todo:
        for user in todo.pop().users:
            if user not in found:
                found.add(user)
                todo.append(user)
    return found


def _lying(side: Any) -> tuple[fx.Node, bool]:
    """Return the matrix that a side of a product shows, and whether it shows it transposed."""
    turns = side.target is aten.t.default or (side.target is aten.permute.default and list(side.args[1]) == [1, 0])
    return (side.args[0], True) if turns else (side, False)


def _join(graph: fx.Graph, first: fx.Node, second: fx.Node, later: set[fx.Node]) -> None:
    """Make two products one operation, at the place of the second; what needs the first is moved after it."""
    between, node = [], first.next
    while node is not second:
        between.append(node)
        node = node.next
    # A transposed matrix is passed on as it lies in memory; as an input of its own it might be copied.
    sides = [_lying(side) for side in (*first.args, *second.args)]
    inputs: Any = (*(side for side, _ in sides), [turns for _, turns in sides])
    with graph.inserting_before(second):
        both = graph.call_function(torch.ops.pyro_dropout.two_products.default, inputs)
        both.meta["val"] = (first.meta["val"], second.meta["val"])
        results = [graph.call_function(operator.getitem, (both, k)) for k in range(2)]
    last = results[-1]
    for node in between:
        if node in later:
            last.append(node)
            last = node
    for old, new in zip((first, second), results, strict=True):
        new.meta = dict(old.meta)
        old.replace_all_uses_with(new)
        graph.erase_node(old)
