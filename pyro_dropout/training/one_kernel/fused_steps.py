"""Steps of small networks that one kernel takes: their parameters and moments laid out for it, and its launches."""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from pyro_dropout.generative.precision import is_thin, precision_now
from pyro_dropout.training.one_kernel.dropout_network import DropoutNetwork
from pyro_dropout.training.one_kernel.kernel_steps import KernelSteps
from pyro_dropout.training.one_kernel.settings import small_settings
from pyro_dropout.training.one_kernel.small_network import padded, products

_UNROLLED = 2**17  # products of a layer in full float32 that are written out, one after another, in a program
_TILE = 2**13  # numbers of a layer at some points that the threads of a program hold at once
_WARPS = 4


def halves(widths: Sequence[int], device: torch.device) -> tuple[bool, ...]:
    """Return whether the products of each layer are of numbers in bfloat16.

    Example:
        >>> from pyro_dropout.generative.precision import products_in
        >>> with products_in("bf16"):
        ...     halves((4, 20, 30, 1), torch.device("cuda"))
        (False, True, False)
    """
    half = precision_now() == "bf16" and device.type == "cuda"  # Triton's interpreter has no such products
    return tuple(half and not is_thin(*sizes) for sizes in pairwise(widths))


def together(widths: Sequence[int], batch: int, precision: str, half: Sequence[bool] | None = None) -> int:
    """Return how many points a program looks at together.

    Args:
        widths: units of each layer.
        batch: points of a step.
        precision: of products: "ieee" or "tf32".
        half: the layers with products of another precision.

    Example:
        >>> [together(widths, 128, "ieee") for widths in ((13, 50, 1), (32, 64, 1))]
        [128, 64]
    """
    most = _TILE // max(map(padded, widths))
    if precision == "ieee":
        others = [each for k, each in enumerate(pairwise(widths)) if each[1] > 1 and not (half and half[k])]
        most = min([most, *(_UNROLLED // (padded(a) * padded(b)) for a, b in others)])
    return max(16, min(most, padded(batch)))


class FusedSteps(KernelSteps):
    """Parameters, moments and random numbers of one or several small networks, and the kernel that moves them.

    Args:
        network: what the kernel has to know.
        values: the parameters.
        state: their moments.
        t: the number of the next step.
        lr: the learning rate, or one for each network.
        data: returns all inputs and all targets.
        buffers: settings of model and guide.
        batch: points of a step.
        num_data: points in all.
        rows: the rows that each network sees at every step, (networks, batch); None if all of them, or a batch.
        ordered: whether every step has a batch of its own.
    """

    def __init__(
        self,
        network: DropoutNetwork,
        values: list[Tensor],
        state: list[list[Tensor]],
        t: Tensor,
        lr: Tensor,
        data: Callable[[], tuple[Tensor, Tensor]],
        buffers: list[Tensor],
        batch: int,
        num_data: int,
        rows: Tensor | None = None,
        ordered: bool = False,
    ) -> None:
        from pyro_dropout.training.one_kernel.kernel import advance  # needs Triton

        self._kernel: Any = advance
        self._rows = rows
        super().__init__(network, values, state, t, lr, data, buffers, batch, num_data)
        precision, half = products(), halves(network.widths, t.device)
        points = together(network.widths, batch, precision, half)
        self._numbers = _numbers(network, self._whole[0].shape[1], points, precision) | {"HALF": half}
        self.advance(0, self.stream if ordered else None)  # compiles the kernel

    def _read(self, buffers: list[Tensor]) -> tuple[Tensor, ...]:
        """Return decays, limits of the masks, log precisions and constants."""
        return small_settings(self._network, buffers)

    def advance(self, steps: int, order: Tensor | None = None, masks: Tensor | None = None) -> Tensor:
        """Take some steps, and return the losses before each, (steps,) or (steps, networks)."""
        x, y = self._data()
        losses = x.new_empty((steps, self._count))
        rows = self._rows if order is None else order
        strides = (0, self._batch) if order is None else (self._count * self._batch, self._batch)
        pointers = (x, y, self.stream if rows is None else rows.contiguous(), *self._whole, *self._current_settings())
        changing = (self._lr, self.t, self.stream, losses, losses if masks is None else masks.contiguous())
        sizes = (steps, self._batch, self._scale, *strides, int(self._several))
        with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
            self._kernel[(self._count,)](
                *pointers,
                *changing,
                *sizes,
                **self._numbers,
                INDEXED=rows is not None,
                GIVEN=masks is not None,
                num_warps=_WARPS,
                num_stages=1,
            )
        self.t.add_(steps)
        self.stream[1:].add_(steps)
        return losses if self._several else losses[:, 0]


def _numbers(network: DropoutNetwork, total: int, points: int, precision: str) -> dict[str, Any]:
    """Return what the kernel is compiled for."""
    widths = network.widths
    sizes = tuple(padded(width) for width in widths)
    beta1, beta2, eps = network.adam
    starts = tuple(accumulate((b * (a + 1) for a, b in pairwise(widths)), initial=0))
    *firsts, units = accumulate(widths[:-1], initial=0)
    *quads, last = accumulate((size // 4 for size in sizes[:-1]), initial=0)
    return {
        "LAYERS": len(widths) - 1,
        "WIDTHS": widths,
        "SIZES": sizes,
        "STARTS": starts,
        "FIRSTS": (*firsts, *quads),
        "KINDS": network.kinds,
        "TOTAL": total,
        "UNITS": units,
        "QUADS": last,
        "POINTS": points,
        "LEARNED": network.learned,
        "PRECISION": precision,
        "BETA1": beta1,
        "BETA2": beta2,
        "LOG1": math.log(beta1),
        "LOG2": math.log(beta2),
        "EPS": eps,
    }
