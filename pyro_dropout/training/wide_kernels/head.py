"""The kernel in the middle of a step: the last layer, the loss, and the gradient in the last layer's inputs.

This module needs Triton.
"""

# ruff: noqa: RET505, D417 - Triton compiles one of two branches, and names what is compiled in capitals

from typing import no_type_check

import triton
import triton.language as tl

from pyro_dropout.training.wide_kernels.layers import surprise


@triton.jit
@no_type_check
def bent(slope, a, bends, places, KIND: tl.constexpr):
    """Return a gradient in masked activations as one in what they are activations of."""
    if KIND == 0:
        return tl.where(tl.load(a + places).to(tl.float32) != 0, slope, 0.0)
    else:
        return slope * tl.load(bends + places)


@triton.jit
@no_type_check
def surprise_of_classes(f, y, row, inside, OUT: tl.constexpr, ROWS: tl.constexpr):
    """Return -log p(y | f) of each point, and its gradient in f, for classes with these logits."""
    place = tl.arange(0, ROWS)
    f = tl.where((place < OUT)[None, :], f, float("-inf"))
    top = tl.max(f, 1)
    whole = top + tl.log(tl.sum(tl.exp(f - top[:, None]), 1))
    label = tl.load(y + row, mask=inside, other=0)
    is_it = label[:, None] == place[None, :]
    loss = whole - tl.sum(tl.where(is_it, f, 0.0), 1)
    slope = tl.exp(f - whole[:, None]) - tl.where(is_it, 1.0, 0.0)
    return tl.where(inside, loss, 0.0), tl.where(inside[:, None], slope, 0.0)


@triton.jit
@no_type_check
def misfit(f, y, log_tau, row, inside, OUT: tl.constexpr, ROWS: tl.constexpr, CLASSES: tl.constexpr):
    """Return -log p(y | f) of each point, and its gradient in f, (points, ROWS)."""
    if CLASSES:
        return surprise_of_classes(f, y, row, inside, OUT, ROWS)
    elif OUT == 1:
        only = tl.arange(0, ROWS)[None, :] == 0
        loss, slope, _ = surprise(tl.sum(tl.where(only, f, 0.0), 1), y, log_tau, row, inside, OUT, ROWS)
        return loss, tl.where(only, slope[:, None], 0.0)
    else:
        loss, slope, _ = surprise(f, y, log_tau, row, inside, OUT, ROWS)
        return loss, slope


@triton.jit(do_not_specialize=["step"])
@no_type_check
def turn_round(
    a, bends, half, values, y, rows, log_tau, out_slopes, slopes, losses, start, step, points, scale,
    INPUTS: tl.constexpr, ACROSS: tl.constexpr, OUT: tl.constexpr, ROWS: tl.constexpr, THIN: tl.constexpr,
    KIND: tl.constexpr, CLASSES: tl.constexpr, INDEXED: tl.constexpr, PRECISION: tl.constexpr,
    POINTS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Go through the last layer, and back.

    Args:
        a: its inputs, masked, (points, ACROSS).
        bends: what their gradient is multiplied by, unless KIND is ReLU, which shows it.
        half: its weights in half precision, (ROWS, ACROSS), unless it is THIN: then its weights are float32.
        values: all parameters; those of this layer start at ``start``.
        y: all targets.
        rows: the rows of each step's batch, if INDEXED.
        log_tau: the log precision of the noise, unless targets are CLASSES.
        out_slopes: where the gradient in its outputs goes, (points, ROWS).
        slopes: where that in the outputs of the layer before goes, (points, ACROSS).
        losses: where the loss of some points goes, for each program.
        scale: how many times a batch all data are.
    """
    point = tl.program_id(0) * POINTS + tl.arange(0, POINTS)
    place = tl.arange(0, ROWS)
    deep = tl.arange(0, DEPTH)
    f = tl.zeros((POINTS, ROWS), tl.float32)
    for k in tl.range(0, INPUTS, DEPTH, num_stages=STAGES):
        some = tl.load(a + point[:, None] * ACROSS + k + deep[None, :])
        if THIN:
            for out in tl.static_range(OUT):
                weight = tl.load(values + start + out * INPUTS + k + deep, mask=k + deep < INPUTS, other=0.0)
                part = tl.sum(some.to(tl.float32) * weight[None, :], 1)
                f += tl.where(place[None, :] == out, part[:, None], 0.0)
        else:
            weights = tl.load(half + place[:, None] * ACROSS + k + deep[None, :])
            f = tl.dot(some, tl.trans(weights), f, input_precision=PRECISION)
    f += tl.load(values + start + OUT * INPUTS + place, mask=place < OUT, other=0.0)[None, :]
    inside = point < points
    row = point.to(tl.int64)
    if INDEXED:
        row = tl.load(rows + step * points + point, mask=inside, other=0)
    loss, slope = misfit(f, y, log_tau, row, inside, OUT, ROWS, CLASSES)
    tl.store(losses + tl.program_id(0), scale * tl.sum(loss, 0))
    slope = scale * slope
    tl.store(out_slopes + point[:, None] * ROWS + place[None, :], slope)
    for k in tl.range(0, INPUTS, DEPTH, num_stages=STAGES):
        if THIN:
            back = tl.zeros((POINTS, DEPTH), tl.float32)
            for out in tl.static_range(OUT):
                weight = tl.load(values + start + out * INPUTS + k + deep, mask=k + deep < INPUTS, other=0.0)
                own = tl.sum(tl.where(place[None, :] == out, slope, 0.0), 1)
                back += own[:, None] * weight[None, :]
        else:
            weights = tl.load(half + place[:, None] * ACROSS + k + deep[None, :])
            back = tl.dot(slope.to(weights.dtype), weights, input_precision=PRECISION)
        places = point[:, None] * ACROSS + k + deep[None, :]
        tl.store(slopes + places, bent(back, a, bends, places, KIND))
