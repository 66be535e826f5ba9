"""Kronecker factors of the Gauss-Newton curvature of each layer: H ≈ B ⊗ A (K-FAC; Martens and Grosse 2015).

With a the inputs of a layer (and 1 for its bias) and g the slopes of the outputs' roots in what the layer gives, the
exact block is Σ_n g gᵀ ⊗ a aᵀ. The factors are A = Σ a aᵀ / rows and B = Σ g gᵀ; a convolution has a row for each
position of each point (Grosse and Martens 2016). The expectation over targets is exact: all columns of the likelihood's
root are propagated back, none is sampled.

On a GPU, points run together in large batches, and factors and gradients have the precision that
``torch.set_float32_matmul_precision`` says: the factors are an approximation, and most of the work, and the gradient
serves to tell whether the point is trained. Outputs have all digits.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyro_dropout.engines.engine import exact_products
from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.generative.inputs import AnyInputs, takes_all
from pyro_dropout.mathematics.curvature_blocks import F64, Block, Kronecker, Shapes
from pyro_dropout.protocols import Weights
from pyro_dropout.training.laplace.curvature import Sums

_NUMBERS = 2**22  # of patches that are held at once
_ON_GPU = 2**27  # inputs and outputs of layers that are held at once on a GPU
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_INSTEAD = (
    "Use structure='last', 'diagonal' or 'layer', or make other parameters random with BayesianNet(net, only=...)."
)


@dataclass
class Layer:
    """A layer, and what it sees of the data."""

    path: str
    module: nn.Module
    sites: tuple[str, ...]
    rows: int = 0  # that have been multiplied with its weight
    seen: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # inputs and outputs in one pass


class KroneckerSums(Sums):
    """Curvature with two Kronecker factors for each layer: Linear and convolutions, each used once at a point."""

    blocks: list[Kronecker]  # type: ignore[assignment]

    def __init__(
        self, net: Any, weights: Weights, outputs: int, groups: Sequence[Shapes], precisions: Mapping[str, Tensor]
    ) -> None:
        if takes_all(net):
            raise PyroDropoutError(
                "structure='kron' needs a network whose output at one point does not depend on the others; this one"
                " takes all points at once (whole_batch=True). Use structure='full', 'layer' or 'diagonal'."
            )
        self.layers = layers_of(net, list(precisions))
        super().__init__(net, weights, outputs, [Kronecker(group, precisions) for group in groups])
        self._held = 0  # numbers that a point has in all layers, known after the first

    @property
    def together(self) -> int:
        """How many points can be added at once: on a GPU, as many as fit once their size is known."""
        some = super().together
        fit = _ON_GPU // self._held if self._held and self.blocks[0].outputs.is_cuda else 0
        return max(some, min(fit, _ON_GPU // self.outputs**2))

    def add(self, x: AnyInputs, y: Tensor) -> Tensor:
        """Add some points, and return the outputs at them."""
        leaves = {name: value.clone().requires_grad_() for name, value in self.free.items()}
        with exact_products():
            with self._watched():
                f = self.net.evaluate({**self.fixed, **leaves}, x)
            slope, root = self._slope(f, y)
            outputs = [layer.seen[0][1] for layer in self.layers]
            if not self._held:
                self._check_layers(f, leaves)
                self._held = sum(part.numel() for layer in self.layers for part in layer.seen[0]) // len(f)
        found = torch.autograd.grad(f, [*leaves.values()], slope, retain_graph=True, allow_unused=True)
        for total, value in zip(self.gradient.values(), found, strict=True):
            total += 0.0 if value is None else value.to(F64)
        for column in root.unbind(-1):
            slopes = torch.autograd.grad(f, outputs, column, retain_graph=True, allow_unused=True)
            for block, layer, g in zip(self.blocks, self.layers, slopes, strict=True):
                block.outputs += 0.0 if g is None else _gram(_rows_out(layer.module, g))
        for block, layer in zip(self.blocks, self.layers, strict=True):
            for rows in self._rows_in(layer):
                block.inputs += _gram(rows)
                layer.rows += len(rows)
            layer.seen = []
        self.count += len(f)
        found_at: Tensor = f.detach()
        return found_at

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Within this context layers note their inputs and outputs."""

        def note(layer: Layer) -> Callable[..., Tensor]:
            def hook(module: nn.Module, args: tuple[Tensor, ...], named: Weights, output: Tensor) -> Tensor:
                layer.seen.append(((args[0] if args else named["input"]).detach().clone(), output))
                return output.clone()  # what comes next may change it in place

            return hook

        handles = [layer.module.register_forward_hook(note(layer), with_kwargs=True) for layer in self.layers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        for layer in self.layers:
            if len(layer.seen) != 1:
                times = f"runs {len(layer.seen)} times" if layer.seen else "does not run as a module"
                raise PyroDropoutError(
                    f"structure='kron' needs layers that run once at a point, and {layer.path!r} {times}. {_INSTEAD}"
                )

    def _rows_in(self, layer: Layer) -> Iterator[Tensor]:
        """Yield the inputs of a layer, one row for each product with the weight, with a one for the bias."""
        x = layer.seen[0][0]
        each = 0 if isinstance(layer.module, nn.Linear) else _patches(layer.module, x[:1]).numel()
        for part in x.split(max(1, _NUMBERS // each if each else len(x))):  # patches overlap: more than their input
            rows = _patches(layer.module, part)
            yield torch.cat([rows, rows.new_ones(len(rows), len(layer.sites) - 1)], -1)

    def _check_layers(self, f: Tensor, leaves: Weights) -> None:
        """Raise unless the slopes of the outputs in each weight are those that inputs and outputs of its layer give.

        They are not if the weight is used anywhere else, or changed before it is used.
        """
        seed = torch.cos(torch.arange(f.numel(), dtype=f.dtype, device=f.device)).reshape(f.shape)
        outputs = [layer.seen[0][1] for layer in self.layers]
        both = torch.autograd.grad(f, [*leaves.values(), *outputs], seed, retain_graph=True, allow_unused=True)
        by_site, by_layer = dict(zip(leaves, both, strict=False)), both[len(leaves) :]
        for layer, g in zip(self.layers, by_layer, strict=True):
            own = {n: torch.zeros_like(leaves[n]) if by_site[n] is None else by_site[n] for n in layer.sites}
            direct = torch.cat([part.reshape(len(part), -1) for part in own.values()], -1)
            made = torch.zeros_like(direct)
            if g is not None:
                made = _rows_out(layer.module, g).mT @ torch.cat([*self._rows_in(layer)])
            if not bool((direct - made).norm() <= 1e-3 * (direct.norm() + made.norm())):
                raise PyroDropoutError(
                    f"structure='kron' needs a layer whose weight is used there and nowhere else, as it is, and"
                    f" {layer.path!r} is not one. {_INSTEAD}"
                )

    def finished(self, scale: float) -> list[Block]:
        """Return the curvature, times ``scale``."""
        for block, layer in zip(self.blocks, self.layers, strict=True):
            block.inputs /= layer.rows
        return super().finished(scale)


def layers_of(net: Any, sites: Sequence[str]) -> list[Layer]:
    """Return the layers that some sites belong to; raise if Kronecker factors do not describe one of them."""
    found: dict[str, list[str]] = {}
    for name in sites:
        found.setdefault(name.rpartition(".")[0], []).append(name)
    layers = []
    for path, names in found.items():
        module = net.net.get_submodule(path)
        weight, bias = (f"{path}.{own}" if path else own for own in ("weight", "bias"))
        plain = isinstance(module, _LAYERS) and getattr(module, "groups", 1) == 1 and set(names) <= {weight, bias}
        tied = any(net.sites[name].uses > 1 for name in names)
        if not plain or weight not in names or tied:
            why = f"{type(module).__name__} {path!r}" + ", whose weight is shared" * tied
            why += f" with groups={module.groups}" if hasattr(module, "groups") else ""
            raise PyroDropoutError(
                "structure='kron' is for the weights and biases of Linear and ConvNd layers, each used once; got"
                f" {', '.join(map(repr, names))} of {why}. {_INSTEAD}"
            )
        layers.append(Layer(path, module, tuple(names)))
    return layers


def _patches(module: nn.Module, x: Tensor) -> Tensor:
    """Return what a layer multiplies with its weight: (rows, inputs), a row for each position of each point."""
    if isinstance(module, nn.Linear):
        return x.reshape(-1, x.shape[-1])
    assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    x = F.pad(x, module._reversed_padding_repeated_twice, mode=mode)
    positions = len(module.kernel_size)
    x = x if x.dim() == positions + 2 else x.unsqueeze(0)
    for k, (size, stride, dilation) in enumerate(
        zip(module.kernel_size, module.stride, module.dilation, strict=True), start=2
    ):
        x = x.unfold(k, (size - 1) * dilation + 1, stride)[..., ::dilation]
    return x.movedim(1, positions + 1).flatten(positions + 1).flatten(0, positions)


def _gram(rows: Tensor) -> Tensor:
    """Return Σ r rᵀ over rows r, in float64 unless fewer digits were asked of float32's products on a GPU."""
    fewer = rows.is_cuda and rows.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
    rows = rows if fewer else rows.to(F64)
    return rows.mT @ rows


def _rows_out(module: nn.Module, g: Tensor) -> Tensor:
    """Return slopes in what a layer gives, (rows, outputs), in the order of ``_patches``."""
    if isinstance(module, nn.Linear):
        return g.reshape(-1, g.shape[-1])
    positions = len(module.kernel_size)  # type: ignore[arg-type]
    g = g if g.dim() == positions + 2 else g.unsqueeze(0)
    return g.movedim(1, -1).flatten(0, positions)
