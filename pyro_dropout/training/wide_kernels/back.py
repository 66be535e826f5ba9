"""The kernel that goes back: the gradient in a layer's inputs, beside moves of layers that are behind it.

A move reads a layer's weights and moments once and writes them once: the gradient of the loss, that of the KL and the
step of Adam stay in registers. Products wait for numbers most of the time and moves for memory, so both run in one
launch, in different programs. This module needs Triton.
"""

# ruff: noqa: D417 - Triton names what is compiled in capitals

from typing import no_type_check

import triton
import triton.language as tl

from pyro_dropout.training.wide_kernels.head import bent
from pyro_dropout.training.wide_kernels.layers import adam, one_less, store


@triton.jit
@no_type_check
def go_back(
    number, slopes, half, a, bends, found,
    OUT: tl.constexpr, OUT_STRIDE: tl.constexpr, IN_STRIDE: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr,
    TILES: tl.constexpr, POINTS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write a part of the gradient in the outputs of the layer before, from that in a layer's own outputs."""
    point = number % TILES * POINTS + tl.arange(0, POINTS)
    unit = number // TILES * COLUMNS + tl.arange(0, COLUMNS)
    deep = tl.arange(0, DEPTH)
    left = slopes + point[:, None] * OUT_STRIDE + deep[None, :]
    right = half + deep[:, None] * IN_STRIDE + unit[None, :]
    slope = tl.zeros((POINTS, COLUMNS), tl.float32)
    for k in tl.range(0, OUT, DEPTH, num_stages=STAGES):
        slope = tl.dot(tl.load(left + k), tl.load(right + k * IN_STRIDE), slope, input_precision=PRECISION)
    places = point[:, None] * IN_STRIDE + unit[None, :]
    tl.store(found + places, bent(slope, a, bends, places, KIND))


@triton.jit
@no_type_check
def pace(lr, t, step, LOG1: tl.constexpr, LOG2: tl.constexpr):
    """Return Adam's rate at this step, and what the root of its second moment is multiplied by."""
    time = tl.load(t) + step
    return tl.load(lr) / one_less(time * LOG1), 1 / tl.sqrt(one_less(time * LOG2))


@triton.jit
@no_type_check
def move_weights(
    number, slopes, a, half, values, first, second, decay, start, decay_start, losses, rate, unbias, points,
    OUT: tl.constexpr, OUT_STRIDE: tl.constexpr, IN: tl.constexpr, IN_STRIDE: tl.constexpr, BY_OUTPUT: tl.constexpr,
    PRECISION: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    STAGES: tl.constexpr, BETA1: tl.constexpr, BETA2: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Move a tile of a layer's weights, and write its part of the KL."""
    out = number // TILES * ROWS + tl.arange(0, ROWS)
    unit = number % TILES * COLUMNS + tl.arange(0, COLUMNS)
    there = (out < OUT)[:, None] & (unit < IN)[None, :]
    within = out[:, None] * IN + unit[None, :]
    places = start + within
    deep = tl.arange(0, DEPTH)
    left = slopes + deep[:, None] * OUT_STRIDE + out[None, :]
    right = a + deep[:, None] * IN_STRIDE + unit[None, :]
    slope = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in tl.range(0, points, DEPTH, num_stages=STAGES):
        those = tl.load(left + k * OUT_STRIDE)
        slope = tl.dot(tl.trans(those), tl.load(right + k * IN_STRIDE), slope, input_precision=PRECISION)
    if BY_OUTPUT:
        decays = tl.load(decay + decay_start + within, mask=there, other=0.0)
    else:
        decays = tl.load(decay + decay_start + unit, mask=unit < IN, other=0.0)[None, :]
    moved, mean, square, kl = adam(
        values, first, second, decays, places, there, slope, rate, unbias, BETA1, BETA2, EPS
    )  # fmt: skip
    tl.debug_barrier()  # all threads have read what is now written
    store(values, first, second, places, there, moved, mean, square)
    tl.store(half + out[:, None] * IN_STRIDE + unit[None, :], moved, mask=there)
    tl.store(losses + number, tl.sum(tl.sum(kl, 1), 0))


@triton.jit
@no_type_check
def move_biases(
    number, slopes, values, first, second, decay, start, decay_start, losses, rate, unbias, points,
    OUT: tl.constexpr, OUT_STRIDE: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    BETA1: tl.constexpr, BETA2: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Move some biases of a layer, and write their part of the KL."""
    out = number * COLUMNS + tl.arange(0, COLUMNS)
    deep = tl.arange(0, DEPTH)
    sums = tl.zeros((DEPTH, COLUMNS), tl.float32)
    for k in range(0, points, DEPTH):
        inside = (k + deep < points)[:, None] & (out < OUT)[None, :]
        sums += tl.load(slopes + (k + deep)[:, None] * OUT_STRIDE + out[None, :], mask=inside, other=0.0).to(tl.float32)
    there = out < OUT
    decays = tl.load(decay + decay_start + out, mask=there, other=0.0)
    moved, mean, square, kl = adam(
        values, first, second, decays, start + out, there, tl.sum(sums, 0), rate, unbias, BETA1, BETA2, EPS
    )  # fmt: skip
    tl.debug_barrier()
    store(values, first, second, start + out, there, moved, mean, square)
    tl.store(losses + number, tl.sum(kl, 0))


@triton.jit
@no_type_check
def move_thin(
    number, long, thin, values, first, second, decay, start, decay_start, losses, rate, unbias, points,
    LONG: tl.constexpr, LONG_STRIDE: tl.constexpr, THIN: tl.constexpr, THIN_STRIDE: tl.constexpr,
    LONG_PLACE: tl.constexpr, THIN_PLACE: tl.constexpr, LONG_DECAY: tl.constexpr, THIN_DECAY: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BETA1: tl.constexpr, BETA2: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Move some weights of a layer of few inputs or few outputs, and write their part of the KL.

    Args:
        long: the side of many units, (points, LONG_STRIDE): gradients of a first layer, inputs of a last one.
        thin: the other side, (points, THIN_STRIDE), of which THIN are used.
        LONG_PLACE: how far apart weights of neighbours on the long side are, LONG_DECAY their decays; likewise THIN.
    """
    which = number % THIN
    unit = number // THIN * COLUMNS + tl.arange(0, COLUMNS)
    deep = tl.arange(0, DEPTH)
    there = unit < LONG
    sums = tl.zeros((DEPTH, COLUMNS), tl.float32)
    for k in range(0, points, DEPTH):
        inside = k + deep < points
        many = tl.load(long + (k + deep)[:, None] * LONG_STRIDE + unit[None, :], mask=inside[:, None], other=0.0)
        few = tl.load(thin + (k + deep) * THIN_STRIDE + which, mask=inside, other=0.0)
        sums += many.to(tl.float32) * few.to(tl.float32)[:, None]
    decays = tl.load(decay + decay_start + unit * LONG_DECAY + which * THIN_DECAY, mask=there, other=0.0)
    places = start + unit * LONG_PLACE + which * THIN_PLACE
    moved, mean, square, kl = adam(
        values, first, second, decays, places, there, tl.sum(sums, 0), rate, unbias, BETA1, BETA2, EPS
    )  # fmt: skip
    tl.debug_barrier()
    store(values, first, second, places, there, moved, mean, square)
    tl.store(losses + number, tl.sum(kl, 0))


@triton.jit(do_not_specialize=["step", "wide_loss", "thin_loss"])
@no_type_check
def back(
    back_slopes, back_half, back_a, back_bends, back_found,
    wide_slopes, wide_a, wide_half, wide_start, wide_decay, wide_bias_decay, wide_loss,
    long, thin, thin_slopes, thin_start, thin_decay, thin_bias_decay, thin_loss,
    values, first, second, decay, lr, t, losses, step, points,
    BACK: tl.constexpr, BACK_OUT: tl.constexpr, BACK_OUT_STRIDE: tl.constexpr, BACK_IN_STRIDE: tl.constexpr,
    BACK_KIND: tl.constexpr, BACK_TILES: tl.constexpr, BACK_POINTS: tl.constexpr, BACK_COLUMNS: tl.constexpr,
    BACK_DEPTH: tl.constexpr, BACK_STAGES: tl.constexpr,
    BIASES: tl.constexpr, WIDE: tl.constexpr, WIDE_OUT: tl.constexpr, WIDE_OUT_STRIDE: tl.constexpr,
    WIDE_IN: tl.constexpr, WIDE_IN_STRIDE: tl.constexpr, BY_OUTPUT: tl.constexpr, WIDE_TILES: tl.constexpr,
    WIDE_ROWS: tl.constexpr, WIDE_COLUMNS: tl.constexpr, WIDE_DEPTH: tl.constexpr, WIDE_STAGES: tl.constexpr,
    THIN_BIASES: tl.constexpr, THINS: tl.constexpr, THIN_OUT: tl.constexpr, THIN_OUT_STRIDE: tl.constexpr,
    LONG: tl.constexpr, LONG_STRIDE: tl.constexpr, THIN: tl.constexpr, THIN_STRIDE: tl.constexpr,
    LONG_PLACE: tl.constexpr, THIN_PLACE: tl.constexpr, LONG_DECAY: tl.constexpr, THIN_DECAY: tl.constexpr,
    FEW: tl.constexpr, MANY: tl.constexpr, PRECISION: tl.constexpr,
    BETA1: tl.constexpr, BETA2: tl.constexpr, LOG1: tl.constexpr, LOG2: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Go back through one layer, move a wide one and move a thin one; each of the three may be absent.

    The first BACK programs go back, the next BIASES move biases of the wide layer and WIDE its weights, and then
    THIN_BIASES and THINS those of the thin one. Numbers that start with BACK, WIDE and THIN or LONG belong to the
    function for each; FEW columns and MANY points are what programs with sums of their own look at.
    """
    number = tl.program_id(0)
    if number < BACK:
        if BACK > 0:  # what is absent is not compiled
            go_back(
                number, back_slopes, back_half, back_a, back_bends, back_found,
                BACK_OUT, BACK_OUT_STRIDE, BACK_IN_STRIDE, BACK_KIND, PRECISION,
                BACK_TILES, BACK_POINTS, BACK_COLUMNS, BACK_DEPTH, BACK_STAGES,
            )  # fmt: skip
    else:
        rate, unbias = pace(lr, t, step, LOG1, LOG2)
        if number < BACK + BIASES:
            if BIASES > 0:
                move_biases(
                    number - BACK, wide_slopes, values, first, second, decay, wide_start + WIDE_OUT * WIDE_IN,
                    wide_bias_decay, losses + wide_loss, rate, unbias, points,
                    WIDE_OUT, WIDE_OUT_STRIDE, FEW, MANY, BETA1, BETA2, EPS,
                )  # fmt: skip
        elif number < BACK + BIASES + WIDE:
            if WIDE > 0:
                move_weights(
                    number - BACK - BIASES, wide_slopes, wide_a, wide_half, values, first, second, decay, wide_start,
                    wide_decay, losses + wide_loss + BIASES, rate, unbias, points,
                    WIDE_OUT, WIDE_OUT_STRIDE, WIDE_IN, WIDE_IN_STRIDE, BY_OUTPUT, PRECISION,
                    WIDE_TILES, WIDE_ROWS, WIDE_COLUMNS, WIDE_DEPTH, WIDE_STAGES, BETA1, BETA2, EPS,
                )  # fmt: skip
        elif number < BACK + BIASES + WIDE + THIN_BIASES:
            if THIN_BIASES > 0:
                move_biases(
                    number - BACK - BIASES - WIDE, thin_slopes, values, first, second, decay, thin_start + LONG * THIN,
                    thin_bias_decay, losses + thin_loss, rate, unbias, points,
                    THIN_OUT, THIN_OUT_STRIDE, FEW, MANY, BETA1, BETA2, EPS,
                )  # fmt: skip
        else:
            if THINS > 0:
                move_thin(
                    number - BACK - BIASES - WIDE - THIN_BIASES, long, thin, values, first, second, decay, thin_start,
                    thin_decay, losses + thin_loss + THIN_BIASES, rate, unbias, points,
                    LONG, LONG_STRIDE, THIN, THIN_STRIDE, LONG_PLACE, THIN_PLACE, LONG_DECAY, THIN_DECAY,
                    FEW, MANY, BETA1, BETA2, EPS,
                )  # fmt: skip
