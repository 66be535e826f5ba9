"""Converts a network with dropout layers as the paper reads it: a model without dropout, and a guide that drops."""

import copy
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from pyro_dropout.generative.inputs import AnyInputs, call_net, inputs_of
from pyro_dropout.generative.likelihoods import Gaussian, Likelihood
from pyro_dropout.generative.networks import BayesianNet
from pyro_dropout.generative.outputs import Output
from pyro_dropout.generative.priors import BySite, Prior
from pyro_dropout.generative.trial_run import quietly
from pyro_dropout.guides.dropout import AutoDropout
from pyro_dropout.guides.other_randomness import find_noise, holds_dropout, training
from pyro_dropout.mathematics.checks import describe
from pyro_dropout.mathematics.errors import PyroDropoutError

# Each convolution, with the dropout that drops its input channels whole.
_CHANNELS = {nn.Conv1d: nn.Dropout1d, nn.Conv2d: nn.Dropout2d, nn.Conv3d: nn.Dropout3d}
_DROPOUTS = (nn.Dropout, *_CHANNELS.values())
_LEAVES = (nn.Linear, *_CHANNELS, *_DROPOUTS, nn.modules.batchnorm._BatchNorm, nn.RNNBase, nn.Embedding)
# Dropping a unit before or after these is the same: each output unit sees one input unit, and 0 stays 0.
_UNITWISE = (nn.ReLU, nn.LeakyReLU, nn.Identity)
_UNITWISE_FUNCTIONS = (F.relu, torch.relu, F.leaky_relu)
_UNITWISE_METHODS = ("relu", "relu_", "contiguous")


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, _LEAVES) or super().is_leaf_module(m, module_qualified_name)


def from_dropout(
    net: nn.Module,
    tau: float | Tensor = 1.0,
    length_scale: BySite = 1.0,
    *,
    likelihood: Likelihood | None = None,
    prior: Prior | None = None,
    output: Output = None,
    whole_batch: bool = False,
    example: object = None,
) -> tuple[BayesianNet, AutoDropout]:
    """Turn a network with dropout, trained or not, into the model and the posterior that it represents.

    Predictions of the pair are those of stochastic forward passes through ``net``. An ``nn.Dropout`` layer whose mask
    is on the rows of one weight moves into the guide: the guide drops these rows, and the model has no such layer.
    torch multiplies what it keeps by 1/keep; here that factor is folded into the weights. All other dropout, stochastic
    depth and noise stays in the model, which draws it anew for every data point at every pass, in evaluation mode too.
    All other weights are points. ``repr(model)`` lists both kinds. The network is copied. Frozen parameters
    (``requires_grad=False``) stay frozen, those that are dropped too.

    Args:
        net: the network. Masks on rows are found if ``torch.fx`` can trace it; otherwise all dropout stays in the
            model.
        tau: observation precision, for a Gaussian likelihood.
        length_scale: l of the prior N(0, l⁻²) on every weight layer and bias.
        likelihood: another likelihood, such as ``Categorical()``; ``tau`` is then not used.
        prior: another prior; ``length_scale`` is then not used.
        output: which part of what the network returns is its outputs, as in ``BayesianNet``.
        whole_batch: whether the network needs all its points at once, as in ``BayesianNet``.
        example: some inputs, (N, ...), to run the network with now and not with the first data. Needed for networks on
            sequences: a mask for each position is not one on the rows of a weight, and shapes tell the two apart.

    Returns:
        The model and the guide.

    Raises:
        PyroDropoutError: the network draws random numbers that cannot be kept as they are (one draw for a whole batch,
            Python's generator), which may be noticed with the first data. The message names the layer.

    Example:
        >>> import torch, pyro_dropout as pd
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
        >>> model, guide = pd.from_dropout(net, tau=10.0)
        >>> guide.posterior("3.weight").keep[0].item(), bool(torch.allclose(guide.mean()["3.weight"], net[3].weight))
        (0.800000011920929, True)
    """
    if not isinstance(net, nn.Module):
        raise PyroDropoutError(f"net must be a torch nn.Module with dropout; got {describe(net)}.")
    for path, module in net.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p >= 1:
            raise PyroDropoutError(
                f"{type(module).__name__} {path!r} drops everything (p={module.p}), so nothing before it is used. Use a"
                " smaller p, or a network without it."
            )
    x = None if example is None else inputs_of(example, "example", whole_batch)
    drops = _row_masks(net, x)
    clean = copy.deepcopy(net)
    keep: dict[str, float] = {}
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    for drop in drops:
        keep[names[id(net.get_submodule(drop.layer).weight)]] = 1 - drop.p
        _replace(clean, clean.get_submodule(drop.dropout))
        if isinstance(net.get_submodule(drop.layer), nn.Linear):
            clean.get_submodule(drop.layer).register_forward_pre_hook(partial(_check_positions, drop))
    if prior is None:
        prior = Prior(length_scale, bias_length_scale=length_scale, width_scaled=False)
    fixed = {name: value for name, value in clean.named_parameters() if name in keep and not value.requires_grad}
    for value in fixed.values():
        value.requires_grad_(True)  # it is dropped, so it is random; what it is when kept stays frozen, in the guide
    likelihood = Gaussian(tau) if likelihood is None else likelihood
    model = BayesianNet(clean, prior, likelihood, output=output, whole_batch=whole_batch)
    noise = [path for path, module in clean.named_modules() if holds_dropout(module)]
    model.keep_noise(noise, list(dict.fromkeys(drop.dropout for drop in drops)), find_noise)
    if x is not None:
        model.look_at(x)
    for site in keep:
        if site not in model.sites:
            raise PyroDropoutError(f"prior hides {site!r}, whose rows the network drops; it must be random.")
    guide = AutoDropout(model, keep=lambda site: keep.get(site, 1.0), scale=0.0, bias="map")
    for name, value in fixed.items():
        value.requires_grad_(False)
        guide._state(guide._sites[name]).requires_grad_(False)
    return model, guide


class _Drop(NamedTuple):
    """A dropout layer on the rows of a weight layer: their paths, and the probability of dropping a row."""

    dropout: str
    layer: str
    p: float


def _replace(net: nn.Module, module: nn.Module) -> None:
    """Put nn.Identity in all places of a module."""
    for path, found in list(net.named_modules(remove_duplicate=False)):
        if found is module:
            parent, _, name = path.rpartition(".")
            setattr(net.get_submodule(parent), name, nn.Identity())


def _check_positions(drop: _Drop, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """Reject a sequence before a dropped Linear layer, where torch draws a mask for each position."""
    if inputs[0].dim() > 2:
        raise PyroDropoutError(
            f"the dropout layer {drop.dropout!r} drops units of {drop.layer!r} separately at each position of an input"
            f" of shape {tuple(inputs[0].shape)}, but a draw of the weights drops them at all positions: the two"
            " differ. Write from_dropout(net, example=x), with some inputs, so that it is read as a mask for each."
        )


# --- which masks are on rows ------------------------------------------------------------------------------------------


def _row_masks(net: nn.Module, example: AnyInputs | None) -> list[_Drop]:
    """Return the dropout layers that drop rows of one draw of a weight wherever they are used."""
    try:
        with quietly(net), training(net):
            graph = _Tracer().trace(net)
    except Exception:
        return []
    modules = dict(net.named_modules())
    uses = Counter(id(weight) for node in graph.nodes for weight in _weights(node, net, modules))
    masks: dict[str, list[_Drop | None]] = {}
    for node in graph.nodes:
        module = modules[str(node.target)] if node.op == "call_module" else None
        if isinstance(module, _DROPOUTS) and module.p > 0:
            masks.setdefault(str(node.target), []).append(_row_mask(node, modules, uses))
    found = {path: [drop for drop in drops if drop is not None] for path, drops in masks.items() if all(drops)}
    ranks = _ranks(net, [drop.layer for drops in found.values() for drop in drops], example)
    known = {id(parameter) for parameter in net.parameters()}  # a weight that is computed from others is not a site
    return [
        drop
        for drops in found.values()
        if all(ranks.get(each.layer, 2) == 2 and id(modules[each.layer].weight) in known for each in drops)
        for drop in drops
    ]


def _row_mask(node: fx.Node, modules: dict[str, nn.Module], uses: Counter[int]) -> _Drop | None:
    """Return what a call of a dropout layer drops, if that is the rows of one weight; otherwise None."""
    layers, dropout = list(_behind(node, modules)), modules[str(node.target)]
    if len(layers) != 1 or layers[0] is None:  # one mask for two layers, and here each draws its own
        return None
    layer = modules[layers[0]]
    wanted = next((d for kind, d in _CHANNELS.items() if isinstance(layer, kind)), nn.Dropout)
    # Groups share rows; and torch drops the rows of a weight again at each use, while one draw drops them once.
    if not isinstance(dropout, wanted) or getattr(layer, "groups", 1) > 1 or uses[id(layer.weight)] > 1:
        return None
    return _Drop(str(node.target), layers[0], dropout.p)


def _behind(node: fx.Node, modules: dict[str, nn.Module]) -> Iterator[str | None]:
    """Yield the weight layers that a dropout node feeds, through operations that keep units apart; None for others."""
    for user in node.users:
        module = modules[str(user.target)] if user.op == "call_module" else None
        if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            yield str(user.target)
        elif (
            isinstance(module, _UNITWISE)
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


def _ranks(net: nn.Module, layers: list[str], example: AnyInputs | None) -> dict[str, int]:
    """Return how many dimensions the inputs of Linear layers have, if there is an example; 2 means rows of a weight."""
    found: dict[str, int] = {}
    if example is None:
        return found
    with ExitStack() as stack, quietly(net), training(net), torch.no_grad():
        for path in layers:
            module = net.get_submodule(path)
            if isinstance(module, nn.Linear):
                note = partial(lambda path, module, inputs: found.update({path: inputs[0].dim()}), path)
                stack.callback(module.register_forward_pre_hook(note).remove)
        call_net(net, example)
    return found
