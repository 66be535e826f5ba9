"""The launches of a wide network's steps: which kernels run, in which order, and on what."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from pyro_dropout.engines.engine import CHAIN
from pyro_dropout.training.wide_kernels.layer import Layer, rounded_up
from pyro_dropout.training.wide_kernels.tiles import AHEAD, BACK, LAST, MOVE, TURN, TURN_THIN, Tiles, padded
from pyro_dropout.training.wide_kernels.wide_network import DropoutNetwork

_FEW, _MANY = 32, 128  # columns and points of sums in float32
_FULL = "ieee"  # how Triton multiplies float32, where that is asked for instead of bfloat16


class Launches:
    """What launches the kernels of some steps.

    Args:
        network: what the kernels have to know.
        layers: its layers.
        whole: parameters and their two moments, each in one piece.
        lr: the learning rate.
        t: the number of the first step.
        stream: the key of the random numbers, and how many steps have drawn some.
        order: the rows of each step's batch, (``CHAIN``, batch); None for all rows.
        batch: points of a step.
        scale: how many times as many there are in all.

    Attributes:
        losses: the parts of each step's loss, (``CHAIN``, parts).
    """

    def __init__(
        self,
        network: DropoutNetwork,
        layers: list[Layer],
        whole: list[Tensor],
        lr: Tensor,
        t: Tensor,
        stream: Tensor,
        order: Tensor | None,
        batch: int,
        scale: float,
    ) -> None:
        from pyro_dropout.training.wide_kernels import ahead, back, head  # need Triton

        self._take, self._thin, self._ahead = ahead.take_inputs, ahead.thin_ahead, ahead.ahead
        self._turn, self._back = head.turn_round, back.back
        self._network, self._layers, self._whole = network, layers, whole
        self._lr, self._t, self._stream, self._order = lr, t, stream, order
        self._batch, self._scale = batch, scale
        beta1, beta2, eps = network.adam
        self._adam = {"BETA1": beta1, "BETA2": beta2, "LOG1": math.log(beta1), "LOG2": math.log(beta2), "EPS": eps}
        parts = [_tiles(batch, self._turn_tiles.rows), *(sum(self._programs(layer)) for layer in layers)]
        *self._parts, count = accumulate(parts, initial=0)
        self.losses = torch.zeros((CHAIN, rounded_up(count, 4)), device=t.device)
        self._settings: tuple[Tensor, ...] = ()
        self._decay_sizes: Sequence[int] = ()

    def launch(
        self,
        steps: int,
        data: tuple[Tensor, Tensor],
        settings: tuple[Tensor, ...],
        decay_sizes: Sequence[int],
        masks: Tensor | None = None,
    ) -> None:
        """Launch the kernels of some steps.

        Args:
            steps: how many, at most ``CHAIN``.
            data: all inputs and all targets.
            settings: limits of the masks, log precisions, and decays of weights and biases, layer by layer.
            decay_sizes: how many decays there are for the weights of each layer, and for its biases.
            masks: zeros and ones in place of drawn ones, (steps, 1, batch, units), for tests.
        """
        self._settings, self._decay_sizes = settings, decay_sizes
        x, y = data
        self._launch_inputs(steps, x, masks)
        for step in range(steps):
            self._go_ahead(step, masks)
            self._turn_round(step, y)
            self._go_back(step)

    @property
    def _units(self) -> int:
        return sum(self._network.widths[:-1])

    @property
    def _quads(self) -> int:
        return sum(rounded_up(width, 4) // 4 for width in self._network.widths[:-1])

    def _launch_inputs(self, steps: int, x: Tensor, masks: Tensor | None) -> None:
        """Launch the masked inputs of all steps."""
        layer = self._layers[0]
        limits = self._settings[0]
        columns = min(64, padded(layer.inputs))
        rows = self._order if self._order is not None else self._stream
        grid = (steps, _tiles(self._batch, 32), _tiles(layer.inputs, columns))
        self._take[grid](
            x, rows, layer.a, limits if masks is None else masks, limits, self._stream,
            self._batch, self._units, self._quads,
            WIDTH=layer.inputs, STRIDE=layer.stride, LENGTH=layer.a.shape[1], INDEXED=self._order is not None,
            GIVEN=masks is not None, POINTS=32, COLUMNS=columns, num_warps=4,
        )  # fmt: skip

    def _go_ahead(self, step: int, masks: Tensor | None) -> None:
        """Launch the layers before the last one."""
        limits = self._settings[0]
        for k, (layer, above) in enumerate(zip(self._layers, self._layers[1:], strict=False)):
            a = layer.a[step] if k == 0 else layer.a
            bias = layer.start + layer.inputs * layer.outputs
            tiles = _tiles(self._batch, AHEAD.rows)
            draws = (limits if masks is None else masks, limits, self._stream)
            places = (step, self._batch, above.first, self._units, above.quad, self._quads)
            how = {
                "WIDTH": layer.outputs, "STRIDE": above.stride, "KIND": self._network.kinds[k],
                "GIVEN": masks is not None, "TILES": tiles, "POINTS": AHEAD.rows, "COLUMNS": AHEAD.columns,
                "num_warps": AHEAD.warps,
            }  # fmt: skip
            grid = (tiles * _tiles(layer.outputs, AHEAD.columns),)
            if layer.thin:
                self._thin[grid](
                    a, self._whole[0], above.a, above.bends, *draws, layer.start, *places, INPUTS=layer.inputs, **how
                )
                continue
            self._ahead[grid](
                a, layer.half, self._whole[0], above.a, above.bends, *draws, bias, *places,
                INPUTS=layer.inputs, ACROSS=layer.stride, PRECISION=_FULL, DEPTH=AHEAD.depth,
                STAGES=AHEAD.stages, **how,
            )  # fmt: skip

    @property
    def _turn_tiles(self) -> Tiles:
        return TURN_THIN if self._layers[-1].thin else TURN

    def _turn_round(self, step: int, y: Tensor) -> None:
        """Launch the last layer and the loss."""
        below, layer = self._layers[-2:]
        tiles = self._turn_tiles
        rows = self._order if self._order is not None else self._stream
        self._turn[(_tiles(self._batch, tiles.rows),)](
            layer.a, layer.bends, layer.half, self._whole[0], y, rows, self._settings[1], layer.slopes,
            below.slopes, self.losses[step], layer.start, step, self._batch, self._scale,
            INPUTS=layer.inputs, ACROSS=layer.stride, OUT=layer.outputs, ROWS=layer.out_stride, THIN=layer.thin,
            KIND=self._network.kinds[-1], CLASSES=self._network.classes, INDEXED=self._order is not None,
            PRECISION=_FULL, POINTS=tiles.rows,
            DEPTH=math.gcd(tiles.depth, layer.stride), STAGES=tiles.stages, num_warps=tiles.warps,
        )  # fmt: skip

    def _go_back(self, step: int) -> None:
        """Launch the way back: gradients in the inputs of each layer, and its move once they are there."""
        last = len(self._layers) - 1
        for k in range(last - 1, 0, -1):
            self._launch_back(step, k, [k + 1])
        rest = [1, 0]
        if self._layers[0].thin == self._layers[1].thin:
            self._launch_back(step, None, [1])
            rest = [0]
        self._launch_back(step, None, rest)

    def _programs(self, layer: Layer) -> tuple[int, int]:
        """Return how many programs move the biases of a layer, and how many its weights."""
        biases = _tiles(layer.outputs, _FEW)
        if layer.thin:
            return biases, min(layer.inputs, layer.outputs) * _tiles(max(layer.inputs, layer.outputs), _FEW)
        tiles = self._move_tiles(layer)
        return biases, _tiles(layer.outputs, tiles.rows) * _tiles(layer.inputs, tiles.columns)

    def _move_tiles(self, layer: Layer) -> Tiles:
        if layer is not self._layers[-1]:
            return MOVE
        return replace(LAST, rows=min(MOVE.rows, padded(layer.outputs)))

    def _launch_back(self, step: int, k: int | None, moved: list[int]) -> None:
        """Launch programs that go back through layer ``k``, and that move at most one wide and one thin layer."""
        programs = 0
        pointers: list[Any] = []
        numbers: dict[str, Any] = {}
        wide = next((each for each in moved if not self._layers[each].thin), None)
        narrow = next((each for each in moved if self._layers[each].thin), None)
        for found in (self._backward(k), self._wide_move(step, wide), self._thin_move(step, narrow)):
            programs += found[0]
            pointers += found[1]
            numbers |= found[2]
        decay = self._settings[2]
        self._back[(programs,)](
            *pointers, *self._whole, decay, self._lr, self._t, self.losses[step], step, self._batch,
            **numbers, FEW=_FEW, MANY=_MANY, PRECISION=_FULL, **self._adam, num_warps=MOVE.warps,
        )  # fmt: skip

    def _backward(self, k: int | None) -> tuple[int, list[Any], dict[str, Any]]:
        layer, below = self._layers[k or 1], self._layers[(k or 1) - 1]
        tiles = _tiles(self._batch, BACK.rows)
        programs = 0 if k is None else tiles * _tiles(layer.inputs, BACK.columns)
        numbers = {
            "BACK": programs, "BACK_OUT": layer.outputs, "BACK_OUT_STRIDE": layer.out_stride,
            "BACK_IN_STRIDE": layer.stride, "BACK_KIND": self._network.kinds[(k or 1) - 1], "BACK_TILES": tiles,
            "BACK_POINTS": BACK.rows, "BACK_COLUMNS": BACK.columns, "BACK_DEPTH": BACK.depth,
            "BACK_STAGES": BACK.stages,
        }  # fmt: skip
        return programs, [layer.slopes, layer.half, layer.a, layer.bends, below.slopes], numbers

    def _decays(self, k: int) -> tuple[int, int, bool]:
        """Return where the decays of weights and of biases are, and whether those of weights differ by output."""
        sizes = self._decay_sizes
        starts = list(accumulate(sizes, initial=0))
        return starts[2 * k], starts[2 * k + 1], sizes[2 * k] > self._layers[k].inputs

    def _wide_move(self, step: int, k: int | None) -> tuple[int, list[Any], dict[str, Any]]:
        layer = self._layers[k or 0]
        biases, weights = (0, 0) if k is None else self._programs(layer)
        decay, bias_decay, by_output = self._decays(k or 0)
        a, tiles = layer.a if k else layer.a[step], self._move_tiles(layer)
        numbers = {
            "BIASES": biases, "WIDE": weights, "WIDE_OUT": layer.outputs, "WIDE_OUT_STRIDE": layer.out_stride,
            "WIDE_IN": layer.inputs, "WIDE_IN_STRIDE": layer.stride, "BY_OUTPUT": by_output,
            "WIDE_TILES": _tiles(layer.inputs, tiles.columns), "WIDE_ROWS": tiles.rows, "WIDE_COLUMNS": tiles.columns,
            "WIDE_DEPTH": tiles.depth, "WIDE_STAGES": tiles.stages,
        }  # fmt: skip
        place = self._parts[1 + (k or 0)]
        return biases + weights, [layer.slopes, a, layer.half, layer.start, decay, bias_decay, place], numbers

    def _thin_move(self, step: int, k: int | None) -> tuple[int, list[Any], dict[str, Any]]:
        layer = self._layers[k or 0]
        biases, weights = (0, 0) if k is None else self._programs(layer)
        decay, bias_decay, by_output = self._decays(k or 0)
        a = layer.a if k else layer.a[step]
        last = layer is self._layers[-1]
        inputs = (layer.inputs, layer.stride, 1, 1)
        outputs = (layer.outputs, layer.out_stride, layer.inputs, layer.inputs if by_output else 0)
        long, thin = (inputs, outputs) if last else (outputs, inputs)
        numbers = {
            "THIN_BIASES": biases,
            "THINS": weights,
            "THIN_OUT": layer.outputs,
            "THIN_OUT_STRIDE": layer.out_stride,
        }
        numbers |= dict(zip(("LONG", "LONG_STRIDE", "LONG_PLACE", "LONG_DECAY"), long, strict=True))
        numbers |= dict(zip(("THIN", "THIN_STRIDE", "THIN_PLACE", "THIN_DECAY"), thin, strict=True))
        tensors = [a, layer.slopes] if last else [layer.slopes, a]
        place = self._parts[1 + (k or 0)]
        pointers = [*tensors, layer.slopes, layer.start, decay, bias_decay, place]
        return biases + weights, pointers, numbers


def _tiles(size: int, of: int) -> int:
    return -(-size // of)
