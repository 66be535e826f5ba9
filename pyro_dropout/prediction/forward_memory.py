"""How much memory a forward pass needs for one more data point, by running it on one point and on two."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from pyro_dropout.engines.torch_internals import TorchDispatchMode, tree_leaves
from pyro_dropout.generative.inputs import AnyInputs
from pyro_dropout.generative.jacobians import runs_by_row
from pyro_dropout.generative.networks import BayesianNet
from pyro_dropout.generative.standardised import Standardised


class _Sizes(TorchDispatchMode):
    """Records how many bytes each operation returns."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.each: list[int] = []

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        # A view that repeats its rows has no memory for them.
        self.each.append(sum(min(leaf.nbytes, leaf.untyped_storage().nbytes()) for leaf in tensors))
        return result


def has_small_rows(model: object, x: AnyInputs, most: int) -> bool:
    """Whether it is plain without a run that no row of a layer's output has more than ``most`` bytes.

    Example:
        >>> import torch, pyro_dropout as pd
        >>> has_small_rows(pd.BayesianNet(torch.nn.Linear(3, 5)), torch.zeros(1, 3), 100)
        True
    """
    net = model.model if isinstance(model, Standardised) else model
    if not isinstance(net, BayesianNet) or not isinstance(x, Tensor) or x.dim() != 2 or not runs_by_row(net.net):
        return False
    widths = [module.out_features for module in net.net.modules() if isinstance(module, nn.Linear)]
    return max([x.shape[1], *widths]) * x.element_size() <= most


def bytes_per_row(run: Callable[[int], object]) -> int:
    """Return by how many bytes the largest result of an operation grows with a row; ``run`` takes the number of rows.

    What has the same size in both runs, such as the weights, does not count.

    Example:
        >>> import torch
        >>> weight = torch.zeros(1000, 3)
        >>> bytes_per_row(lambda rows: (torch.zeros(rows, 3) @ weight.abs().T).sum(1))
        4000
    """
    sizes: list[list[int]] = []
    for rows in (1, 2):
        with _Sizes() as seen:
            run(rows)
        sizes.append(seen.each)
    if len(sizes[0]) != len(sizes[1]):  # it does other things with two rows
        return max(sizes[1]) // 2
    return max((two - one for one, two in zip(*sizes, strict=True)), default=0)
