"""What a kernel does at the end of a step: the gradient of the KL, and a move of Adam. This module needs Triton."""

# ruff: noqa: RET505, D103 - Triton compiles one of two branches, and not what follows both

from typing import no_type_check

import triton
import triton.language as tl

from pyro_dropout.training.one_kernel.layers import line, tile


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


@triton.jit
@no_type_check
def move_weights(
    values, first, second, decay, start, slope, rate, unbias,
    OUT: tl.constexpr, IN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BETA1: tl.constexpr, BETA2: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    if OUT == 1:
        places, there = line(start, IN, COLUMNS)
        decays = tl.load(decay + places, mask=there, other=0.0)
        moved, mean, square, kl = adam(
            values, first, second, decays, places, there, slope, rate, unbias, BETA1, BETA2, EPS
        )
        return moved, mean, square, tl.sum(kl, 0)
    else:
        places, there = tile(start, OUT, IN, ROWS, COLUMNS)
        decays = tl.load(decay + places, mask=there, other=0.0)
        moved, mean, square, kl = adam(
            values, first, second, decays, places, there, slope, rate, unbias, BETA1, BETA2, EPS
        )
        return moved, mean, square, tl.sum(tl.sum(kl, 1), 0)


@triton.jit
@no_type_check
def move_biases(
    values, first, second, decay, start, slope, rate, unbias, OUT: tl.constexpr, ROWS: tl.constexpr,
    BETA1: tl.constexpr, BETA2: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    if OUT == 1:
        return adam(values, first, second, tl.load(decay + start), start, True, slope, rate, unbias, BETA1, BETA2, EPS)
    else:
        places, there = line(start, OUT, ROWS)
        decays = tl.load(decay + places, mask=there, other=0.0)
        moved, mean, square, kl = adam(
            values, first, second, decays, places, there, slope, rate, unbias, BETA1, BETA2, EPS
        )
        return moved, mean, square, tl.sum(kl, 0)


@triton.jit
@no_type_check
def store_weights(
    values, first, second, start, moved, mean, square,
    OUT: tl.constexpr, IN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    if OUT == 1:
        places, there = line(start, IN, COLUMNS)
        store(values, first, second, places, there, moved, mean, square)
    else:
        places, there = tile(start, OUT, IN, ROWS, COLUMNS)
        store(values, first, second, places, there, moved, mean, square)


@triton.jit
@no_type_check
def store_biases(values, first, second, start, moved, mean, square, OUT: tl.constexpr, ROWS: tl.constexpr):
    if OUT == 1:
        tl.store(values + start, moved)
        tl.store(first + start, mean)
        tl.store(second + start, square)
    else:
        places, there = line(start, OUT, ROWS)
        store(values, first, second, places, there, moved, mean, square)
