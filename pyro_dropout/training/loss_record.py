"""The losses of a training run, in one tensor that is allocated at the start."""

import torch
from torch import Tensor


class Ledger:
    """Losses by step; all memory is taken at the beginning, so that it does not grow during training.

    Args:
        total: how many steps there will be.

    Example:
        >>> import torch
        >>> from pyro_dropout.training.loss_record import Ledger
        >>> ledger = Ledger(5)
        >>> ledger.enter(torch.tensor([3.0, 2.0]))
        >>> ledger.enter(torch.tensor([1.5]))
        >>> ledger.losses
        tensor([3.0000, 2.0000, 1.5000])
    """

    def __init__(self, total: int) -> None:
        self._total, self._pages = total, torch.empty(0)
        self.steps = 0

    def enter(self, losses: Tensor) -> None:
        """Append the losses of the next steps, (steps,) or (steps, replicas)."""
        if not len(losses):
            return
        if not self.steps:
            # Filled, not only reserved: an operating system counts memory when it is first written to.
            self._pages = losses.new_full((self._total, *losses.shape[1:]), torch.nan)
        self._pages[self.steps : self.steps + len(losses)] = losses
        self.steps += len(losses)

    @property
    def losses(self) -> Tensor:
        """The losses so far."""
        return self._pages[: self.steps]
