"""The layer that makes a network's outputs: where it is, and what comes into it.

Where f = W φ(x) + b, the slope of f in W is φ(x), the same for every output: one forward pass gives all Jacobians.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pyro_dropout.generative.half_precision import HALF
from pyro_dropout.generative.inputs import AnyInputs
from pyro_dropout.generative.outputs import picked
from pyro_dropout.mathematics.errors import PyroDropoutError
from pyro_dropout.protocols import Weights


@dataclass(frozen=True)
class LastLayer:
    """The last layer with a random weight that a network runs.

    Attributes:
        path: its name in the network.
        sites: the names of its random parameters.
        linear: whether the outputs are those of this layer, a Linear with a row for each data point that is used once
            and shares no weight: f = W φ(x) + b.
        outputs: the network's outputs f, (N, D).
        features: φ(x), (N, inputs); None unless ``linear``.
    """

    path: str
    sites: tuple[str, ...]
    linear: bool
    outputs: Tensor
    features: Tensor | None


def last_layer(model: Any, weights: Weights, x: AnyInputs, *, sure: bool = False) -> LastLayer:
    """Run a ``BayesianNet`` once, and return its last layer with what came into it.

    Args:
        model: the network; inside ``Standardised``, its ``model`` with standardised x.
        weights: a value for every site.
        x: inputs of N points.
        sure: whether the network is known to be a stack of plain layers, so that f = W φ + b needs no check.

    Example:
        >>> import torch, pyro_dropout as pd
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        >>> found = last_layer(pd.BayesianNet(net), dict(net.named_parameters()), torch.zeros(5, 3))
        >>> found.path, found.sites, found.linear, found.features.shape
        ('2', ('2.weight', '2.bias'), True, torch.Size([5, 8]))
    """
    if sure and (stack := _stack(model, weights, x)):
        return stack
    runs: list[tuple[str, nn.Module, Tensor | None, object, int | None]] = []
    returned: list[object] = []
    random = {id(model.net.get_parameter(name)): name for name in model.sites}
    layers: dict[str, tuple[str, ...]] = {}  # the sites of each layer with a random weight, which layers may share
    for path, module in model.net.named_modules():
        names = tuple(random[id(own)] for own in module._parameters.values() if id(own) in random)
        if any(model.sites[name].kind == "weight" for name in names):
            layers[path] = names

    def note(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[object, ...], output: object) -> None:
            first = args[0] if args and isinstance(args[0], Tensor) else None
            version = output._version if isinstance(output, Tensor) and not output.is_inference() else None
            runs.append((path, module, first, output, version))

        return hook

    def note_end(module: nn.Module, args: object, output: object) -> None:
        returned.append(picked(output, model.output))

    handles = [model.net.get_submodule(path).register_forward_hook(note(path)) for path in layers]
    handles.append(model.net.register_forward_hook(note_end))
    try:
        f = model.evaluate(weights, x)
    finally:
        for handle in handles:
            handle.remove()
    if not runs:
        raise PyroDropoutError(
            "the network's last layer is not known: it calls none of the modules that own its random weights,"
            f" {', '.join(map(repr, layers))}. Use another structure, or BayesianNet(net, only=...)."
        )
    path, last, features, output, version = runs[-1]
    prefix, sites = f"{path}." if path else "", layers[path]
    linear = (
        type(last) is nn.Linear
        and isinstance(features, Tensor)
        and features.shape == (len(f), last.in_features)
        and f.shape[-1] == last.out_features
        and [ran for ran, *_ in runs].count(path) == 1
        and all(model.sites[name].uses == 1 for name in sites)
        and _is_same(output, version, returned[-1])
        and f"{prefix}weight" in sites
        and (sure or _affine(f, features, last, {name: weights[name] for name in sites}, prefix))
    )
    return LastLayer(path, sites, linear, f, features if linear else None)


def _stack(model: Any, weights: Weights, x: AnyInputs) -> LastLayer | None:
    """Return the last layer of Linear layers and activations that follow one another; None for any other network.

    It runs them itself: the general way, which exchanges parameters and listens to calls, takes several times as long
    as the layers of a small network.
    """
    layers = dict(model.net._modules)  # a layer may be there twice, which named_children leaves out
    linear = {path: layer for path, layer in layers.items() if type(layer) is nn.Linear}
    used = {f"{path}.{own}": value for path, layer in linear.items() for own, value in layer.named_parameters()}
    first, last = next(iter(layers), ""), next(reversed(layers), "")
    if (
        first not in linear
        or last not in linear
        or len({id(value) for value in used.values()}) < len(used)
        or any(
            layer is None or layer._parameters or layer._modules for path, layer in layers.items() if path not in linear
        )
        or set(weights) != set(used)
        or any(weights[name].shape != value.shape or weights[name].dtype != value.dtype for name, value in used.items())
        or not isinstance(x, Tensor)
        or x.shape[1:] != (linear[first].in_features,)
        or x.dtype != weights[f"{first}.weight"].dtype
        or x.dtype in HALF
        or model.output is not None
    ):
        return None
    f = features = x
    for path, layer in layers.items():
        if path in linear:
            features, f = f, nn.functional.linear(f, weights[f"{path}.weight"], weights.get(f"{path}.bias"))
        else:
            f = layer(f)
    sites = tuple(name for name in model.sites if name.rpartition(".")[0] == last)
    return LastLayer(last, sites, True, f, features)


def _is_same(output: object, version: int | None, returned: object) -> bool:
    """Whether what a network returns are the numbers that a layer gave, unchanged; it may be a view of them."""
    return (
        isinstance(output, Tensor)
        and isinstance(returned, Tensor)
        and output.numel() == returned.numel()
        and output.data_ptr() == returned.data_ptr()
        and version in (None, output._version if version is not None else None)
    )


def _affine(f: Tensor, features: Tensor, module: nn.Linear, own: Weights, prefix: str) -> bool:
    """Whether f = W φ + b at these weights: the last word, whatever happened to φ in the meantime."""
    weight = own[f"{prefix}weight"]
    bias = own.get(f"{prefix}bias", module.bias)
    with torch.no_grad():
        again = torch.nn.functional.linear(features.to(f), weight.to(f), None if bias is None else bias.to(f))
        size = torch.finfo(f.dtype).eps * (features.abs().to(f) @ weight.abs().to(f).mT + f.abs() + 1)
    return bool(((again - f).abs() <= 64 * size).all())
