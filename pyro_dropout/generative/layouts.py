"""What is known of a network's parameters: how layers store weights, which are not random by default, which are frozen.

A layout says which dimension indexes rows (input units), and how many products make an output; a new layer is a line in
``_LAYOUTS``. A weight of any other module is taken to be (out, in, ...), as in torch's Linear.

Hidden by default are normalisation, tables of positions and class tokens. None of them is a weight that multiplies the
units of a data point. A scale that normalises is near one, not zero; and a table that is added or joined to every data
point has no input with the data points first, so that no draw of it could be made for each of them.
"""

import re
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import Tensor, nn

from pyro_dropout.errors import PyroDropoutError


class Layout(NamedTuple):
    """The layout of one parameter.

    Attributes:
        kind: "weight" or "bias".
        row_dim: the dimension that indexes rows.
        fan_in: how many products are summed into one output.
        lookup: whether rows are picked, not summed.
        assumed: whether the layer is unknown, so that the layout is a guess.
    """

    kind: str
    row_dim: int = 0
    fan_in: int = 1
    lookup: bool = False
    assumed: bool = False


def _out_in(layer: nn.Module, name: str, value: Tensor) -> Layout:
    """(out, in, ...): Linear, convolutions, recurrent layers, Bilinear (out, in₁, in₂)."""
    return Layout("weight", 1, value.numel() // max(1, value.shape[0]))


def _in_out(layer: nn.Module, name: str, value: Tensor) -> Layout:
    """(in, out): transformers' Conv1D."""
    return Layout("weight", 0, value.shape[0])


def _transposed(layer: nn.Module, name: str, value: Tensor) -> Layout:
    """(in, out / groups, ...): transposed convolutions."""
    assert isinstance(layer, nn.modules.conv._ConvTransposeNd)
    return Layout("weight", 0, value.numel() // max(1, value.shape[1] * layer.groups))


def _words(layer: nn.Module, name: str, value: Tensor) -> Layout:
    """(words, features): embeddings."""
    return Layout("weight", 0, 1, lookup=True)


def _attention(layer: nn.Module, name: str, value: Tensor) -> Layout:
    """(3 out, in) for queries, keys and values, or (out, in) for each; biases of keys and values are (1, 1, out)."""
    return Layout("bias") if name in ("bias_k", "bias_v") else _out_in(layer, name, value)


_LAYOUTS: dict[type[nn.Module], Callable[[nn.Module, str, Tensor], Layout]] = {
    nn.modules.conv._ConvTransposeNd: _transposed,
    nn.modules.conv._ConvNd: _out_in,
    nn.Linear: _out_in,
    nn.Bilinear: _out_in,
    nn.Embedding: _words,
    nn.EmbeddingBag: _words,
    nn.RNNBase: _out_in,
    nn.RNNCellBase: _out_in,
    nn.MultiheadAttention: _attention,
}


def layout_of(layer: nn.Module, name: str, value: Tensor) -> Layout:
    """Return the layout of a parameter of ``layer``, called ``name`` there."""
    if value.dim() < 2:
        return Layout("bias")
    if is_conv1d(layer):
        return _in_out(layer, name, value)
    for kind, read in _LAYOUTS.items():
        if isinstance(layer, kind):
            return read(layer, name, value)
    return _out_in(layer, name, value)._replace(assumed=True)


def is_known(layer: nn.Module) -> bool:
    """Whether the layout of a layer's weights is known."""
    return is_conv1d(layer) or isinstance(layer, tuple(_LAYOUTS))


def is_conv1d(layer: nn.Module) -> bool:
    """Whether a layer is the Conv1D of the library transformers: a linear layer with its weight stored as (in, out)."""
    weight, width = getattr(layer, "weight", None), getattr(layer, "nf", None)
    named = any(base.__name__ == "Conv1D" for base in type(layer).__mro__)
    return named and isinstance(weight, Tensor) and weight.dim() == 2 and weight.shape[1] == width


_POSITIONS = re.compile(r"(^|_)(pos|position|positions|positional|wpe|relative)(_|$)", re.IGNORECASE)


def hidden_by_default(name: str, module: nn.Module) -> bool:
    """Whether a parameter stays ordinary by default: of normalisation, a table of positions, or a token for all points.

    The rule, for a parameter called ``name`` and the module that has it:

    - normalisation: a class of torch's, or one with "Norm" or "LayerScale" in its name or that of a base, and a
      parameter of at most one dimension;
    - a table of positions: the weight of an embedding, or a parameter of a module that is no layer of torch's, with
      pos, position(s), positional, relative or wpe as a word of its own name, as in ``position_embeddings.weight``;
    - a token or a table for all data points: a parameter of shape (1, n, d), not called weight, of a module that is no
      layer of torch's, as in ``cls_token``.

    Example:
        >>> from torch import nn
        >>> from pyro_dropout.generative.layouts import hidden_by_default
        >>> table, layer = nn.Embedding(9, 4), nn.Linear(4, 4)
        >>> [hidden_by_default("wpe.weight", table), hidden_by_default("wte.weight", table)]
        [True, False]
        >>> [hidden_by_default("position_head.weight", layer), hidden_by_default("norm.bias", nn.LayerNorm(4))]
        [False, True]
    """
    owner, last = ["", *name.split(".")][-2:]
    value = getattr(module, last, None)
    if _is_torchs_norm(module):
        return True
    if not isinstance(value, Tensor):
        return False
    if value.dim() <= 1 and any(re.search("norm|layerscale", base.__name__, re.I) for base in type(module).__mro__):
        return True
    if isinstance(module, nn.Embedding):
        return _POSITIONS.search(owner) is not None
    if is_known(module) or value.dim() < 2:
        return False
    joined = value.dim() == 3 and value.shape[0] == 1 and last != "weight"
    return joined or _POSITIONS.search(last) is not None


def _is_torchs_norm(module: nn.Module) -> bool:
    kinds = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.LocalResponseNorm)
    return isinstance(module, kinds + ((nn.RMSNorm,) if hasattr(nn, "RMSNorm") else ()))


def freeze_all_but(net: nn.Module, only: str | Sequence[str]) -> None:
    """Freeze every parameter whose name matches none of some patterns, and thaw the others.

    Example:
        >>> import torch
        >>> from pyro_dropout.generative.layouts import freeze_all_but
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
        >>> freeze_all_but(net, "1.*")
        >>> [name for name, parameter in net.named_parameters() if parameter.requires_grad]
        ['1.weight', '1.bias']
    """
    patterns = [only] if isinstance(only, str) else list(only) if isinstance(only, Sequence) else []
    if not patterns or not all(isinstance(each, str) for each in patterns):
        raise PyroDropoutError(f"only must be a pattern of names such as 'classifier.*', or several; got {only!r}.")
    by_name = dict(net.named_parameters(remove_duplicate=False))
    chosen: set[int] = set()
    for pattern in patterns:
        found = [id(parameter) for name, parameter in by_name.items() if fnmatchcase(name, pattern)]
        if not found:
            near = get_close_matches(pattern, by_name, n=3, cutoff=0.0)
            raise PyroDropoutError(
                f"only names {pattern!r}, which matches no parameter of {type(net).__name__}; there are"
                f" {len(by_name)}, such as {', '.join(near) or 'none'}."
            )
        chosen.update(found)
    for name, parameter in by_name.items():
        if id(parameter) in chosen and not (parameter.is_floating_point() or parameter.is_complex()):
            raise PyroDropoutError(f"only names {name!r}, which holds whole numbers: it cannot be random.")
        parameter.requires_grad_(id(parameter) in chosen)
