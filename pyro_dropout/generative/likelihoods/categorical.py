"""One of several classes, by the softmax of the outputs."""

import pyro.distributions as dist
import torch
import torch.nn.functional as F
from torch import Size, Tensor

from pyro_dropout.errors import RangeError, ShapeError
from pyro_dropout.generative.likelihoods.likelihood import Dims, Likelihood, OutputShape, stays
from pyro_dropout.protocols import Distribution
from pyro_dropout.registry import likelihood


class _Classes(dist.Categorical):
    """Pyro's Categorical, with a log density whose gradient scatters nothing: it fuses where it is compiled.

    Targets with the value ``ignored`` have the log density 0: they are not data.
    """

    ignored: int | None = None

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log probability of class indices, (*batch_shape)."""
        known = None if self.ignored is None else value != self.ignored
        value = value if known is None else torch.where(known, value, 0)
        found: Tensor
        if value.shape != self.batch_shape or value.is_floating_point():
            found = super().log_prob(value)  # type: ignore[no-untyped-call]
        else:
            logits = self.logits.reshape(-1, self.logits.shape[-1])
            found = -F.nll_loss(logits, value.reshape(-1), reduction="none").reshape(value.shape)
        return found if known is None else torch.where(known, found, 0.0)

    def expand(self, batch_shape: Size | list[int] | tuple[int, ...], _instance: object = None) -> "_Classes":
        """Return the same distribution in larger plates."""
        made: _Classes = super().expand(batch_shape, _instance)  # type: ignore[no-untyped-call]
        made.ignored = self.ignored
        return made


@likelihood("categorical", outputs=3)
class Categorical(Likelihood):
    """One of C classes by the softmax of the outputs (eq. 5, Prop. 2); ``y`` holds class indices, (N,).

    The outputs are logits. A network that ends in ``nn.Softmax`` must lose that layer, or end in ``nn.LogSoftmax``.

    Args:
        dims: the shape of the network's output at one point if every point has many targets, such as (T, C) for the
            tokens of a text or (C, H, W) for a map of classes; one size may be None, if it differs from batch to batch.
            ``y`` is then (N, T) or (N, H, W), and probabilities are (N, T, C) or (N, H, W, C).
        dim: which of ``dims`` holds the classes.
        ignore_index: a value of ``y`` that is not a class: such targets have no likelihood, and no score counts them.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> pdrop.Categorical().distribution(torch.zeros(3, 4)).probs[0].tolist()
        [0.25, 0.25, 0.25, 0.25]
        >>> tokens = pdrop.Categorical(dims=(None, 4), ignore_index=-100)
        >>> p = tokens.distribution(tokens.flattened(torch.zeros(1, 3, 4)))  # a text of three tokens
        >>> torch.allclose(p.log_prob(torch.tensor([[2, 0, -100]])).exp(), torch.tensor([0.25**2]))
        True
    """

    standardised_targets = stays

    def __init__(self, dims: Dims | None = None, dim: int = -1, ignore_index: int | None = None) -> None:
        super().__init__()
        self.shape = None if dims is None else OutputShape(dims, dim)
        if ignore_index is not None and (isinstance(ignore_index, bool) or not isinstance(ignore_index, int)):
            raise RangeError(f"ignore_index must be a whole number, such as -100, or None; got {ignore_index!r}.")
        self.ignore_index = ignore_index

    def logits(self, f: Tensor) -> Tensor:
        """Return outputs (..., N, D) with the classes last, (..., N, *positions, C)."""
        return f if self.shape is None else self.shape.whole(f).movedim(self.shape.from_end, -1)

    def distribution(self, f: Tensor) -> Distribution:
        """Return the softmax of ``f`` over its classes."""
        classes = _Classes(logits=self.logits(f), validate_args=False)
        classes.ignored = self.ignore_index
        event = 0 if self.shape is None else len(self.shape.dims) - 1
        return classes.to_event(event) if event else classes  # type: ignore[no-untyped-call]

    def checked(self, f: Tensor, y: Tensor) -> Tensor:
        """Return ``y`` if it holds whole numbers, one for each position of each point."""
        wanted = tuple(f.shape[-2:-1]) + (() if self.shape is None else self.shape.positions(f))
        if y.shape != wanted:
            where = "a point" if self.shape is None else "a position"
            raise ShapeError(f"y must hold one class index {where}, shape {wanted}; got {tuple(y.shape)}.")
        if y.is_floating_point() or y.is_complex():
            raise RangeError(f"y must hold class indices of an integer type; got {y.dtype}. Write y.long().")
        return y.long()

    def curvature_root(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        """Return the Cholesky root of diag p - p pᵀ at each position, C - 1 columns; zero where ``y`` is ignored."""
        p = self.distribution(f).base_dist.probs if self.shape is not None else self.distribution(f).probs
        root = _class_root(p)  # (..., N, *positions, C, C - 1)
        if y is not None and self.ignore_index is not None:
            root = root * (y != self.ignore_index)[..., None, None]
        if self.shape is None:
            return root
        # One block for each position, in the order that the outputs have in a row.
        places = self.shape.whole(torch.arange(f.shape[-1], device=f.device)).movedim(self.shape.from_end, -1)
        at = places.reshape(-1, self.shape.parts)
        whole = f.new_zeros(*f.shape, f.shape[-1])
        whole[..., at[:, :, None], at[:, None, :-1]] = root.flatten(f.dim() - 1, -3)
        return whole

    def check_values(self, f: Tensor, y: Tensor) -> None:
        """Raise unless every target is the index of a class."""
        classes = f.shape[-1] if self.shape is None else self.shape.parts
        known = y if self.ignore_index is None else y[y != self.ignore_index]
        if not known.numel():
            raise RangeError(f"y must hold class indices, and not ignore_index={self.ignore_index} alone.")
        low, high = int(known.min()), int(known.max())
        if low < 0 or high >= classes:
            raise RangeError(f"y must hold class indices from 0 to {classes - 1}; got {low} to {high}.")


def _class_root(p: Tensor) -> Tensor:
    """Return L, (..., C, C - 1), with L Lᵀ = diag p - p pᵀ; no difference of numbers near 1 is taken.

    With the tails s_j = Σ_{k≥j} p_k, L_jj² = p_j s_{j+1}/s_j and L_ij = -p_i √(p_j/(s_j s_{j+1})) below.
    """
    tails = p.flip(-1).cumsum(-1).flip(-1)
    tiny = torch.finfo(p.dtype).tiny
    own, rest, whole = p[..., :-1], tails[..., 1:], tails[..., :-1].clamp_min(tiny)
    diagonal = (own * (rest / whole)).sqrt()
    # p_i/√s_{j+1} is at most √s_{j+1}: the quotient is taken first, so that nothing overflows.
    below = -(p.unsqueeze(-1) / rest.clamp_min(tiny).sqrt().unsqueeze(-2)) * (own / whole).sqrt().unsqueeze(-2)
    return below.tril(-1) + F.pad(torch.diag_embed(diagonal), (0, 0, 0, 1))
