"""Kernels that go forward: masked inputs, and layers with their bias, activation and the mask of what comes next.

Activations are (points, units) with both sides rounded up, and zeros where there is no point or unit. This module needs
Triton.
"""

# ruff: noqa: D417 - Triton names what is compiled in capitals

from typing import no_type_check

import triton
import triton.language as tl

from pyro_dropout.training.wide_kernels.layers import activation, draw


@triton.jit
@no_type_check
def kept_units(
    given, limits, stream, step, point, points, begin, first, units, quad, quads,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, GIVEN: tl.constexpr,
):  # fmt: skip
    """Return which units are kept at some points in this step, (points, COLUMNS), as zeros and ones."""
    count = tl.load(stream + 1) + step
    low = (count & 0xFFFFFFFF).to(tl.uint32)
    high = (count >> 32).to(tl.uint32)
    net = (low * 0).to(tl.uint32)
    drawn = (step * points).to(tl.int64)
    return draw(
        given, drawn, limits, tl.load(stream), net, low, high, point, point < points,
        begin, first, units, quad, quads, WIDTH, COLUMNS, GIVEN,
    )  # fmt: skip


@triton.jit
@no_type_check
def take_inputs(
    x, rows, inputs, given, limits, stream, points, units, quads,
    WIDTH: tl.constexpr, STRIDE: tl.constexpr, LENGTH: tl.constexpr, INDEXED: tl.constexpr, GIVEN: tl.constexpr,
    POINTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write the masked inputs of some steps, (steps, LENGTH, STRIDE).

    Args:
        x: all inputs, (N, WIDTH).
        rows: the rows of each step's batch, (steps, points), if INDEXED.
        inputs: where they go.
        given: masks to use instead of drawn ones, (steps, points, units), if GIVEN.
        limits: the largest number of 32 bits with which a unit is kept.
        stream: the key of the random numbers, and how many steps have drawn some.
    """
    step = tl.program_id(0)
    point = tl.program_id(1) * POINTS + tl.arange(0, POINTS)
    begin = tl.program_id(2) * COLUMNS
    unit = begin + tl.arange(0, COLUMNS)
    inside = point < points
    row = point.to(tl.int64)
    if INDEXED:
        row = tl.load(rows + step * points + point, mask=inside, other=0)
    there = inside[:, None] & (unit < WIDTH)[None, :]
    value = tl.load(x + row[:, None] * WIDTH + unit[None, :], mask=there, other=0.0)
    kept = kept_units(
        given, limits, stream, step, point, points, begin, 0, units, 0, quads, WIDTH, COLUMNS, GIVEN
    )  # fmt: skip
    places = (step.to(tl.int64) * LENGTH + point)[:, None] * STRIDE + unit[None, :]
    tl.store(inputs + places, tl.where(there, value * kept, 0.0), mask=(unit < STRIDE)[None, :])


@triton.jit
@no_type_check
def settle(
    z, found, bends, given, limits, stream, step, point, points, begin, first, units, quad, quads,
    WIDTH: tl.constexpr, STRIDE: tl.constexpr, COLUMNS: tl.constexpr, KIND: tl.constexpr, GIVEN: tl.constexpr,
):  # fmt: skip
    """Write the activations at ``z``, masked, and what the gradient is multiplied by, unless ReLU shows it."""
    unit = begin + tl.arange(0, COLUMNS)
    value, slope = activation(z, KIND)
    kept = kept_units(
        given, limits, stream, step, point, points, begin, first, units, quad, quads, WIDTH, COLUMNS, GIVEN
    )  # fmt: skip
    there = (point < points)[:, None] & (unit < WIDTH)[None, :]
    places = point[:, None] * STRIDE + unit[None, :]
    tl.store(found + places, tl.where(there, value * kept, 0.0))
    if KIND != 0:
        tl.store(bends + places, tl.where(there, slope * kept, 0.0))


@triton.jit(do_not_specialize=["step"])
@no_type_check
def thin_ahead(
    inputs, values, found, bends, given, limits, stream, start, step, points, first, units, quad, quads,
    INPUTS: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr, KIND: tl.constexpr, GIVEN: tl.constexpr,
    TILES: tl.constexpr, POINTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Go through a first layer of few inputs, in float32."""
    point = tl.program_id(0) % TILES * POINTS + tl.arange(0, POINTS)
    begin = tl.program_id(0) // TILES * COLUMNS
    unit = begin + tl.arange(0, COLUMNS)
    bias = tl.load(values + start + WIDTH * INPUTS + unit, mask=unit < WIDTH, other=0.0)
    z = tl.zeros((POINTS, COLUMNS), tl.float32) + bias[None, :]
    for k in tl.static_range(INPUTS):
        weight = tl.load(values + start + unit * INPUTS + k, mask=unit < WIDTH, other=0.0)
        z += tl.load(inputs + point * INPUTS + k)[:, None] * weight[None, :]
    settle(
        z, found, bends, given, limits, stream, step, point, points, begin, first, units, quad, quads,
        WIDTH, STRIDE, COLUMNS, KIND, GIVEN,
    )  # fmt: skip


@triton.jit(do_not_specialize=["step"])
@no_type_check
def ahead(
    a, half, values, found, bends, given, limits, stream, bias, step, points, first, units, quad, quads,
    INPUTS: tl.constexpr, ACROSS: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr, KIND: tl.constexpr,
    GIVEN: tl.constexpr, PRECISION: tl.constexpr, TILES: tl.constexpr, POINTS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Go through a layer: activation(a·Wᵀ + b), masked for the next one.

    Args:
        a: its inputs, masked, (points, ACROSS).
        half: its weights in half precision, (units, ACROSS).
        values: all parameters; its biases start at ``bias``.
        found: where the masked activations go, (points, STRIDE).
        bends: where what the gradient is multiplied by goes, likewise, unless KIND is ReLU.
        first: where its units start among all that are dropped, and ``quad`` where their groups of four do.
    """
    point = tl.program_id(0) % TILES * POINTS + tl.arange(0, POINTS)
    begin = tl.program_id(0) // TILES * COLUMNS
    unit = begin + tl.arange(0, COLUMNS)
    deep = tl.arange(0, DEPTH)
    left = a + point[:, None] * ACROSS + deep[None, :]
    right = half + unit[:, None] * ACROSS + deep[None, :]
    z = tl.zeros((POINTS, COLUMNS), tl.float32)
    for k in tl.range(0, INPUTS, DEPTH, num_stages=STAGES):
        z = tl.dot(tl.load(left + k), tl.trans(tl.load(right + k)), z, input_precision=PRECISION)
    z += tl.load(values + bias + unit, mask=unit < WIDTH, other=0.0)[None, :]
    settle(
        z, found, bends, given, limits, stream, step, point, points, begin, first, units, quad, quads,
        WIDTH, STRIDE, COLUMNS, KIND, GIVEN,
    )  # fmt: skip
