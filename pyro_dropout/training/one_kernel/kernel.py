"""The kernel: some steps of dropout training of small networks, a program for each network.

A program reads its network's parameters and moments at the start of a step and writes them at its end, so they stay in
the caches of its processor. Between the two, masks, activations and gradients stay in registers and shared memory.
This module needs Triton, which comes with torch where there is a GPU; it is imported when it is first needed.
"""

# ruff: noqa: RUF005, D417 - Triton adds tuples by +, and names what is compiled in capitals

from typing import no_type_check

import triton
import triton.language as tl

from pyro_dropout.training.one_kernel.layers import (
    activation,
    backward,
    draw,
    forward,
    gradient,
    load_biases,
    load_weights,
    surprise,
    zeros,
)
from pyro_dropout.training.one_kernel.moves import move_biases, move_weights, one_less, store_biases, store_weights


@triton.jit(do_not_specialize=["steps", "rows"])
@no_type_check
def advance(
    x, y, rows, values, first, second, decay, limits, log_tau, constant, lr, t, stream, losses, given,
    steps, points, scale, row_step, row_net, lr_net,
    LAYERS: tl.constexpr, WIDTHS: tl.constexpr, SIZES: tl.constexpr, STARTS: tl.constexpr, FIRSTS: tl.constexpr,
    KINDS: tl.constexpr, TOTAL: tl.constexpr, UNITS: tl.constexpr, QUADS: tl.constexpr, POINTS: tl.constexpr,
    INDEXED: tl.constexpr, GIVEN: tl.constexpr, LEARNED: tl.constexpr, PRECISION: tl.constexpr,
    BETA1: tl.constexpr, BETA2: tl.constexpr, LOG1: tl.constexpr, LOG2: tl.constexpr, EPS: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    """Take ``steps`` steps of every network.

    Args:
        x: inputs, (N, IN).
        y: targets, (N, OUT).
        rows: the rows of batches, at ``row_step`` from step to step and ``row_net`` from network to network.
        values: parameters, (networks, TOTAL): weights and biases, layer by layer.
        first: the running means of their gradients.
        second: the running means of the squares.
        decay: the KL is Σ ½ decay·value², up to ``constant``.
        limits: the largest number of 32 bits with which an input of a layer is kept, (networks, UNITS).
        log_tau: the noise's log precision, (networks, OUT).
        constant: what the KL has beside its squares, (networks,).
        lr: learning rates, at ``lr_net`` from network to network.
        t: the number of the first step, from 1.
        stream: the key of the random numbers, and how many steps have drawn some.
        losses: where the losses before each step go, (steps, networks).
        given: masks to use instead of drawn ones, (steps, networks, points, UNITS), if GIVEN.
        points: how many a batch has, and ``scale`` times as many there are in all.
        WIDTHS: units of each layer; SIZES, powers of two that hold them.
        STARTS: where the parameters of each layer start, and last where the log precision is, if it is LEARNED.
        FIRSTS: where the inputs of each layer start among all UNITS, and then where its groups of four do among QUADS.
        KINDS: the activation after each layer but the last: 0 for ReLU, 1 for tanh, 2 for the sigmoid, 3 for SiLU.
        POINTS: how many points are looked at together, a power of two.
        HALF: whether the products of each layer are of numbers in bfloat16; PRECISION is that of the others.
    """
    net = tl.program_id(0)
    nets = tl.num_programs(0)
    values += net.to(tl.int64) * TOTAL
    first += net.to(tl.int64) * TOTAL
    second += net.to(tl.int64) * TOTAL
    decay += net.to(tl.int64) * TOTAL
    limits += net * UNITS
    if LEARNED:
        log_tau = values + STARTS[LAYERS]
    else:
        log_tau += net * WIDTHS[LAYERS]
    rate_of_net = tl.load(lr + net * lr_net)
    constant_of_net = tl.load(constant + net)
    time = tl.load(t)
    key = tl.load(stream)
    drawn_before = tl.load(stream + 1)
    for step in range(steps):
        weights = ()
        biases = ()
        slopes = ()
        bias_slopes = ()
        for k in tl.static_range(LAYERS):
            weights = weights + (load_weights(values, STARTS[k], WIDTHS[k + 1], WIDTHS[k], SIZES[k + 1], SIZES[k]),)
            biases = biases + (load_biases(values, STARTS[k] + WIDTHS[k] * WIDTHS[k + 1], WIDTHS[k + 1], SIZES[k + 1]),)
            no_slope, no_bias_slope = zeros(WIDTHS[k + 1], SIZES[k + 1], SIZES[k])
            slopes = slopes + (no_slope,)
            bias_slopes = bias_slopes + (no_bias_slope,)
        count = drawn_before + step
        low = (count & 0xFFFFFFFF).to(tl.uint32)
        high = (count >> 32).to(tl.uint32)
        misfits = tl.zeros((POINTS,), tl.float32)
        _, width_slopes = zeros(WIDTHS[LAYERS], SIZES[LAYERS], SIZES[LAYERS - 1])
        for begin in range(0, points, POINTS):
            point = begin + tl.arange(0, POINTS)
            inside = point < points
            row = point.to(tl.int64)
            if INDEXED:
                row = tl.load(rows + step * row_step + net * row_net + point, mask=inside, other=0)
            unit = tl.arange(0, SIZES[0])
            a = tl.load(
                x + row[:, None] * WIDTHS[0] + unit[None, :],
                mask=inside[:, None] & (unit < WIDTHS[0])[None, :],
                other=0.0,
            )
            drawn = (step * nets + net).to(tl.int64) * points
            inputs = ()
            gates = ()
            z = 0.0
            bend = 1.0
            for k in tl.static_range(LAYERS):
                kept = draw(
                    given, drawn, limits, key, net.to(tl.uint32), low, high, point, inside,
                    0, FIRSTS[k], UNITS, FIRSTS[LAYERS + k], QUADS, WIDTHS[k], SIZES[k], GIVEN,
                )  # fmt: skip
                a = a * kept
                inputs = inputs + (a,)
                gates = gates + (bend * kept,)
                z = forward(a, weights[k], biases[k], WIDTHS[k + 1], HALF[k], PRECISION)
                if k < LAYERS - 1:
                    a, bend = activation(z, KINDS[k])
            misfit, slope, width_slope = surprise(z, y, log_tau, row, inside, WIDTHS[LAYERS], SIZES[LAYERS])
            misfits += misfit
            if LEARNED:
                width_slopes += scale * width_slope
            slope = slope * scale
            new_slopes = ()
            new_bias_slopes = ()
            for back in tl.static_range(LAYERS):
                new_slopes = (
                    slopes[LAYERS - 1 - back]
                    + gradient(
                        slope, inputs[LAYERS - 1 - back], WIDTHS[LAYERS - back], HALF[LAYERS - 1 - back], PRECISION
                    ),
                ) + new_slopes
                new_bias_slopes = (bias_slopes[LAYERS - 1 - back] + tl.sum(slope, 0),) + new_bias_slopes
                if back < LAYERS - 1:
                    slope = gates[LAYERS - 1 - back] * backward(
                        slope, weights[LAYERS - 1 - back], WIDTHS[LAYERS - back], HALF[LAYERS - 1 - back], PRECISION
                    )
            slopes = new_slopes
            bias_slopes = new_bias_slopes
        rate = rate_of_net / one_less(time * LOG1)
        unbias = 1 / tl.sqrt(one_less(time * LOG2))
        kl = constant_of_net
        for k in tl.static_range(LAYERS):
            weight, mean, square, part = move_weights(
                values, first, second, decay, STARTS[k], slopes[k], rate, unbias,
                WIDTHS[k + 1], WIDTHS[k], SIZES[k + 1], SIZES[k], BETA1, BETA2, EPS,
            )  # fmt: skip
            bias, bias_mean, bias_square, more = move_biases(
                values, first, second, decay, STARTS[k] + WIDTHS[k] * WIDTHS[k + 1], bias_slopes[k], rate, unbias,
                WIDTHS[k + 1], SIZES[k + 1], BETA1, BETA2, EPS,
            )  # fmt: skip
            kl += part + more
            tl.debug_barrier()  # all threads have read what is now written
            store_weights(
                values, first, second, STARTS[k], weight, mean, square, WIDTHS[k + 1], WIDTHS[k], SIZES[k + 1], SIZES[k]
            )
            store_biases(
                values, first, second, STARTS[k] + WIDTHS[k] * WIDTHS[k + 1], bias, bias_mean, bias_square,
                WIDTHS[k + 1], SIZES[k + 1],
            )  # fmt: skip
        if LEARNED:
            width, width_mean, width_square, _ = move_biases(
                values, first, second, decay, STARTS[LAYERS], width_slopes, rate, unbias,
                WIDTHS[LAYERS], SIZES[LAYERS], BETA1, BETA2, EPS,
            )  # fmt: skip
            tl.debug_barrier()
            store_biases(
                values, first, second, STARTS[LAYERS], width, width_mean, width_square, WIDTHS[LAYERS], SIZES[LAYERS]
            )
        tl.store(losses + step * nets + net, scale * tl.sum(misfits, 0) + kl)
        tl.debug_barrier()  # and all has been written that is read next
        time += 1
