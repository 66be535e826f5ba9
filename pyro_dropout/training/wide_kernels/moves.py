"""What a kernel does at the end of a step: the gradient of the KL, and a move of Adam. This module needs Triton."""

# ruff: noqa: D103 - Triton compiles one of two branches, and not what follows both

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check
def one_less(x):
    """Return 1 - exp(x) for x <= 0, without loss of digits near 0."""
    near = 1 + x / 7 * (1 + x / 8)
    near = 1 + x / 3 * (1 + x / 4 * (1 + x / 5 * (1 + x / 6 * near)))
    return tl.where(x > -0.3, -x * (1 + x / 2 * near), 1 - tl.exp(x))


@triton.jit
@no_type_check
def adam(
    values, first, second, decay, places, there, slope, rate, unbias,
    BETA1: tl.constexpr, BETA2: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Return parameters and moments after a step, and the KL before it, up to a constant."""
    p = tl.load(values + places, mask=there, other=0.0)
    pull = decay * p  # the gradient of the KL
    g = slope + pull
    mean = BETA1 * tl.load(first + places, mask=there, other=0.0) + (1 - BETA1) * g
    square = BETA2 * tl.load(second + places, mask=there, other=0.0) + (1 - BETA2) * g * g
    moved = p - rate * mean / (tl.sqrt(square) * unbias + EPS)
    return moved, mean, square, 0.5 * pull * p


@triton.jit
@no_type_check
def store(values, first, second, places, there, moved, mean, square):
    tl.store(values + places, moved, mask=there)
    tl.store(first + places, mean, mask=there)
    tl.store(second + places, square, mask=there)
