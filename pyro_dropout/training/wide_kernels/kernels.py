"""Kernels of this package as an engine: they take many steps of a wide network with dropout at a time, on a GPU."""

import functools
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from pyro_dropout.engines.engine import Engine, Loop, Step
from pyro_dropout.generative.model_call import ModelCall
from pyro_dropout.generative.standardised import Standardised
from pyro_dropout.training.batches import Batches
from pyro_dropout.training.compile.functional import Buffers, Parameters
from pyro_dropout.training.optimisers import Update
from pyro_dropout.training.wide_kernels.wide_network import DropoutNetwork, wide_network
from pyro_dropout.training.wide_kernels.wide_steps import WideSteps


class Kernels:
    """Takes the steps of a wide network with dropout, in bfloat16, with a few kernels for each layer.

    Args:
        look: returns what the kernels have to know of a training; raises ``CannotError`` if it is not one for them.
        more: the other arguments of ``WideSteps``.
    """

    name = WideSteps.name

    def __init__(self, look: Callable[[], DropoutNetwork], *more: Any) -> None:
        self._look, self._more = look, more

    def loop(self, step: Step) -> Loop:
        """Return what takes the steps, on copies of its tensors."""
        return WideSteps(step, self._look(), *self._more)


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

    look = functools.partial(wide_network, model, guide, loss, update, parameters, x, y, batch)
    data = _standard(model, x, y) if isinstance(model, Standardised) else lambda: (x, y)
    return [Kernels(look, data, Buffers(model, guide).values, batch, num_data)]


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
