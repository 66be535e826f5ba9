"""What a kernel does at a layer: draw its masks, apply its activation, compare outputs with targets, and move weights.

This module needs Triton.
"""

# ruff: noqa: RET505, D103 - Triton compiles one of two branches, and not what follows both

from typing import no_type_check

import triton
import triton.language as tl


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
