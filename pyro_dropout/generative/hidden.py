"""Which parameters of a network are not random by default: those of normalisation, tables of positions, class tokens.

None of them is a weight that multiplies the units of a data point. A scale that normalises is near one, not zero; and a
table that is added or joined to every data point has no input with the data points first, so that no draw of it could
be made for each of them.
"""

import re

from torch import Tensor, nn

from pyro_dropout.generative.layouts import is_known

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
        >>> from pyro_dropout.generative.hidden import hidden_by_default
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
