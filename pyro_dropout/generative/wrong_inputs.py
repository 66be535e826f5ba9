"""What is wrong with the inputs of a network, in place of the error that torch raises for them."""

import inspect
import re

import torch
from torch import Tensor, nn

from pyro_dropout.generative.inputs import AnyInputs, Inputs
from pyro_dropout.mathematics.errors import PyroDropoutError, RangeError, ShapeError
from pyro_dropout.protocols import Weights


def shown(x: AnyInputs) -> object:
    """Return the shape of inputs, for a message."""
    return tuple(x.shape) if isinstance(x, Tensor) else x


def _not_taken(x: Inputs, net: nn.Module) -> PyroDropoutError | None:
    """Return an error for arguments that a network does not take, or lacks; None if it takes them."""
    taken = inspect.signature(net.forward)
    try:
        taken.bind(*x.args, **x.kwargs)
    except TypeError as wrong:
        given = f"the keys {', '.join(map(repr, x.kwargs))}" if x.kwargs else f"{len(x.args)} tensors"
        return RangeError(
            f"x must hold the arguments of {type(net).__name__}.forward{taken}; got {given} ({wrong}). Leave out what"
            " the network does not take, in a DataLoader with collate_fn."
        )
    return None


def wrong_with(x: AnyInputs, weights: Weights, net: nn.Module, cause: Exception) -> PyroDropoutError | None:
    """Return an error that says what is wrong with x; None if x is not at fault, or it is not known which part is."""
    if "more than 1 value per channel" in str(cause):
        norms = [path for path, module in net.named_modules() if isinstance(module, nn.modules.batchnorm._NormBase)]
        return ShapeError(
            f"a batch of {len(x)} data point is too small for the statistics of {', '.join(map(repr, norms))} in"
            " training mode. Write DataLoader(..., drop_last=True) or another batch size, or use running statistics:"
            ' BayesianNet(net, frozen_statistics="all").'
        )
    if not isinstance(x, Tensor):
        return _not_taken(x, net)
    if x.layout is not torch.strided:
        return ShapeError(f"x must be a dense tensor, (N, ...); got one of layout {x.layout}. Write x.to_dense().")
    ours = [*weights.values(), *net.parameters()][0].dtype
    numbers = (
        x.is_floating_point()
        or x.is_complex()
        or not any(isinstance(m, nn.Embedding | nn.EmbeddingBag) for m in net.modules())
    )
    if numbers and x.dtype != ours and re.search(r"dtype|expected scalar type|type .* should be the same", str(cause)):
        way = "x.real or x.abs()" if x.is_complex() else f"x.to({ours})"
        way += " or model.to(x)" if x.is_floating_point() else ""
        return RangeError(f"x must be of the network's type, {ours}; got {x.dtype}. Write {way}.")
    if re.search(r"shapes cannot be multiplied|to have \d+ channels|input\.size\(-1\)", str(cause)):
        first = str(cause).splitlines()[0]
        return ShapeError(f"x must have the shape that net takes, (N, ...); got {tuple(x.shape)}: {first}.")
    return None
