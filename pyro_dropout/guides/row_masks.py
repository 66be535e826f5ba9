"""Which dropout layers drop rows of one weight, so that a guide can drop them; all others stay in the model.

``torch.fx`` finds them: a dropout layer that feeds one weight layer, through operations that keep units apart. Its mask
is on rows if that layer's input has a row for each data point, which a graph alone does not tell: ``x.reshape(-1, 4)``
gives a data point several masks. Where a dropout layer was, its input is copied, as it did: ``h += 1`` may write to it.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from pyro_dropout.engines.torch_internals import tree_leaves
from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.generative.inputs import AnyInputs, call_net, copies
from pyro_dropout.generative.layouts import computes_otherwise
from pyro_dropout.generative.process_state import seeded
from pyro_dropout.generative.trial_run import quietly
from pyro_dropout.guides.other_randomness import runnable, training

# Each convolution, with the dropout that drops its input channels whole.
_CHANNELS = {nn.Conv1d: nn.Dropout1d, nn.Conv2d: nn.Dropout2d, nn.Conv3d: nn.Dropout3d}
_DROPOUTS = (nn.Dropout, *_CHANNELS.values())
_LAYERS = (nn.Linear, *_CHANNELS)
_MAKERS = (*_LAYERS, nn.modules.batchnorm._BatchNorm, nn.RNNBase, nn.Embedding)  # of tensors that nothing else sees
_LEAVES = (*_MAKERS, *_DROPOUTS)
# Dropping a unit before or after these is the same: each output unit sees one input unit, and 0 stays 0.
_UNITWISE = (nn.ReLU, nn.LeakyReLU, nn.Identity)
_UNITWISE_FUNCTIONS = (F.relu, torch.relu, F.leaky_relu)
_UNITWISE_METHODS = ("relu", "relu_", "contiguous")


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, _LEAVES) or super().is_leaf_module(m, module_qualified_name)


class RowMask(NamedTuple):
    """A dropout layer on the rows of a weight layer: their paths, and the probability of dropping."""

    dropout: str
    layer: str
    p: float


class Copy(nn.Module):
    """Stands where a dropout layer was."""

    def forward(self, x: Tensor) -> Tensor:
        """Return a copy, as dropout does."""
        return x.clone()


def on_rows(net: nn.Module, x: AnyInputs | None) -> list[RowMask]:
    """Return the masks that drop rows of one draw of a weight wherever they are used; with data, those that pass."""
    try:
        with quietly(net), training(net):
            graph = _Tracer().trace(net)
    except Exception:
        return []
    modules = dict(net.named_modules())
    uses = Counter(id(weight) for node in graph.nodes for weight in _weights(node, net, modules))
    masks: dict[str, list[RowMask | None]] = {}
    for node in graph.nodes:
        module = modules[str(node.target)] if node.op == "call_module" else None
        if module is not None and _is(module, _DROPOUTS) and module.p > 0:
            masks.setdefault(str(node.target), []).append(_row_mask(node, modules, uses))
    found = [[mask for mask in each if mask is not None] for each in masks.values() if all(each)]
    known = [mask for each in found for mask in each]
    wrong: set[str] = set()

    def look(mask: RowMask, count: int, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if not _one_row_each(module, inputs[0], count):
            wrong.add(mask.dropout)

    # None of them is wrong if the network does not run with x.
    for batch in (runnable(net, x) if known and x is not None else None) or []:
        with ExitStack() as stack, quietly(net), training(net), torch.no_grad(), seeded(0, batch.device):
            for mask in known:
                hook = partial(look, mask, len(batch))
                stack.callback(net.get_submodule(mask.layer).register_forward_pre_hook(hook).remove)
            call_net(net, copies(batch, 1))
    return [mask for mask in known if mask.dropout not in wrong]


class Points:
    """How many data points a network is run on: noted where its inputs come in, and asked for at its dropped layers."""

    count: int | None = None

    def note(self, module: nn.Module, args: object, kwargs: object) -> None:
        """Note the number of data points."""
        sized = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.dim())
        self.count = next((len(leaf) for leaf in sized), None)

    def check(self, mask: RowMask, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Reject an input with several rows or positions for a data point, where torch draws a mask for each."""
        if not _one_row_each(module, inputs[0], self.count):
            raise PyroDropoutError(
                f"the dropout layer {mask.dropout!r} drops units of {mask.layer!r} separately at each row or position"
                f" of an input of shape {tuple(inputs[0].shape)}, but a draw of the weights drops rows of one weight,"
                " once for each data point: the two differ. Write from_dropout(net, example=x), with some inputs, so"
                " that it is read as noise of the network's own."
            )


def _is(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> bool:
    """Whether a module computes what one of these kinds does: a subclass may compute anything else, and a hook too."""
    hooked = module._forward_hooks or module._forward_pre_hooks
    return isinstance(module, kinds) and not computes_otherwise(module) and not hooked


def _row_mask(node: fx.Node, modules: dict[str, nn.Module], uses: Counter[int]) -> RowMask | None:
    """Return what a call of a dropout layer drops, if that is the rows of one weight; otherwise None."""
    layers, dropout = list(_behind(node, modules)), modules[str(node.target)]
    if len(layers) != 1 or layers[0] is None:  # one mask for two layers, and here each draws its own
        return None
    layer = modules[layers[0]]
    weight = layer._parameters.get("weight")  # None: computed from others, so it is not a site
    wanted = next((d for kind, d in _CHANNELS.items() if isinstance(layer, kind)), nn.Dropout)
    # Groups share rows; and torch drops the rows of a weight again at each use, while one draw drops them once.
    if not isinstance(dropout, wanted) or getattr(layer, "groups", 1) > 1 or weight is None or uses[id(weight)] > 1:
        return None
    if dropout.inplace and not _seen_once(node.all_input_nodes[0], modules):
        return None
    return RowMask(str(node.target), layers[0], dropout.p)


def _seen_once(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """Whether nothing but one dropout layer sees a tensor, and what it may be a view of, back to where it was made."""
    while len(node.users) == 1 and node.all_input_nodes:
        if node.op == "call_module" and _is(modules[str(node.target)], _MAKERS):
            return True
        node = node.all_input_nodes[0]
    return len(node.users) == 1 and node.op == "placeholder"


def _behind(node: fx.Node, modules: dict[str, nn.Module]) -> Iterator[str | None]:
    """Yield the weight layers that a dropout node feeds, through operations that keep units apart; None for others."""
    for user in node.users:
        module = modules[str(user.target)] if user.op == "call_module" else None
        if module is not None and _is(module, _LAYERS):
            yield str(user.target)
        elif (
            (module is not None and _is(module, _UNITWISE))
            or (user.op == "call_function" and user.target in _UNITWISE_FUNCTIONS)
            or (user.op == "call_method" and user.target in _UNITWISE_METHODS)
        ):
            yield from _behind(user, modules)
        else:
            yield None


def _weights(node: fx.Node, net: nn.Module, modules: dict[str, nn.Module]) -> list[object]:
    """Return the parameters that a node uses."""
    if node.op == "call_module":
        return list(modules[str(node.target)].parameters())
    if node.op == "get_attr":
        owner, _, name = str(node.target).rpartition(".")
        return [getattr(net.get_submodule(owner), name)]
    return []


def _one_row_each(layer: nn.Module, given: Tensor, count: int | None) -> bool:
    """Whether the input of a layer is a row for each data point: units, or channels of a map."""
    own = 2 if isinstance(layer, nn.Linear) else 2 + len(layer.kernel_size)  # type: ignore[arg-type]
    return given.dim() == own and count in (None, len(given))
