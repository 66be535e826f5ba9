"""Kernels of this package as an engine: they take many steps of a network with dropout at a time, on a GPU."""

from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from pyro_dropout.engines.engine import CHAIN, CannotError, Engine, Loop, Step
from pyro_dropout.generative.model_call import ModelCall
from pyro_dropout.generative.precision import precision_now
from pyro_dropout.generative.standardised import Standardised
from pyro_dropout.training.batches import Batches
from pyro_dropout.training.compile.functional import Buffers, Parameters
from pyro_dropout.training.one_kernel.dropout_network import DropoutNetwork
from pyro_dropout.training.one_kernel.fused_steps import FusedSteps
from pyro_dropout.training.one_kernel.kernel_steps import KernelSteps
from pyro_dropout.training.one_kernel.small_network import small_network
from pyro_dropout.training.optimisers import Update
from pyro_dropout.training.wide_kernels.wide_network import wide_network
from pyro_dropout.training.wide_kernels.wide_steps import WideSteps


class Kernels:
    """Takes the steps of a network with one kernel or, of a wide network, with a few for each layer.

    Args:
        look: returns what the kernels have to know of a training, and whether they are those of wide layers; raises
            ``CannotError`` if it is not one for a kernel.
        data: returns all inputs and all targets, as they are now.
        buffers: settings of model and guide.
        sizes: ``batch``, ``num_data``, and ``rows``, those that each network sees at every step, without batches.
    """

    name = "kernels"

    def __init__(
        self,
        look: Callable[[], tuple[DropoutNetwork, bool]],
        data: Callable[[], tuple[Tensor, Tensor]],
        buffers: list[Tensor],
        **sizes: Any,
    ) -> None:
        self._look, self._data, self._buffers, self._sizes = look, data, buffers, sizes

    def takes(self) -> bool:
        """Whether it takes the training."""
        with suppress(CannotError):
            return bool(self._look())
        return False

    def loop(self, step: Step) -> Loop:
        """Return what takes the steps, on copies of its tensors."""
        network, wide = self._look()
        given = (step.values, step.state, step.t, step.lr, self._data, self._buffers)
        kind = WideSteps if wide else FusedSteps
        return KernelLoop(step, kind(network, *given, **self._sizes, ordered=bool(step.row)))


class KernelLoop(Loop):
    """Steps that kernels take, many at a time."""

    name = Kernels.name

    def __init__(self, step: Step, fused: KernelSteps) -> None:
        super().__init__(step)
        self.fused, self.changed = fused, fused.everything
        self.kept = {"stream": fused.stream}  # the random numbers of the kernel

    def ready(self) -> None:
        """Draw the key of the random numbers."""
        self.fused.stream[0] = torch.randint(2**62, ())

    def at_once(self, steps: int) -> int:
        """Return how many of some steps a launch takes."""
        return min(steps, CHAIN)

    def many(self, steps: int, rows: Tensor | None) -> Tensor:
        """Take steps, each with one of the rows, and return the losses."""
        return self.fused.advance(steps, rows)


def is_possible(device: torch.device) -> bool:
    """Whether this is a GPU for which Triton can compile kernels."""
    return device.type == "cuda" and torch.version.cuda is not None and find_spec("triton") is not None


def kernels_for(
    parts: tuple[object, object, object],
    update: Update,
    call: ModelCall,
    parameters: Parameters,
    batch: int,
    batches: object,
) -> list[Engine]:
    """Return the kernels for the training of one guide; none where they cannot be asked.

    Args:
        parts: model, guide and loss.
        update: the optimiser.
        call: the model's arguments: x, y and the number of data points.
        parameters: what is trained.
        batch: points of a step.
        batches: where mini-batches come from.
    """
    values, args = parameters.values, call.args
    if not values or not is_possible(values[0].device) or len(args) != 3 or call.kwargs:
        return []
    model, guide, loss = parts
    x, y, num_data = args
    plain = isinstance(x, Tensor) and isinstance(y, Tensor) and type(num_data) is int
    if not isinstance(batches, Batches | None) or not plain:
        return []

    def look() -> tuple[DropoutNetwork, bool]:
        training = (model, guide, loss, update, parameters, x, y, batch)
        if precision_now() != "float32":
            with suppress(CannotError):
                return wide_network(*training), True
        return small_network(*training), False

    data = _standard(model, x, y) if isinstance(model, Standardised) else lambda: (x, y)
    return [Kernels(look, data, Buffers(model, guide).values, batch=batch, num_data=num_data)]


def _standard(model: Standardised, x: Tensor, y: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
    """Return what returns standardised data; they are computed again if something has changed."""
    tensors = [x, y, model.x_mean, model.x_std, model.y_mean, model.y_std]
    kept: list[tuple[list[int], tuple[Tensor, Tensor]]] = []

    def data() -> tuple[Tensor, Tensor]:
        seen = [tensor._version for tensor in tensors]
        if not kept or kept[0][0] != seen:
            kept[:] = [(seen, (model.standard_x(x).contiguous(), model.standard_y(y).contiguous()))]
        return kept[0][1]

    return data


def fleet_kernels(
    first: tuple[object, object],
    loss: object,
    update: Update,
    parameters: Parameters,
    data: tuple[Any, Tensor],
    settings: list[Tensor],
    rows: Tensor,
    batch: int,
) -> list[Kernels]:
    """Return the kernel for the training of a fleet; none where it cannot be asked.

    Args:
        first: the first replica.
        loss: the loss.
        update: the optimiser.
        parameters: what is trained in the first replica.
        data: all inputs and all targets.
        settings: the buffers of all replicas, stacked.
        rows: the rows of each replica, (replicas, points).
        batch: points of a step.
    """
    small = CHAIN * len(rows) * batch < 2**31  # the kernel counts in 32 bits
    if not parameters.values or not small or not is_possible(rows.device) or isinstance(first[0], Standardised):
        return []

    def look() -> tuple[DropoutNetwork, bool]:
        return small_network(*first, loss, update, parameters, *data, batch), False

    whole = rows if batch == rows.shape[1] else None
    return [Kernels(look, lambda: data, settings, batch=batch, num_data=rows.shape[1], rows=whole)]
