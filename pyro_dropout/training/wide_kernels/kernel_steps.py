"""What all steps that kernels take have in common: parameters and moments in one piece, settings, random numbers."""

from collections.abc import Callable

import torch
from torch import Tensor

from pyro_dropout.training.wide_kernels.dropout_network import DropoutNetwork


class KernelSteps:
    """Parameters, moments and random numbers of one or several networks that a kernel moves.

    Args:
        network: what the kernel has to know.
        values: the parameters; with the networks in front where there are several, as in all that follows.
        state: the two moments of each of them.
        t: the number of the next step, from 1.
        lr: the learning rate, or one for each network.
        data: returns all inputs and all targets, as they are now.
        buffers: settings of model and guide.
        batch: points of a step.
        num_data: points in all.

    Attributes:
        values: the parameters, which the kernel changes.
        state: their moments.
        t: the number of the next step.
        stream: the key of the random numbers, and how many steps have drawn some.
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
    ) -> None:
        self._network, self._data, self._buffers = network, data, buffers
        self._batch, self._scale = batch, num_data / batch
        self._several = lr.dim() > 0
        self._count = len(lr) if self._several else 1
        self.t, self._lr = t.clone(), lr
        moments = [[slots[k] for slots in state] for k in range(2)]
        self._whole = [self._laid_out(each) for each in (values, *moments)]
        self.values, *own = [self._views(whole, values) for whole in self._whole]
        self.state = [list(pair) for pair in zip(*own, strict=True)]
        self.stream = torch.stack([torch.randint(2**62, ()), torch.zeros((), dtype=torch.long)]).to(t.device)
        self._seen: list[int] = []
        self._settings: tuple[Tensor, ...] = ()

    def _laid_out(self, values: list[Tensor]) -> Tensor:
        """Return tensors of all networks as one, (networks, numbers), in the order of the layers."""
        ordered = (values[k].detach().reshape(self._count, -1) for k in self._network.places)
        return torch.cat(list(ordered), 1)

    def _views(self, whole: Tensor, like: list[Tensor]) -> list[Tensor]:
        """Return the parts of such a tensor, in the order and the shapes of the parameters."""
        sizes = [like[k].numel() // self._count for k in self._network.places]
        parts = dict(zip(self._network.places, whole.split(sizes, 1), strict=True))
        return [parts[k].view(value.shape) for k, value in enumerate(like)]

    @property
    def everything(self) -> list[Tensor]:
        """All tensors that a step changes but the random numbers: parameters, moments, and the number of the step."""
        return [*self.values, *(slot for slots in self.state for slot in slots), self.t]

    def _current_settings(self) -> tuple[Tensor, ...]:
        """Return decays, limits of the masks, log precisions and constants; anew if a setting has changed."""
        seen = [buffer._version for buffer in self._buffers]
        if seen != self._seen:
            settings = [each if self._several else each.unsqueeze(0) for each in self._buffers]
            self._settings, self._seen = self._read(settings), seen
        return self._settings

    def _read(self, buffers: list[Tensor]) -> tuple[Tensor, ...]:
        """Return the settings that the kernel reads, from those of model and guide, with the networks in front."""
        raise NotImplementedError

    def advance(self, steps: int, order: Tensor | None = None, masks: Tensor | None = None) -> Tensor:
        """Take some steps, and return the losses before each, (steps,) or (steps, networks).

        Args:
            steps: how many.
            order: the rows of each step's batch, (steps, batch) or (steps, networks, batch); None if they stay.
            masks: zeros and ones in place of drawn ones, (steps, networks, batch, units), for tests.
        """
        raise NotImplementedError
