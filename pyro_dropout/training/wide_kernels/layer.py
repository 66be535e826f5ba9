"""A layer of a wide network as its kernels see it: where its numbers are, and what they write."""

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from pyro_dropout.generative.precision import is_thin
from pyro_dropout.training.wide_kernels.tiles import padded
from pyro_dropout.training.wide_kernels.wide_network import DropoutNetwork

_EDGE = 128  # a side of an activation or of weights in half precision is a multiple of this


def rounded_up(size: int, to: int = _EDGE) -> int:
    """Return the least multiple that is not smaller.

    Example:
        >>> rounded_up(272), rounded_up(10, 4)
        (384, 12)
    """
    return -(-size // to) * to


@dataclass
class Layer:
    """A layer and the tensors of one step.

    Attributes:
        inputs: how many units go into it.
        outputs: how many come out.
        thin: whether its products are in float32.
        stride: how far apart the inputs of two points are; that of the outputs is the next layer's.
        out_stride: how far apart the gradients in the outputs of two points are.
        start: where its weights start among all parameters; its biases follow.
        first: where its inputs start among all units that are dropped.
        quad: where their groups of four start.
        a: its inputs, masked, (points, stride); those of a first layer are written anew for every step.
        bends: what the gradient in them is multiplied by, unless ReLU shows it.
        slopes: the gradient in its outputs, (points, out_stride).
        half: its weights for products, (outputs, stride), zero where there is none.
    """

    inputs: int
    outputs: int
    thin: bool
    stride: int
    out_stride: int
    start: int
    first: int
    quad: int
    a: Tensor
    bends: Tensor
    slopes: Tensor
    half: Tensor


def layers_of(network: DropoutNetwork, length: int, steps: int, half: torch.dtype, device: torch.device) -> list[Layer]:
    """Return the layers of a network, with room for what a step writes.

    Args:
        network: what the kernels have to know.
        length: points of a step, rounded up.
        steps: how many steps have their inputs written at once.
        half: the type of numbers in products.
        device: where.
    """
    widths = network.widths
    starts = accumulate((b * (a + 1) for a, b in pairwise(widths)), initial=0)
    firsts = accumulate(widths[:-1], initial=0)
    quads = accumulate((rounded_up(width, 4) // 4 for width in widths[:-1]), initial=0)
    found: list[Layer] = []
    last = len(widths) - 2
    for k, ((a, b), start, first, quad) in enumerate(zip(pairwise(widths), starts, firsts, quads, strict=False)):
        few = is_thin(a, b)
        stride = a if few and k == 0 else rounded_up(a)
        out_stride = padded(b) if k == last else rounded_up(b)
        kind = torch.float32 if few and k == 0 else half
        shape = (steps, length, stride) if k == 0 else (length, stride)
        bent = k > 0 and network.kinds[k - 1] != 0
        found.append(
            Layer(
                a,
                b,
                few,
                stride,
                out_stride,
                start,
                first,
                quad,
                torch.zeros(shape, dtype=kind, device=device),
                torch.zeros(shape if bent else (1,), device=device),
                torch.zeros((length, out_stride), dtype=torch.float32 if few and k == last else half, device=device),
                torch.zeros((1,) if few else (rounded_up(b), stride), dtype=half, device=device),
            )
        )
    return found
