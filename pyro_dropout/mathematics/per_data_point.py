"""A separate weight draw for every data point, at the cost of a mask: how one layer computes with it.

A draw of row mixtures is W_n = Σ_l M_l∘[z_n = l] + Σ_r V_r∘η_nr + σ∘ε_n, with one z and one η for each row. A layer is
linear in its weights, so the first two parts are the layer's own product with masked or scaled inputs, and no tensor of
size N × out × in is ever made. The last part is Gaussian noise on the layer's output: for a plain matrix product it is
independent with a known variance (local reparameterisation, Kingma et al. 2015). Where one draw is used at several
positions of one data point, in convolutions and sequences, the outputs are correlated, and one draw ε for the batch
with a sign flip for every input and output unit of every data point has exactly the right distribution (flipout, Wen
et al. 2018). Distinct data points then share |ε|: quantities linear in the weights are uncorrelated, others are not.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from pyro_dropout.errors import NotFollowedError, ShapeError
from pyro_dropout.mathematics.row_mixture_distribution import RowMixture, apart
from pyro_dropout.mathematics.shapes import RowDim
from pyro_dropout.mathematics.weight_distribution import MARK

POINTS_FIRST = "Inputs must have data points first, or use shared draws (per_example=False)."
Product = Callable[[Tensor, Tensor], Tensor]


class MisplacedPointsError(NotFollowedError, ShapeError):
    """The first dimension of an input is not the number of data points that a site was drawn for."""


class PerDataPoint:
    """Draws of one site from q for every data point, made inside the layers that use them.

    ``reused`` says that one draw is used on several inputs (tied layers, recurrence), so that the weights themselves
    are drawn. ``dtype`` is the type that layers compute in, if it is not that of q: a network in half precision.
    """

    def __init__(self, site: str, q: RowMixture, reused: bool = False) -> None:
        q.check_labels()
        self.site, self.q, self.reused = site, q.expand(torch.Size()) if q.batch_shape else q, reused
        self._like, self.dtype = q.like.detach(), q.like.dtype
        self.masks: list[Tensor] = []
        self.count: int | None = None
        self._coefficients: Tensor | None = None
        self._flips: dict[int, Tensor] = {}
        self._noise: Tensor | None = None
        self._whole: Tensor | None = None
        self._uses = 0

    @property
    def weight(self) -> Tensor:
        """A new placeholder; it refers to the draws, they do not refer to it, and both are freed with the last one."""
        return self.mark(self._like.view(self.q.event_shape))

    def mark(self, value: Tensor) -> Tensor:
        """Make ``value`` a placeholder for these draws."""
        setattr(value, MARK, self)
        return value

    def _check_count(self, count: int) -> None:
        if self.count is None:
            self.count = count
        if self.count != count:
            reason = f"is drawn for {self.count} data points, but is used on an input whose first dimension is {count}"
            raise self._refusal(reason, POINTS_FIRST, MisplacedPointsError)

    def _refusal(self, reason: str, advice: str, kind: type[NotFollowedError] = NotFollowedError) -> NotFollowedError:
        return kind(f"site {self.site!r} {reason}. {advice}", self.site, f"it {reason}")

    def _start(self, count: int) -> None:
        self._check_count(count)
        if self.masks or self._coefficients is not None:
            return
        # One component needs no labels; where every weight is a row, there would be as many labels as weights.
        if self.q.components > 1:
            self.masks = self.q.sample_masks((count,))
        if self.q.row_dim is not None:
            self._coefficients = self.q.sample_coefficients((count, self.q.rows))

    def _flip(self, dim: int) -> Tensor:
        """Return one sign for each data point and index of a dimension of the weight, whichever side it is used on."""
        if dim not in self._flips:
            like = self.q.like
            u = torch.rand((self.count or 0, self.q.event_shape[dim]), dtype=like.dtype, device=like.device)
            self._flips[dim] = torch.where(u < 0.5, -1.0, 1.0).to(like.device, self.dtype)
        return self._flips[dim]

    def product(self, x: Tensor, layer: "Layer") -> Tensor:
        """Return the layer's output with a separate draw for every data point, without the layer's bias."""
        self._start(len(x))
        q = self.q
        if q.row_dim is None and q.components > 1:
            reason = "has a label for each weight, so a draw for each data point would need a whole weight tensor"
            raise self._refusal(reason, "Use shared draws (per_example=False), or rows (row_dim=1).")
        if isinstance(q.row_dim, int) and q.row_dim not in (layer.in_dim, layer.out_dim):
            neither = f"neither its layer's input ({layer.in_dim}) nor its output ({layer.out_dim})"
            reason = f"has rows along dimension {q.row_dim}, which is {neither}"
            raise self._refusal(reason, "Use one of them as row_dim, or shared draws (per_example=False).")
        parts = [
            self._part(x, layer, mean, None if q.components == 1 else self.masks[label])
            for label, mean in enumerate(q.means)
            if mean is not None
        ]
        if self._coefficients is not None and q.relative is not None:  # m∘(1 + √α η): one product
            parts = [self._part(x, layer, q.like, 1 + q.relative * self._coefficients[..., 0])]
        elif self._coefficients is not None:
            parts += self._low_rank(x, layer, self._coefficients)
        if not q.noiseless:
            parts.append(self._gaussian(x, layer))
        return functools.reduce(torch.add, parts)

    def _part(
        self, x: Tensor, layer: "Layer", matrix: Tensor, rows: Tensor | None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return the layer's product with ``matrix``, its rows scaled by ``rows``, (N, rows)."""
        dtype = dtype or self.dtype
        matrix = matrix.to(dtype)
        if rows is None:
            return layer.op(x, matrix)
        rows = rows.to(dtype)
        if self.q.row_dim == layer.in_dim:
            return layer.by_input(x, matrix, rows)
        return layer.scale_out(layer.op(x, matrix), rows)  # rows are output units, or all weights are one row

    def _low_rank(self, x: Tensor, layer: "Layer", eta: Tensor) -> list[Tensor]:
        """Return the products with V_r∘η_r: R of them, or L·R where each component has its own factor."""
        matrices, scales, factors = [], [], self.q.cov_factor
        assert factors is not None
        for r, column in enumerate(factors.unbind(-1)):
            for label, factor in enumerate(apart(column)):
                rows = eta[..., r] * self.masks[label] if len(column) > 1 else eta[..., r]
                matrices.append(self.q.from_rows(factor).to(self.dtype))
                scales.append(rows.to(self.dtype))
        if isinstance(layer, MatrixProduct) and len(matrices) > 1:
            return [layer.together(x, matrices, scales, self.q.row_dim)]
        return [self._part(x, layer, matrix, rows) for matrix, rows in zip(matrices, scales, strict=True)]

    def _gaussian(self, x: Tensor, layer: "Layer") -> Tensor:
        """Return a draw of the product with σ∘ε."""
        q = self.q
        # A low-rank part with a coefficient for each weight is independent noise too.
        variances = apart(q.component_variance() if q.row_dim is None else q.scale.square())
        masks = self.masks if len(variances) > 1 else [None]
        if not layer.positions and not self.reused:
            self._uses += 1
            if self._uses > 1:
                reason = "is used twice in one forward pass, and its noise was drawn for one use"
                raise self._refusal(reason, "Use shared draws (per_example=False).")
            # In the type of q: squares of small widths are beyond half precision.
            own = q.like.dtype
            squares, pairs = x.to(own).square(), zip(variances, masks, strict=True)
            variance = functools.reduce(
                torch.add, [self._part(squares, layer, each, mask, own) for each, mask in pairs]
            )
            noise = (variance + torch.finfo(variance.dtype).tiny).sqrt() * torch.randn_like(variance)
            return noise.to(self.dtype)
        if self._noise is None:  # the ε that all data points share up to signs
            self._noise = torch.randn_like(self.q.like)
        flips, parts = self._flip(layer.in_dim), []
        for variance, mask in zip(variances, masks, strict=True):
            noise = (variance.sqrt() * self._noise).to(self.dtype)
            if mask is None:
                parts.append(layer.by_input(x, noise, flips))
            elif q.row_dim == layer.in_dim:
                parts.append(layer.by_input(x, noise, flips * mask.to(self.dtype)))
            else:
                parts.append(layer.scale_out(layer.by_input(x, noise, flips), mask.to(self.dtype)))
        return layer.scale_out(functools.reduce(torch.add, parts), self._flip(layer.out_dim))

    def draws(self, count: int) -> Tensor:
        """Return the weights themselves, (count, *shape): for biases and other small sites."""
        self._check_count(count)
        if self._whole is None:
            self._whole = self.q.rsample((count,))
        return self._whole


class Probe(PerDataPoint):
    """Stands in for draws of a site for ``count`` data points, to see what depends on them: known weights, no noise.

    Attributes:
        moved: (count,), 1 for points with other weights than the rest, for which it is 0.
    """

    def __init__(self, other: PerDataPoint, count: int) -> None:
        super().__init__(other.site, other.q)
        self.count, self.dtype = count, other.dtype
        own = self._like.view(self.q.event_shape)
        size = own.abs().mean()
        size = torch.where(size > 0, size, (len(own) / own.numel()) ** 0.5)
        self.known = torch.randn_like(own).mul_(size).add_(own)  # without a copy more: weights may be large
        # No normalisation takes these factors of the units back, and no sign is left as it was.
        factors = torch.empty(max(self.q.event_shape)).uniform_(-1, 1)
        self._changes = factors + 0.5 * factors.sign() - 1
        self.moved = torch.zeros(count)

    def _factors(self, units: int, like: Tensor) -> Tensor:
        return (1 + self.moved.to(like).unsqueeze(-1) * self._changes[:units].to(like)).to(like.device)

    def product(self, x: Tensor, layer: "Layer") -> Tensor:
        """Return the layer's output with the weights of each point."""
        self._check_count(len(x))
        y = layer.op(x, self.known.to(self.dtype))
        return layer.scale_out(y, self._factors(self.q.event_shape[layer.out_dim], y))

    def draws(self, count: int) -> Tensor:
        """Return the weights of each point."""
        self._check_count(count)
        shape = self.q.event_shape
        factors = self._factors(shape[-1], self.known)
        return self.known * factors.reshape(count, *(1 for _ in shape[1:]), shape[-1])


def drawn_per_data_point(value: object) -> PerDataPoint | None:
    """Return the recipe behind a placeholder for weights drawn per data point, or None for any other value."""
    return getattr(value, MARK, None)


class Layer:
    """How a layer applies its weight to its input: which dimension is which, and how units are scaled.

    Args:
        op: the layer, bilinear in (input, weight), without its bias.
        in_dim: the weight's input dimension.
        out_dim: the weight's output dimension.
        channel: the dimension of input and output that indexes units.
        groups: how often the weight's input dimension (of a transposed convolution its output) repeats along the units.
        positions: whether one data point has several positions that share its draw.
    """

    def __init__(
        self, op: Product, in_dim: int, out_dim: int, *, channel: int = -1, groups: int = 1, positions: bool = False
    ) -> None:
        self.op, self.in_dim, self.out_dim, self.channel, self.positions = op, in_dim, out_dim, channel, positions
        transposed = in_dim == 0
        self.in_repeat, self.out_repeat = (1, groups) if transposed else (groups, 1)

    def by_input(self, x: Tensor, matrix: Tensor, rows: Tensor) -> Tensor:
        """Return the product with ``matrix``, its input units scaled by ``rows``, (N, in), for each data point."""
        if x.shape[self.channel] != self.in_repeat * rows.shape[-1]:
            return self.op(x, matrix)  # raises the layer's own error for x; scaling would broadcast one unit to all
        return self.op(_scale(x, rows, self.channel, self.in_repeat), matrix)

    def scale_out(self, y: Tensor, rows: Tensor) -> Tensor:
        """Multiply the output's units by ``rows``, (N, out) or (N, 1)."""
        return _scale(y, rows, self.channel, self.out_repeat if rows.shape[-1] > 1 else 1)


class MatrixProduct(Layer):
    """A product of inputs, (N, ..., in), with a matrix, whose dimension ``in_dim`` matches the input's last one."""

    def __init__(self, in_dim: int, positions: bool) -> None:
        op = torch.nn.functional.linear if in_dim else torch.matmul
        super().__init__(op, in_dim, 1 - in_dim, positions=positions)

    def together(self, x: Tensor, matrices: list[Tensor], scales: list[Tensor], row_dim: RowDim) -> Tensor:
        """Return the sum of the products with all matrices, their rows scaled, as one product.

        Either the scaled inputs lie side by side, (N, R·in), or the outputs do, (N, R·out), whichever are fewer.
        """
        if x.shape[-1] != matrices[0].shape[self.in_dim]:
            return self.op(x, matrices[0])  # raises the layer's own error
        shape = (len(x), *(1,) * (x.dim() - 2), len(scales), -1)
        rows = torch.stack(scales, 1).reshape(shape)
        by_input = x.shape[-1] < matrices[0].shape[self.out_dim] if isinstance(row_dim, str) else row_dim == self.in_dim
        side = self.in_dim if by_input else self.out_dim
        matrix = torch.stack(matrices, side).flatten(side, side + 1)
        if by_input:
            return self.op((x.unsqueeze(-2) * rows).flatten(-2), matrix)
        outputs: Tensor = self.op(x, matrix).unflatten(-1, (len(scales), -1))
        return (outputs * rows).sum(-2)


class Lookup(Layer):
    """An embedding: its input units are words, and each position picks one of them."""

    def by_input(self, x: Tensor, matrix: Tensor, rows: Tensor) -> Tensor:
        """Return the words' vectors, each scaled by its data point's number for that word."""
        picked = rows.gather(1, x.reshape(len(x), -1)).reshape(*x.shape, 1)
        return self.op(x, matrix) * picked


def _scale(x: Tensor, rows: Tensor, channel: int, repeat: int) -> Tensor:
    """Multiply dimension ``channel`` of x, data points first, by one number for each data point and unit."""
    if repeat > 1:
        rows = rows.repeat(1, repeat)
    shape = [1] * x.dim()
    shape[0], shape[channel] = rows.shape
    return x * rows.reshape(shape)
