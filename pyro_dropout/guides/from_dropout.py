"""Converts a network with dropout layers as the paper reads it: a model without dropout, and a guide that drops."""

import copy
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from pyro_dropout.generative.likelihoods import Gaussian, Likelihood
from pyro_dropout.generative.networks import BayesianNet
from pyro_dropout.generative.priors import BySite, Prior
from pyro_dropout.generative.random_state import forked
from pyro_dropout.guides.dropout import AutoDropout
from pyro_dropout.guides.other_randomness import check_graph, check_run, training
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
) -> tuple[BayesianNet, AutoDropout]:
    """Turn a network with ``nn.Dropout`` layers, trained or not, into the model and the posterior that it represents.

    The model is the network without dropout; the guide drops the rows of every weight layer that follows a dropout
    layer, and treats all others as points. torch multiplies what it keeps by 1/keep; here that factor is folded
    into the weights, so predictions of the pair are those of stochastic forward passes through ``net``. The network is
    copied. Frozen parameters (``requires_grad=False``) stay frozen, those that are dropped too.

    Args:
        net: the network; ``torch.fx`` must be able to trace it.
        tau: observation precision, for a Gaussian likelihood.
        length_scale: l of the prior N(0, l⁻²) on every weight layer and bias.
        likelihood: another likelihood, such as ``Categorical()``; ``tau`` is then not used.
        prior: another prior; ``length_scale`` is then not used.

    Returns:
        The model and the guide.

    Raises:
        PyroDropoutError: a dropout layer does not come before a weight layer, or does not drop rows of it; or another
            layer draws random numbers (stochastic depth, attention dropout), which may be noticed with the first data.
            The message names the layer.

    Example:
        >>> import torch, pyro_dropout as pd
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
        >>> model, guide = pd.from_dropout(net, tau=10.0)
        >>> guide.posterior("3.weight").keep[0].item(), bool(torch.allclose(guide.mean()["3.weight"], net[3].weight))
        (0.800000011920929, True)
    """
    graph = _follow(net)
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    clean = copy.deepcopy(net)
    _check_other_functions(clean)
    for path, module in list(clean.named_modules(remove_duplicate=False)):
        if isinstance(module, _DROPOUTS):
            parent, _, name = path.rpartition(".")
            setattr(clean.get_submodule(parent), name, nn.Identity())
    keep: dict[str, float] = {}
    for drop in _dropped(net, graph):
        site = names.get(id(net.get_submodule(drop.layer).weight))
        if site is None:
            raise PyroDropoutError(f"the weight of layer {drop.layer!r} is computed from others: it is not a site.")
        keep[site] = drop.keep
        if isinstance(net.get_submodule(drop.layer), nn.Linear):
            clean.get_submodule(drop.layer).register_forward_pre_hook(partial(_check_positions, drop))
    if prior is None:
        prior = Prior(length_scale, bias_length_scale=length_scale, width_scaled=False)
    fixed = {name: value for name, value in clean.named_parameters() if name in keep and not value.requires_grad}
    for value in fixed.values():
        value.requires_grad_(True)  # it is dropped, so it is random; what it is when kept stays frozen, in the guide
    model = BayesianNet(clean, prior, Gaussian(tau) if likelihood is None else likelihood)
    model.on_first_data = check_run
    for site in keep:
        if site not in model.sites:
            raise PyroDropoutError(f"prior hides {site!r}, whose rows the network drops; it must be random.")
    guide = AutoDropout(model, keep=lambda site: keep.get(site, 1.0), scale=0.0, bias="map")
    for name, value in fixed.items():
        value.requires_grad_(False)
        guide._state(guide._sites[name]).requires_grad_(False)
    return model, guide


class _Drop(NamedTuple):
    """A weight layer after a dropout layer: its path, the dropout's name, and the probability of keeping a row."""

    layer: str
    label: str
    keep: float


def _check_positions(drop: _Drop, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """Reject a sequence before a dropped Linear layer, where torch draws a mask for each position."""
    if inputs[0].dim() > 2:
        raise PyroDropoutError(
            f"{drop.label} drops units of {drop.layer!r} separately at each position of an input of shape"
            f" {tuple(inputs[0].shape)}, but a draw of the weights drops them at all positions: the two differ."
            " Build the pair by hand: BayesianNet(net without dropout) and AutoDropout(model, keep={...})."
        )


def _follow(net: nn.Module) -> fx.Graph:
    if not isinstance(net, nn.Module):
        raise PyroDropoutError(f"net must be a torch nn.Module with nn.Dropout layers; got {describe(net)}.")
    try:
        with forked():
            return _Tracer().trace(net)
    except Exception as cause:
        raise PyroDropoutError(
            f"torch.fx cannot follow {type(net).__name__}.forward, so its dropout layers cannot be matched to its"
            f" weight layers: {cause}. Write it without data-dependent control flow, or build the pair by hand:"
            " BayesianNet(net without dropout) and AutoDropout(model, keep={...})."
        ) from cause


def _check_other_functions(net: nn.Module) -> None:
    """Raise if a network calls torch's random functions in training mode."""
    with forked(), training(net):
        try:
            graph = _Tracer().trace(net)
        except Exception:
            return  # what cannot be followed in training mode is looked at with the first data
    check_graph(graph)


def _dropped(net: nn.Module, graph: fx.Graph) -> Iterator[_Drop]:
    """Yield every weight layer after a dropout layer; raise if dropping its units is not dropping rows of one draw."""
    modules = dict(net.named_modules())
    uses = Counter(id(weight) for node in graph.nodes for weight in _weights(node, net, modules))
    for node in graph.nodes:
        found = _dropout(node, modules)
        if found is None or found[1] == 0:
            continue
        label, p = found
        if p >= 1:
            raise PyroDropoutError(f"{label} drops everything (p={p}); its network has no weights to be uncertain of.")
        layers = list(_behind(node, modules, label))
        if len(layers) > 1:
            raise PyroDropoutError(
                f"{label} gives one mask to {' and '.join(map(repr, layers))}, but here each of them draws its own."
                " Make them one layer, or give each a dropout layer."
            )
        for path in layers:
            _check_rows(label, modules[str(node.target)], path, modules[path])
            if uses[id(modules[path].weight)] > 1:
                raise PyroDropoutError(
                    f"the weight of {path!r}, behind {label}, is used more than once in a forward pass: torch drops"
                    " its rows again at each use, but one draw of a weight drops them once."
                )
            yield _Drop(path, label, 1 - p)


def _weights(node: fx.Node, net: nn.Module, modules: dict[str, nn.Module]) -> list[object]:
    """Return the parameters that a node uses."""
    if node.op == "call_module":
        return list(modules[str(node.target)].parameters())
    if node.op == "get_attr":
        owner, _, name = str(node.target).rpartition(".")
        return [getattr(net.get_submodule(owner), name)]
    return []


def _check_rows(label: str, dropout: nn.Module, path: str, layer: nn.Module) -> None:
    """Raise unless what the dropout layer drops are the rows of the weight layer behind it."""
    wanted = next((d for kind, d in _CHANNELS.items() if isinstance(layer, kind)), nn.Dropout)
    if not isinstance(dropout, wanted):
        what = "single positions" if isinstance(dropout, nn.Dropout) else "whole channels"
        raise PyroDropoutError(
            f"{label} drops {what} before the {type(layer).__name__} layer {path!r}, which are not rows of its"
            f" weight. Use nn.{wanted.__name__}."
        )
    if getattr(layer, "groups", 1) > 1:
        raise PyroDropoutError(
            f"{label} comes before {path!r}, whose groups={layer.groups} share rows: a dropped channel is not a row"
            " of its weight."
        )


def _dropout(node: fx.Node, modules: dict[str, nn.Module]) -> tuple[str, float] | None:
    """Return a dropout node's name and p; None for any other node."""
    if node.op != "call_module":
        return None
    module = modules[str(node.target)]
    label = f"{type(module).__name__} {node.target!r}"
    if isinstance(module, _DROPOUTS):
        return label, module.p
    if isinstance(module, nn.modules.dropout._DropoutNd):
        raise PyroDropoutError(f"{label} does not give 0 or x/keep, so it cannot be converted.")
    for part in module.modules():
        inside = part.p if isinstance(part, nn.modules.dropout._DropoutNd) else getattr(part, "dropout", 0.0)
        if isinstance(inside, int | float) and inside > 0:
            raise PyroDropoutError(f"{label} has dropout inside, which cannot be converted.")
    return None


def _behind(node: fx.Node, modules: dict[str, nn.Module], label: str) -> Iterator[str]:
    """Yield the weight layers that a dropout node feeds, through operations that keep units apart."""
    for user in node.users:
        module = modules[str(user.target)] if user.op == "call_module" else None
        if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            yield str(user.target)
        elif (
            isinstance(module, _UNITWISE)
            or (user.op == "call_function" and user.target in _UNITWISE_FUNCTIONS)
            or (user.op == "call_method" and user.target in _UNITWISE_METHODS)
        ):
            yield from _behind(user, modules, label)
        else:
            what = repr(getattr(user.target, "__name__", user.target))
            if module is not None:
                what = f"{type(module).__name__} {user.target!r}"
            elif user.op == "output":
                what = "the network's output"
            raise PyroDropoutError(
                f"{label} comes before {what}, which is not a Linear or convolution layer: what it drops are not rows"
                " of a weight. Move it directly before a weight layer."
            )
