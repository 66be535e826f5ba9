"""What is known of a network's parameters: how layers store weights, which are not random by default, which are frozen.

A weight of a module that is not known here is taken to be (out, in, ...), as in torch's Linear.

Hidden by default are normalisation, tables of positions and class tokens. None of them is a weight that multiplies the
units of a data point. A scale that normalises is near one, not zero; and a table that is added or joined to every data
point has no input with the data points first, so that no draw of it could be made for each of them.
"""

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import Tensor, nn

from pyro_dropout.errors import PyroDropoutError

_TRANSPOSED = nn.modules.conv._ConvTransposeNd
_TABLES = (nn.Embedding, nn.EmbeddingBag)
_OUT_IN = (
    nn.modules.conv._ConvNd, nn.Linear, nn.Bilinear, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention
)  # fmt: skip
_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.LocalResponseNorm, nn.RMSNorm)
_POSITIONS = re.compile(r"(^|_)(pos|position|positions|positional|wpe|relative)(_|$)", re.IGNORECASE)


@dataclass(frozen=True)
class Site:
    """One random parameter of a network, by its name in ``net.state_dict()``.

    ``row_dim`` indexes rows (input units), ``fan_in`` products are summed into one output, and ``uses`` modules share
    it. Of a ``lookup`` (an embedding) rows are picked, not summed, so that no width scales the prior. The layout is
    ``assumed`` to be (out, in, ...) if the layer is unknown.
    """

    name: str
    kind: str
    row_dim: int = 0
    fan_in: int = 1
    uses: int = 1
    lookup: bool = False
    assumed: bool = False


def site_of(name: str, layer: nn.Module, own: str, value: Tensor, uses: int) -> Site:
    """Return the site of a parameter of ``layer``, called ``own`` there."""
    if value.dim() < 2 or (isinstance(layer, nn.MultiheadAttention) and own in ("bias_k", "bias_v")):
        return Site(name, "bias", uses=uses)
    if is_conv1d(layer):
        return Site(name, "weight", 0, value.shape[0], uses)
    if isinstance(layer, _TRANSPOSED):  # (in, out / groups, ...); with a stride an output sees a part of the kernel
        seen = math.prod(max(1.0, size / step) for size, step in zip(layer.kernel_size, layer.stride, strict=True))
        return Site(name, "weight", 0, round(value.shape[0] // layer.groups * seen), uses)
    if isinstance(layer, _TABLES):
        return Site(name, "weight", 0, 1, uses, lookup=True)
    fan_in = value.numel() // max(1, value.shape[0])
    return Site(name, "weight", 1, fan_in, uses, assumed=not isinstance(layer, _OUT_IN))


def is_conv1d(layer: nn.Module) -> bool:
    """Whether a layer is the Conv1D of the library transformers: a linear layer with its weight stored as (in, out)."""
    weight, width = getattr(layer, "weight", None), getattr(layer, "nf", None)
    named = any(base.__name__ == "Conv1D" for base in type(layer).__mro__)
    return named and isinstance(weight, Tensor) and weight.dim() == 2 and weight.shape[1] == width


def computes_otherwise(layer: nn.Module) -> bool:
    """Whether a layer has another forward pass than the class of torch's (or the Conv1D) that it is."""
    bases = type(layer).__mro__
    kind = next(base for base in bases if base.__module__.startswith("torch.nn.") or base.__name__ == "Conv1D")
    methods = ("__call__", "forward", "_conv_forward")
    return any(getattr(type(layer), own, None) is not getattr(kind, own, None) or own in vars(layer) for own in methods)


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
    if isinstance(module, _NORMS):
        return True
    if not isinstance(value, Tensor):
        return False
    if value.dim() <= 1 and any(re.search("norm|layerscale", base.__name__, re.I) for base in type(module).__mro__):
        return True
    if isinstance(module, nn.Embedding):
        return _POSITIONS.search(owner) is not None
    if value.dim() < 2 or is_conv1d(module) or isinstance(module, (_TRANSPOSED, *_TABLES, *_OUT_IN)):
        return False
    joined = value.dim() == 3 and value.shape[0] == 1 and last != "weight"
    return joined or _POSITIONS.search(last) is not None


def patterns_of(option: str, given: object) -> tuple[str, ...]:
    """Return one or several patterns of names as a tuple."""
    found = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Sequence) else ()
    if not found or not all(isinstance(each, str) for each in found):
        raise PyroDropoutError(f"{option} must be a pattern of names such as '*.weight', or several; got {given!r}.")
    return found


def matching(option: str, patterns: Sequence[str], names: Collection[str]) -> list[str]:
    """Return the names that match one of some patterns, as in a shell; raise if a pattern matches none."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = ", ".join(get_close_matches(pattern, names, n=3, cutoff=0.0))
            raise PyroDropoutError(
                f"{option} names {pattern!r}, which matches none of the {len(names)} parameters, such as {near}."
            )
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def freeze_all_but(net: nn.Module, only: str | Sequence[str]) -> None:
    """Freeze every parameter whose name matches none of some patterns, and thaw the others."""
    by_name = dict(net.named_parameters(remove_duplicate=False))
    chosen = {name: by_name[name] for name in matching("only", patterns_of("only", only), by_name)}
    for name, value in chosen.items():
        if not (value.is_floating_point() or value.is_complex()):
            raise PyroDropoutError(f"only names {name!r}, which holds whole numbers: it cannot be random.")
    kept = set(map(id, chosen.values()))
    for value in by_name.values():
        value.requires_grad_(id(value) in kept)
