"""Inputs and targets with their names, for a comparison or a fit."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_dropout.tables.encoding import Encoding


@dataclass(frozen=True)
class Dataset:
    """Inputs and targets for training and for testing, in their own units.

    Attributes:
        name: a title.
        train: (x, y), inputs (N, Q) and targets (N, D), or class indices (N,).
        test: the same, held back.
        x_name: the inputs in words, with their unit.
        y_name: the targets in words, with their unit.
        note: where it comes from, and what is held back.
        encoding: of the columns of its table, if it comes from one.

    Example:
        >>> import torch
        >>> from pyro_dropout.tables.dataset import Dataset
        >>> Dataset("line", (torch.zeros(2, 1), torch.ones(2, 1)), (torch.ones(1, 1), torch.ones(1, 1))).classes
        ()
    """

    name: str
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    x_name: str = "x"
    y_name: str = "y"
    note: str = ""
    encoding: Encoding | None = None

    @property
    def rows(self) -> tuple[Tensor, Tensor]:
        """All rows: those for training, and then those held back."""
        return torch.cat([self.train[0], self.test[0]]), torch.cat([self.train[1], self.test[1]])

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes; () for regression."""
        return () if self.encoding is None else self.encoding.classes
