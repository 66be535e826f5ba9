"""Large masks on a GPU as bits: what a compiled prediction spends most of its time on, in a third of that time.

A kernel that inductor writes asks Philox for four random numbers of 32 bits at every entry of a mask, and uses one of
them. Here 32 entries share a word. Random words are compared with the probability bit by bit, for all 32 at once, the
highest bit first: sixteen words decide nearly all of them, and sixteen more the rest, exactly. Triton comes with torch
where there is a GPU, and is imported when it is first needed.
"""

import functools
from typing import Any, no_type_check

import torch
from torch import Tensor
from torch.fx import Graph, Node

_AT_LEAST = 2**22  # entries of a mask; smaller ones are drawn where they are used, without a kernel of their own
_WORDS = 128  # that a program draws, four for each thread of one warp
_ROUNDS = 7  # of Philox: the fewest that pass BigCrush [Salmon et al., 2011]
_SEEDS = 2**62

aten = torch.ops.aten


@torch.library.custom_op("pyro_dropout::mask_bits", mutates_args=())
def mask_bits(seed: Tensor, keep: Tensor, rows: int) -> Tensor:
    """Return masks of ``rows`` rows, (rows, ⌈K/32⌉) in int32; entry k of a row is bit k mod 32 of its word k // 32."""
    bits: Tensor = _place(seed, keep, rows)
    columns, words = len(keep), bits.shape[-1]
    if not keep.is_cuda:
        # The generator would look at the lowest 32 bits of its seed only.
        source = torch.Generator().manual_seed(int(seed) % (2**32 - 5))
        drawn = torch.rand(rows, columns, generator=source, device="cpu") < keep
        whole = torch.nn.functional.pad(drawn, (0, 32 * words - columns)).reshape(rows, words, 32)
        packed: Tensor = (whole.long() << torch.arange(32)).sum(-1).to(torch.int32)
        return packed
    limits_of, draw = _kernels()
    limits = bits.new_empty(33, words)
    with torch.cuda.device(keep.device):
        limits_of[(words,)](keep, limits, columns, words, keep.stride(0), num_warps=1)
        draw[(-(-bits.numel() // _WORDS),)](seed, limits, bits, bits.numel(), words, _WORDS, _ROUNDS, num_warps=1)
    return bits


@mask_bits.register_fake
def _place(seed: Tensor, keep: Tensor, rows: int) -> Tensor:
    return torch.empty(rows, -(-len(keep) // 32), dtype=torch.int32, device=keep.device)


def draw_bits(graph: Graph) -> int:
    """Let a graph draw its large masks, rand(N, K) < keep, as bits; return how many it has.

    The masks have the same distribution, and other random numbers. A seed for each comes from torch's generator.
    """
    found = [node for node in graph.find_nodes(op="call_function", target=aten.lt.Tensor) if _is_mask(node)]
    for node in found:
        drawn, keep = node.args
        rows, columns = drawn.meta["val"].shape
        where = drawn.kwargs["device"]
        with graph.inserting_before(node):
            seed = graph.call_function(aten.randint.low, (0, _SEEDS, [1]), {"dtype": torch.int64, "device": where})
            probability = graph.call_function(aten.expand.default, (keep, [columns]))
            bits = graph.call_function(torch.ops.pyro_dropout.mask_bits.default, (seed, probability, rows))
            places = graph.call_function(aten.arange.default, (32,), {"dtype": torch.int32, "device": where})
            words = graph.call_function(aten.unsqueeze.default, (bits, -1))
            shifted = graph.call_function(aten.bitwise_right_shift.Tensor, (words, places))
            each = graph.call_function(aten.bitwise_and.Scalar, (shifted, 1))
            flat = graph.call_function(aten.view.default, (each, [rows, -1]))
            inside = graph.call_function(aten.slice.Tensor, (flat, 1, 0, columns))
            mask = graph.call_function(aten.ne.Scalar, (inside, 0))
        mask.meta = dict(node.meta)
        node.replace_all_uses_with(mask)
        graph.erase_node(node)
        graph.erase_node(drawn)
    return len(found)


def _is_mask(node: Node) -> bool:
    drawn, keep = node.args
    if not (isinstance(drawn, Node) and isinstance(keep, Node) and drawn.target is aten.rand.default):
        return False
    values, limit = drawn.meta.get("val"), keep.meta.get("val")
    return (
        isinstance(values, Tensor)
        and isinstance(limit, Tensor)
        and len(drawn.users) == 1
        and _is_on_gpu(values)
        and values.dtype == limit.dtype == torch.float32
        and values.dim() == 2
        and limit.dim() <= 1
        and values.numel() >= _AT_LEAST
    )


def _is_on_gpu(values: Tensor) -> bool:
    return values.is_cuda


@functools.cache
def _kernels() -> tuple[Any, Any]:
    import triton
    import triton.language as tl

    @triton.jit
    @no_type_check
    def limits_of(keep, limits, K, W, stride):
        """Write which entries are always one, and then the bits of the others' probabilities, the highest first."""
        word = tl.program_id(0)
        lane = tl.arange(0, 32)
        column = word * 32 + lane
        p = tl.load(keep + column * stride, mask=column < K, other=0.0)
        size = tl.where(p > 0, p, 0.0).to(tl.float64) * 4294967296.0
        always = p >= 1
        limit = tl.where(always, 0.0, size + 0.5).to(tl.int64)
        tl.store(limits + word, tl.sum(tl.where(always, 1, 0).to(tl.int64) << lane, 0).to(tl.int32))
        for b in tl.static_range(32):
            bits = tl.sum(((limit >> (31 - b)) & 1) << lane, 0)
            tl.store(limits + (1 + b) * W + word, bits.to(tl.int32))

    @triton.jit
    @no_type_check
    def draw(seed, limits, bits, words, W, WORDS: tl.constexpr, ROUNDS: tl.constexpr):
        word = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
        key = tl.load(seed)
        own = limits + word % W
        kept = tl.load(own)
        undecided = ~kept
        for j in tl.static_range(4):
            four = tl.randint4x(key, word * 8 + j, ROUNDS)
            for i in tl.static_range(4):
                r = four[i].to(tl.int32, bitcast=True)
                limit = tl.load(own + (1 + 4 * j + i) * W)
                kept |= undecided & limit & ~r
                undecided &= ~(r ^ limit)
        if tl.max(tl.where(undecided != 0, 1, 0), 0) > 0:
            for j in tl.static_range(4, 8):
                four = tl.randint4x(key, word * 8 + j, ROUNDS)
                for i in tl.static_range(4):
                    r = four[i].to(tl.int32, bitcast=True)
                    limit = tl.load(own + (1 + 4 * j + i) * W)
                    kept |= undecided & limit & ~r
                    undecided &= ~(r ^ limit)
        tl.store(bits + word, kept, mask=word < words)

    return limits_of, draw
