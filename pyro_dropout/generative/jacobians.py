"""What a network is near given weights: its outputs, their slopes, its last layer, and whether its points run apart.

f(x, w) and J(x) = ∂f/∂w: all points of a block are differentiated at once (``torch.func``), each by itself: backward,
or forward where there are fewer weights than outputs. A network that cannot be is differentiated one output after
another. Where f = W φ(x) + b, the slope of f in W is φ(x), the same for every output: one forward pass gives all.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, finfo, nn
from torch.func import jacfwd, jacrev, vjp, vmap

from pyro_dropout.engines.torch_internals import tree_flatten, tree_unflatten
from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.generative.inputs import AnyInputs, copies, leaves_of, picked, takes_all
from pyro_dropout.generative.networks import BayesianNet
from pyro_dropout.generative.own_noise import check_no_noise, silent
from pyro_dropout.generative.standardised import Standardised
from pyro_dropout.generative.trial_run import aside, can_run, checked_with, evaluating
from pyro_dropout.protocols import Model, Weights

_ASKER = "predict(method='linearised')"


class Jacobians:
    """A network of this package, in evaluation mode, near some weights; ``free`` of them vary."""

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
        # One that is not a number is the same in both runs.
        again = self.outputs(self._trial).nan_to_num()
        if not _close(again, first.nan_to_num(), torch.finfo(first.dtype).eps ** 0.5):
            raise PyroDropoutError(
                f"{asker} needs a network that gives the same output for the same weights, but two runs of this one"
                " differ: it draws random numbers. Use a network without them, or method='mc'."
            )

    def outputs(self, x: AnyInputs) -> Tensor:
        """Return f, (N, D)."""
        return self._at(self.free, x)

    def rows(self, x: AnyInputs) -> tuple[Tensor, Weights]:
        """Return f, (N, D), and {site: (N, D, *shape)}."""
        if not self.free:
            return self.outputs(x), {}
        if self._at_once:
            return self._all_at_once(x)
        parts = [x] if self._whole else x.split(1)
        # cuDNN has no gradients of recurrent networks in evaluation mode.
        with torch.backends.cudnn.flags(enabled=False):
            found = [jacrev(self._near(part), chunk_size=1)(self.free) for part in parts]
        return self.outputs(x), {name: torch.cat([each[name] for each in found]) for name in self.free}

    def _at(self, free: Mapping[str, Tensor], x: AnyInputs) -> Tensor:
        with silent():
            return self.model.evaluate({**self._rest, **free}, x)

    def _near(self, x: AnyInputs) -> Callable[[Weights], Tensor]:
        return lambda free: self._at(free, x)

    def _all_at_once(self, x: AnyInputs) -> tuple[Tensor, Weights]:
        leaves, spec = tree_flatten(x)
        dims = tuple(0 if leaf.dim() and len(leaf) == len(x) else None for leaf in leaves)

        def at_a_point(free: Weights, *point: Tensor) -> tuple[Tensor, Tensor]:
            own = [leaf if dim is None else leaf.unsqueeze(0) for leaf, dim in zip(point, dims, strict=True)]
            f = self._at(free, tree_unflatten(own, spec)).squeeze(0)
            return f, f

        jacobian = jacfwd if self.numbers < self.width else jacrev
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="There is a performance drop")  # an operation that is looped
            rows, f = vmap(jacobian(at_a_point, has_aux=True), in_dims=(None, *dims))(self.free, *leaves)
        return f, rows

    @cached_property
    def _at_once(self) -> bool:
        """Whether all points can be differentiated at once: it runs, and gives what each point alone gives."""
        if self._whole:
            return False
        f = self.outputs(self._trial)
        try:
            found, rows = self._all_at_once(self._trial)
        except (torch.OutOfMemoryError, MemoryError):
            raise
        except Exception:  # what vmap says of a network that it cannot run; another way may have more to say
            return False
        along = torch.randn(1, self.width, generator=torch.Generator().manual_seed(0), device="cpu").to(f)
        near = 100 * torch.finfo(f.dtype).eps ** 0.75
        with torch.backends.cudnn.flags(enabled=False):
            parts = [vjp(self._near(part), self.free)[1](along)[0] for part in self._trial.split(1)]
        wanted = {name: torch.stack([part[name] for part in parts]) for name in rows}
        return _close(found, f, near) and all(
            _close(torch.einsum("nd...,d->n...", value, along[0].to(value)), wanted[name], near)
            for name, value in rows.items()
        )


def _close(found: Tensor, wanted: Tensor, near: float) -> bool:
    return bool((found - wanted).abs().max() <= near * wanted.abs().max().clamp_min(torch.finfo(wanted.dtype).tiny))


@dataclass(frozen=True)
class LastLayer:
    """The last layer with a random weight that a network runs.

    It is ``linear`` if the outputs f, (N, D), are those of this layer, a Linear with a row for each data point that is
    used once and shares no weight: f = W φ(x) + b. ``features`` are then φ(x), (N, inputs).
    """

    path: str
    sites: tuple[str, ...]
    linear: bool
    outputs: Tensor
    features: Tensor | None


def last_layer(model: Any, weights: Weights, x: AnyInputs) -> LastLayer:
    """Run a ``BayesianNet`` once, and return its last layer with what came into it."""
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
    # The first call may run the network several times, to look for noise of its own: only the last run counts.
    handles.append(model.net.register_forward_pre_hook(lambda module, args: runs.clear()))
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
    sites, whole = layers[path], returned[-1]
    weight = f"{path}.weight" if path else "weight"
    linear = (
        type(last) is nn.Linear
        and isinstance(features, Tensor)
        and features.shape == (len(f), last.in_features)
        and f.shape[-1] == last.out_features
        and [ran for ran, *_ in runs].count(path) == 1
        and all(model.sites[name].uses == 1 for name in sites)
        and weight in sites
        # What the network returns are the numbers that the layer gave, unchanged; it may be a view of them.
        and isinstance(output, Tensor)
        and isinstance(whole, Tensor)
        and (output.numel(), output.data_ptr()) == (whole.numel(), whole.data_ptr())
        and version in (None, output._version if version is not None else None)
        and _affine(f, features, weights[weight], weights.get(weight[:-6] + "bias", last.bias))
    )
    return LastLayer(path, sites, linear, f, features if linear else None)


def _affine(f: Tensor, features: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether f = W φ + b at these weights: the last word, whatever happened to φ in the meantime."""
    with torch.no_grad():
        again = torch.nn.functional.linear(features.to(f), weight.to(f), None if bias is None else bias.to(f))
        size = torch.finfo(f.dtype).eps * (features.abs().to(f) @ weight.abs().to(f).mT + f.abs() + 1)
    return bool(((again - f).abs() <= 64 * size).all())


_ADVICE = "If it needs all its points at once, as a graph network does, write BayesianNet(net, whole_batch=True)."


def check_single_points(model: object, x: AnyInputs) -> None:
    """Raise if a network cannot run on one of its points, or if its output there depends on the next point.

    The network runs with its own parameters, in evaluation mode and without noise of its own, once for inputs of a
    shape. One that draws random numbers all the same is not checked.
    """
    if isinstance(model, Standardised):
        x, model = model.standard_x(cast(Tensor, x)), model.model
    if not isinstance(model, BayesianNet) or model.whole_batch or len(x) < 2 or not can_run(x):
        return
    known, key = checked_with(model), ("single", *(leaf.shape[1:] for leaf in leaves_of(x)))
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
    # A network that draws random numbers all the same is not checked.
    if _close(again, one, 0) and not _close(one, two[:1], 8 * finfo(one.dtype).eps ** 0.5):
        raise PyroDropoutError(
            "the output of net at one point changes with the point beside it, so predictions of it would depend on how"
            f" the points are divided. {_ADVICE}"
        )
    known.add(key)
