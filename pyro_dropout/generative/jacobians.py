"""What a network is near given weights: its outputs, their slopes, its last layer, and whether its points run apart.

f(x, w) and J(x) = ∂f/∂w: all points of a block are differentiated at once (``torch.func``), each by itself: backward,
or forward where there are fewer weights than outputs. A network that cannot be is differentiated one output after
another. Where f = W φ(x) + b, the slope of f in W is φ(x), the same for every output: one forward pass gives all.
"""

import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, finfo, nn
from torch.func import jacfwd, jacrev, vmap

from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.generative.inputs import AnyInputs, Inputs, copies, leaves_of, picked, takes_all
from pyro_dropout.generative.networks import BayesianNet
from pyro_dropout.generative.own_noise import check_no_noise, silent
from pyro_dropout.generative.standardised import Standardised
from pyro_dropout.generative.trial_run import aside, can_run, evaluating
from pyro_dropout.protocols import Model, Weights

_ASKER = "predict(method='linearised')"


class Jacobians:
    """A network near some weights.

    Args:
        model: a network of this package, in evaluation mode.
        weights: the value of each of its sites.
        free: the sites to differentiate by.
        x: data points; the first ones are tried out.
        asker: who needs them, for errors.
    """

    def __init__(self, model: Model, weights: Weights, free: list[str], x: AnyInputs, asker: str = _ASKER) -> None:
        self.model = model
        self.free = {name: weights[name].detach() for name in free}
        self._rest = {name: value.detach() for name, value in weights.items() if name not in self.free}
        self.numbers = sum(value.numel() for value in self.free.values())
        self._whole = takes_all(model)
        self._trial = x if self._whole else x[:2]
        first = self.outputs(self._trial)
        self.like, self.width = first, first.shape[-1]
        check_no_noise(model, asker)
        # On a GPU sums may be taken in another order; noise is far larger than that.
        if not _close(self.outputs(self._trial), first, torch.finfo(first.dtype).eps ** 0.5):
            raise PyroDropoutError(
                f"{asker} needs a network that gives the same output for the same weights, but two runs of this one"
                " differ: it draws random numbers. Use a network without them, or method='mc'."
            )

    def outputs(self, x: AnyInputs) -> Tensor:
        """Return f, (N, D)."""
        return self._evaluated(self.free, x)

    def rows(self, x: AnyInputs) -> tuple[Tensor, Weights]:
        """Return f, (N, D), and {site: (N, D, *shape)}."""
        if not self.free:
            return self.outputs(x), {}
        return self._all_at_once(x) if self._at_once else self._one_by_one(x)

    def _evaluated(self, free: Mapping[str, Tensor], x: AnyInputs) -> Tensor:
        with silent():
            return self.model.evaluate({**self._rest, **free}, x)

    def _all_at_once(self, x: AnyInputs) -> tuple[Tensor, Weights]:
        count = len(x)
        leaves = leaves_of(x)
        dims = tuple(0 if leaf.dim() and len(leaf) == count else None for leaf in leaves)

        def at_a_point(free: Weights, *point: Tensor) -> tuple[Tensor, Tensor]:
            own = [leaf if dim is None else leaf.unsqueeze(0) for leaf, dim in zip(point, dims, strict=True)]
            f = self._evaluated(free, _with_leaves(x, own)).squeeze(0)
            return f, f

        jacobian = jacfwd if self.numbers < self.width else jacrev
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="There is a performance drop")  # an operation that is looped
            rows, f = vmap(jacobian(at_a_point, has_aux=True), in_dims=(None, *dims))(self.free, *leaves)
        return f, rows

    def _one_by_one(self, x: AnyInputs) -> tuple[Tensor, Weights]:
        parts = [x] if self._whole else x.split(1)
        found = [self._backward(part, None) for part in parts]
        rows = {name: torch.cat([each[name] for _, each in found]) for name in self.free}
        return torch.cat([f for f, _ in found]), rows

    def _backward(self, x: AnyInputs, along: Tensor | None) -> tuple[Tensor, Weights]:
        """Return f, and its slopes by torch.autograd: of every output, or of Σ_d v_d f_d for v given as ``along``."""
        # cuDNN has no gradients of recurrent networks in evaluation mode.
        with torch.enable_grad(), torch.backends.cudnn.flags(enabled=False):
            free = {name: value.clone().requires_grad_() for name, value in self.free.items()}
            f = self._evaluated(free, x)
            asked = f.flatten() if along is None else (f * along).sum(-1)
            slopes = [_slopes(each, free) for each in asked]
        rows = {name: torch.stack([slope[name] for slope in slopes]) for name in free}
        if along is None:
            rows = {name: value.unflatten(0, f.shape) for name, value in rows.items()}
        return f.detach(), rows

    @cached_property
    def _at_once(self) -> bool:
        """Whether all points can be differentiated at once: it runs, and gives what torch.autograd gives."""
        x = self._trial
        if self._whole:
            return False
        f = self.outputs(x)
        try:
            found, rows = self._all_at_once(x)
        except (torch.OutOfMemoryError, MemoryError):
            raise
        except Exception:  # what vmap says of a network that it cannot run; autograd may have more to say
            return False
        along = torch.randn(self.width, generator=torch.Generator().manual_seed(0), device="cpu").to(f)
        expected = [self._backward(part, along) for part in x.split(1)]
        wanted = {name: torch.cat([each[name] for _, each in expected]) for name in rows}
        near = 100 * torch.finfo(f.dtype).eps ** 0.75
        return _close(found, f, near) and all(
            _close(torch.einsum("nd...,d->n...", value, along.to(value)), wanted[name], near)
            for name, value in rows.items()
        )


def _slopes(value: Tensor, free: Weights) -> Weights:
    if not value.requires_grad:  # the output depends on none of these weights
        return {name: torch.zeros_like(weight) for name, weight in free.items()}
    found = torch.autograd.grad(value, list(free.values()), retain_graph=True, allow_unused=True)
    pairs = zip(free.items(), found, strict=True)
    return {name: torch.zeros_like(w) if slope is None else slope.to_dense() for (name, w), slope in pairs}


def _with_leaves(x: AnyInputs, leaves: list[Tensor]) -> AnyInputs:
    """Return the same inputs with other tensors."""
    each = iter(leaves)
    return x.mapped(lambda _: next(each)) if isinstance(x, Inputs) else leaves[0]


def _close(found: Tensor, wanted: Tensor, near: float) -> bool:
    return bool((found - wanted).abs().max() <= near * wanted.abs().max().clamp_min(torch.finfo(wanted.dtype).tiny))


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
        >>> import torch, pyro_dropout as pdrop
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        >>> found = last_layer(pdrop.BayesianNet(net), dict(net.named_parameters()), torch.zeros(5, 3))
        >>> found.path, found.sites, found.linear, found.features.shape
        ('2', ('2.weight', '2.bias'), True, torch.Size([5, 8]))
    """
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


# The shapes of inputs that a model has been checked with.
_CHECKED: "weakref.WeakKeyDictionary[nn.Module, set[object]]" = weakref.WeakKeyDictionary()
_BY_ROW: set[type[nn.Module]] = {nn.Sequential, nn.Linear, nn.Identity, nn.Dropout, nn.LayerNorm}
_BY_ROW |= {nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SELU, nn.SiLU, nn.Softplus, nn.Tanh, nn.Sigmoid}
_ADVICE = "If it needs all its points at once, as a graph network does, write BayesianNet(net, whole_batch=True)."


def runs_by_row(net: nn.Module) -> bool:
    """Whether a network is a stack of layers that, in evaluation mode, give one row of units for each row of units."""
    return all(type(module) in _BY_ROW for module in net.modules())


def check_single_points(model: object, x: AnyInputs) -> None:
    """Raise if a network cannot run on one of its points, or if its output there depends on the next point.

    The network runs with its own parameters, in evaluation mode and without noise of its own, once for inputs of a
    shape. One that draws random numbers all the same is not checked.
    """
    if isinstance(model, Standardised):
        x, model = model.standard_x(cast(Tensor, x)), model.model
    if not isinstance(model, BayesianNet) or model.whole_batch or len(x) < 2 or not can_run(x):
        return
    first = next((module for module in model.net.modules() if isinstance(module, nn.Linear)), None)
    if first is not None and runs_by_row(model.net) and isinstance(x, Tensor) and x.shape[1:] == (first.in_features,):
        return
    known, key = _CHECKED.setdefault(model, set()), tuple(leaf.shape[1:] for leaf in leaves_of(x))
    if key in known:
        return
    with aside(model.net), evaluating(model.net), silent():
        try:
            # Copies, as a prediction makes them: an expanded tensor has no view.
            one, again, two = (model.evaluate({}, copies(x[:rows], 1)) for rows in (1, 1, 2))
        except (RuntimeError, LookupError, ValueError) as cause:
            model.evaluate({}, copies(x, 1))  # not at fault if this fails too
            reason = (str(cause).splitlines() or [type(cause).__name__])[0]
            raise PyroDropoutError(
                f"net runs on {len(x)} points, but not on one of them: {reason} {_ADVICE}"
            ) from cause
    if _apart(one, again) <= 0 and _apart(one, two[:1]) > 8 * finfo(one.dtype).eps ** 0.5:
        raise PyroDropoutError(
            "the output of net at one point changes with the point beside it, so predictions of it would depend on how"
            f" the points are divided. {_ADVICE}"
        )
    known.add(key)


def _apart(one: Tensor, other: Tensor) -> float:
    """Return the largest difference between two outputs, relative to the largest of them."""
    return float((one - other).abs().max() / other.abs().max().clamp_min(1e-30))
