"""The standard error of a mean over seeds, points or chains."""

from torch import Tensor

from pyro_dropout.mathematics.errors import ShapeError


def standard_error(values: Tensor, dim: int = 0) -> Tensor:
    """Return the standard error of the mean of independent values: their standard deviation over √n.

    Args:
        values: one for each seed, point or chain along ``dim``; at least two.
        dim: the dimension to average over.

    Returns:
        The standard error, without that dimension.

    Example:
        >>> import torch
        >>> from experiments.standard_error import standard_error
        >>> standard_error(torch.tensor([1.0, 2.0, 3.0, 2.0]))  # √(2/3) / √4
        tensor(0.4082)
    """
    if values.dim() == 0 or values.shape[dim] < 2:
        raise ShapeError(f"values must hold two numbers or more along dim {dim}; got shape {tuple(values.shape)}.")
    found: Tensor = values.std(dim) / values.shape[dim] ** 0.5
    return found
