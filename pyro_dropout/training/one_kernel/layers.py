"""What a kernel does at a layer: load its weights, draw its masks, and go forward and back through it.

A layer with a single output is a sum, and all others are matrix products. This module needs Triton.
"""

# ruff: noqa: RET505, D103 - Triton compiles one of two branches, and not what follows both

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check
def tile(start, OUT: tl.constexpr, IN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return where the weights of a layer are, (ROWS, COLUMNS), and which of them exist."""
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    return start + row[:, None] * IN + column[None, :], (row[:, None] < OUT) & (column[None, :] < IN)


@triton.jit
@no_type_check
def line(start, SIZE: tl.constexpr, LENGTH: tl.constexpr):
    """Return where some numbers in a row are, (LENGTH,), and which of them exist."""
    place = tl.arange(0, LENGTH)
    return start + place, place < SIZE


@triton.jit
@no_type_check
def load_weights(values, start, OUT: tl.constexpr, IN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Load a layer's weights, (ROWS, COLUMNS); those of a single output are a vector, (COLUMNS,)."""
    if OUT == 1:
        places, there = line(start, IN, COLUMNS)
        return tl.load(values + places, mask=there, other=0.0)
    else:
        places, there = tile(start, OUT, IN, ROWS, COLUMNS)
        return tl.load(values + places, mask=there, other=0.0)


@triton.jit
@no_type_check
def load_biases(values, start, OUT: tl.constexpr, ROWS: tl.constexpr):
    """Load a layer's biases, (ROWS,); that of a single output is a number."""
    if OUT == 1:
        return tl.load(values + start)
    else:
        places, there = line(start, OUT, ROWS)
        return tl.load(values + places, mask=there, other=0.0)


@triton.jit
@no_type_check
def draw(
    given, drawn, limits, key, net, low, high, point, inside, begin, first, units, quad, quads,
    IN: tl.constexpr, COLUMNS: tl.constexpr, GIVEN: tl.constexpr,
):  # fmt: skip
    """Return which inputs of a layer are kept at each point, from ``begin`` on, (points, COLUMNS), as zeros and ones.

    A number belongs to its step, network, layer, point and unit, however many steps are taken at a time.
    """
    unit = begin + tl.arange(0, COLUMNS)
    if GIVEN:
        places = (drawn + point)[:, None] * units + first + unit[None, :]
        return tl.load(given + places, mask=inside[:, None] & (unit < IN)[None, :], other=0.0)
    else:
        four = begin // 4 + tl.arange(0, COLUMNS // 4)
        at = (point[:, None] * quads + quad + four[None, :]).to(tl.uint32)
        none = at * 0
        a, b, c, d = tl.philox(key, at, none + net, none + low, none + high)
        bits = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
        limit = tl.load(limits + first + unit, mask=unit < IN, other=0).to(tl.uint32)
        return (bits <= limit[None, :]).to(tl.float32)


@triton.jit
@no_type_check
def activation(z, KIND: tl.constexpr):
    """Return the value of an activation at ``z``, and its slope: of ReLU, tanh, the sigmoid or SiLU."""
    if KIND == 0:
        return tl.where(z <= 0, 0.0, z), tl.where(z <= 0, 0.0, 1.0)  # what is no number stays none
    elif KIND == 1:
        square = z * z
        near = z * (1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
        value = tl.where(square < 0.0625, near, 1 - 2 / (tl.exp(2 * z) + 1))
        return value, 1 - value * value
    elif KIND == 2:
        value = 1 / (1 + tl.exp(-z))
        return value, value * (1 - value)
    else:
        tl.static_assert(KIND == 3)
        share = 1 / (1 + tl.exp(-z))
        return z * share, share * (1 + z * (1 - share))


@triton.jit
@no_type_check
def product(a, b, HALF: tl.constexpr, PRECISION: tl.constexpr):
    """Return a·b, summed in float32; HALF: of numbers that are rounded to bfloat16."""
    if HALF:
        return tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16))
    else:
        return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
@no_type_check
def forward(a, weight, bias, OUT: tl.constexpr, HALF: tl.constexpr, PRECISION: tl.constexpr):
    """Return a·Wᵀ + b, (points, ROWS), or (points,) for a single output."""
    if OUT == 1:
        return tl.sum(a * weight[None, :], 1) + bias
    else:
        return product(a, tl.trans(weight), HALF, PRECISION) + bias[None, :]


@triton.jit
@no_type_check
def backward(slope, weight, OUT: tl.constexpr, HALF: tl.constexpr, PRECISION: tl.constexpr):
    """Return the gradient in a layer's inputs, (points, COLUMNS), from that in its outputs."""
    if OUT == 1:
        return slope[:, None] * weight[None, :]
    else:
        return product(slope, weight, HALF, PRECISION)


@triton.jit
@no_type_check
def gradient(slope, a, OUT: tl.constexpr, HALF: tl.constexpr, PRECISION: tl.constexpr):
    """Return the gradient in a layer's weights, summed over points."""
    if OUT == 1:
        return tl.sum(slope[:, None] * a, 0)
    else:
        return product(tl.trans(slope), a, HALF, PRECISION)


@triton.jit
@no_type_check
def zeros(OUT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    if OUT == 1:
        return tl.zeros((COLUMNS,), tl.float32), 0.0
    else:
        return tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS,), tl.float32)


@triton.jit
@no_type_check
def surprise(f, y, log_tau, row, inside, OUT: tl.constexpr, ROWS: tl.constexpr):
    """Return -log p(y | f) of each point, and its gradients in f and log τ, for a Gaussian of precision τ."""
    if OUT == 1:
        width = tl.load(log_tau)
        rest = f - tl.load(y + row, mask=inside, other=0.0)
        tau = tl.exp(width)
        half = 0.5 * tau * rest * rest
        loss = tl.where(inside, half + (0.9189385332046727 - 0.5 * width), 0.0)  # ½ log 2π
        return loss, tl.where(inside, tau * rest, 0.0), tl.sum(tl.where(inside, half - 0.5, 0.0), 0)
    else:
        place = tl.arange(0, ROWS)
        there = inside[:, None] & (place < OUT)[None, :]
        width = tl.load(log_tau + place, mask=place < OUT, other=0.0)[None, :]
        rest = f - tl.load(y + row[:, None] * OUT + place[None, :], mask=there, other=0.0)
        tau = tl.exp(width)
        half = 0.5 * tau * rest * rest
        loss = tl.where(there, half + (0.9189385332046727 - 0.5 * width), 0.0)
        return tl.sum(loss, 1), tl.where(there, tau * rest, 0.0), tl.sum(tl.where(there, half - 0.5, 0.0), 0)
