"""The outputs of a network at given weights, and how they change with some of them: f(x, w) and J(x) = ∂f/∂w.

All points of a block are differentiated at once (``torch.func``), each by itself: backward, or forward where there are
fewer weights than outputs. A network that cannot be is differentiated one output after another.
"""

import warnings
from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor
from torch.func import jacfwd, jacrev, vmap

from pyro_dropout.generative.inputs import AnyInputs, Inputs, leaves_of, takes_all
from pyro_dropout.generative.own_noise import check_no_noise, silent
from pyro_dropout.mathematics.errors import PyroDropoutError
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
