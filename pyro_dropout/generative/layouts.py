"""How layers store their weights: which dimension indexes rows (input units), and how many products make an output.

A new layer is a line in ``_LAYOUTS``. A weight of any other module is taken to be (out, in, ...), as in torch's Linear.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn


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
