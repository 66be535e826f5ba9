"""Mixtures of Gaussians over the rows of a weight tensor: the family that dropout and related methods belong to (§5).

A row of the paper's W is what one input unit sends onward; in torch's layout it is a column of ``Linear.weight`` and an
input channel of a convolution, which is why ``row_dim`` is 1 by default. All weights of a row share one label z.
"""

import functools
import itertools
import weakref
from collections.abc import Sequence
from typing import cast

import torch
from torch import Size, Tensor

from pyro_dropout.errors import PyroDropoutError, RangeError, ShapeError, SingularError
from pyro_dropout.mathematics.checks import check_finite, check_non_negative, check_shape, describe
from pyro_dropout.mathematics.gaussian_rows import Factor, low_rank_factor, mahalanobis, standardise
from pyro_dropout.mathematics.mixtures import mixture_quantile
from pyro_dropout.mathematics.shapes import Float, Int, RowDim, RowLayout, broadcast_shape
from pyro_dropout.mathematics.weight_distribution import (
    LOG_2PI,
    Draw,
    WeightDistribution,
    as_like,
    drawn,
    is_placeholder,
    no_density,
)


class RowMixture(WeightDistribution):
    """A weight tensor whose rows are drawn independently, each from a mixture of L Gaussians.

    With one component it is a Gaussian, with a component at zero it is dropout, with ``cov_factor`` its rows have a
    low-rank covariance. ``scale=0`` is allowed and singular: samples and moments exist, a density does not.

    Equation: sec5-row-mixture.

    Args:
        locs: component means, (L, *shape); the event is a tensor of ``shape``.
        scale: standard deviation σ >= 0 of each weight, broadcast to ``locs``: a number, or (*shape) to share it among
            components, or (L, *shape).
        probs: component probabilities, (L,) or (rows, L), summing to one.
        row_dim: the dimension of ``shape`` that indexes rows; None makes every weight a separate row, and "all" makes
            the whole tensor one row.
        cov_factor: V, (L, rows, rest, R), or (1, rows, rest, R) to share it; adds V Vᵀ to each row's covariance.
        validate_args: check the values once, here; on by default.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> locs = torch.stack([torch.ones(2, 3), -torch.ones(2, 3)])
        >>> q = pdrop.paper.RowMixture(locs, 0.1, torch.tensor([0.75, 0.25]))
        >>> q.event_shape, q.mean[0].tolist(), q.sample((5,)).shape
        (torch.Size([2, 3]), [0.5, 0.5, 0.5], torch.Size([5, 2, 3]))
    """

    has_rsample = True  # in means and widths; the probabilities of labels have no path
    # In a guide, a missing density is an error when a loss uses it, not when a trace computes it.
    lenient = False
    site = ""  # for that error: the site that is drawn
    relative: Tensor | None = None  # √α of each row, where the factor of the only component is √α times its mean

    def __init__(
        self,
        locs: Float[Tensor, "L *shape"],
        scale: float | Tensor,
        probs: Tensor,
        row_dim: RowDim = 1,
        cov_factor: Tensor | None = None,
        *,
        validate_args: bool | None = None,
    ) -> None:
        if validate_args is not False:
            check_finite("locs", locs)
        check_shape(locs.dim() > 0 and len(locs) > 0, "locs", "(L, *shape), a mean for each component", locs)
        self._build(list(apart(locs)), scale, probs, row_dim, cov_factor, validate_args is not False)

    def _build(
        self,
        means: list[Tensor | None],
        scale: float | Tensor,
        probs: Tensor,
        row_dim: RowDim,
        cov_factor: Tensor | None,
        validate: bool,
    ) -> None:
        """Set up the mixture from its component means; None is a mean of zero, which costs nothing."""
        self._validate = validate
        self.means = means
        self.like = next(mean for mean in means if mean is not None)  # for dtype, device and shape
        shape = self.like.shape
        self.components = len(means)
        self.layout = RowLayout(shape, row_dim)
        self.row_dim, self.rows, self.rest = self.layout.row_dim, self.layout.rows, self.layout.rest
        self.to_rows, self.from_rows, self.per_row = self.layout.to_rows, self.layout.from_rows, self.layout.per_row
        self.probs = self._check_probs(probs).expand(self.rows, self.components)
        self.scale = self._check_scale(scale)
        self._cov_factor = self._check_cov_factor(cov_factor)
        # A plain number can be compared with zero while tracing; a tensor is read only where reading is allowed.
        zero = scale == 0 if self._validate or not isinstance(scale, Tensor) else False
        self.singular = bool(zero.any()) if isinstance(zero, Tensor) else zero
        self.noiseless = bool(zero.all()) if isinstance(zero, Tensor) else zero
        super().__init__(Size(), shape, validate_args=False)

    def _check_probs(self, probs: Tensor) -> Tensor:
        allowed = ((self.components,), (1, self.components), (self.rows, self.components))
        if not isinstance(probs, Tensor) or tuple(probs.shape) not in allowed:
            got = tuple(probs.shape) if isinstance(probs, Tensor) else repr(probs)
            raise ShapeError(f"probs must have shape {allowed[0]} or {allowed[2]}, one per component; got {got}.")
        if self._validate:
            check_non_negative("probs", probs)
            if not bool(((probs.sum(-1) - 1).abs() < 1e-5).all()):
                raise RangeError(f"probs must sum to 1 over components; the sums are {describe(probs.sum(-1))}.")
        return probs.to(self.like)

    def _check_scale(self, scale: float | Tensor) -> Tensor:
        if self._validate:
            check_non_negative("scale", scale)
        given = as_like(scale, self.like)
        if given.shape == (shape := self.like.shape):
            return given.unsqueeze(0)
        shared = given.dim() <= len(shape) or given.shape[0] == 1
        try:
            return given.expand(1 if shared else self.components, *shape)
        except RuntimeError:
            allowed = f"to the components, shape {(self.components, *shape)}"
            raise ShapeError(f"scale must broadcast {allowed}; got {tuple(given.shape)}.") from None

    def _check_cov_factor(self, cov_factor: Tensor | None) -> Tensor | None:
        if cov_factor is None:
            return None
        if self._validate:
            check_finite("cov_factor", cov_factor)
        fits = tuple(cov_factor.shape[:-1]) in {(n, self.rows, self.rest) for n in (1, self.components)}
        allowed = f"(L, rows, rest, R) = ({self.components}, {self.rows}, {self.rest}, R), or 1 for L"
        check_shape(fits, "cov_factor", allowed, cov_factor)
        return cov_factor

    @property
    def cov_factor(self) -> Tensor | None:
        """V, (1 or L, rows, rest, R), which adds V Vᵀ to each row's covariance; None where it is diagonal."""
        return self._cov_factor

    def factor_variance(self) -> Tensor | None:
        """Return what V adds to the variance of each weight, (1 or L, rows, rest); None where there is no V."""
        return None if self.cov_factor is None else self.cov_factor.square().sum(-1)

    def component_variance(self) -> Tensor:
        """Return the variance of each weight under each component, (1 or L, *shape)."""
        added = self.factor_variance()
        return self.scale.square() if added is None else self.scale.square() + self.from_rows(added)

    @property
    def locs(self) -> Tensor:
        """The means of all components, (L, *shape)."""
        return torch.stack([torch.zeros_like(self.like) if mean is None else mean for mean in self.means])

    def mean_rows(self, label: int) -> Tensor | float:
        """Return one component's mean by rows, (rows, rest), or 0."""
        mean = self.means[label]
        return 0.0 if mean is None else self.to_rows(mean)

    @property
    def shared_covariance(self) -> bool:
        """Whether all components have one covariance, so that the label's log-odds are normal."""
        return self.scale.shape[0] == 1 and (self.cov_factor is None or self.cov_factor.shape[0] == 1)

    def log_probs(self) -> Float[Tensor, "rows components"]:
        """Return log p(z = l) for each row; finite where a probability is 0."""
        return self.probs.clamp_min(torch.finfo(self.probs.dtype).tiny).log()

    def log_scale(self) -> Float[Tensor, "components rows rest"]:
        """Return log σ by rows, (1 or L, rows, rest)."""
        return self.to_rows(self.scale).log()

    def factor(self) -> Factor | None:
        """Return the factorised low-rank part of the rows' covariances, or None where there is none."""
        return None if self.cov_factor is None else low_rank_factor(self.cov_factor, self.log_scale())

    def low_rank_log_det(self) -> Tensor | None:
        """Return log det(I + AAᵀ) of every component and row, A = V/σ; None without a low-rank part."""
        factor = self.factor()
        return None if factor is None else factor.log_det

    def separation_sq(self) -> Float[Tensor, "rows"]:
        """Return d² for each row: the squared distance of two components in units of their shared covariance."""
        if self.components != 2 or not self.shared_covariance:
            raise ShapeError("the separation of a row is defined for two components with a shared covariance.")
        difference = torch.as_tensor(self.mean_rows(0) - self.mean_rows(1))
        if self.singular:  # the limit σ → 0: equal means are at distance 0, all others at infinity
            return torch.where(difference.abs().amax(-1) > 0, torch.inf, 0.0).to(difference)
        standard = standardise(difference, self.log_scale()[0]).unsqueeze(0)
        return mahalanobis(standard, self.factor()).squeeze(0)

    def _draw_levels(self, sample_shape: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        """Draw u for each row, and return the levels that divide its values among the components."""
        # The last component takes the rest, so that rounding in the sums cannot leave any value out.
        levels = list(itertools.accumulate(self.probs.unbind(-1)[:-1]))
        return drawn(torch.rand, (*sample_shape, *self.batch_shape, self.rows), self.like), levels

    def sample_labels(self, sample_shape: Sequence[int] = ()) -> Int[Tensor, "*batch rows"]:
        """Draw one component label for each row."""
        if self.components == 1:  # nothing to draw
            shape = (*sample_shape, *self.batch_shape, self.rows)
            return torch.zeros(shape, dtype=torch.long, device=self.like.device)
        u, levels = self._draw_levels(sample_shape)
        return functools.reduce(torch.add, [(u >= level).long() for level in levels])

    def sample_masks(self, sample_shape: Sequence[int] = ()) -> list[Tensor]:
        """Draw which component each row takes, as one mask (*sample_shape, *batch_shape, rows) for each."""
        u, levels = self._draw_levels(sample_shape)
        below = [(u < level).to(u.dtype) for level in levels]
        return [*below[:1], *(high - low for low, high in itertools.pairwise(below)), 1 - below[-1]]

    def sample_coefficients(self, shape: Sequence[int]) -> Tensor | None:
        """Draw η, (*shape, R), for rows of shape ``shape``; None without a low-rank part."""
        return None if self.cov_factor is None else drawn(torch.randn, (*shape, self.cov_factor.shape[-1]), self.like)

    def check_labels(self) -> None:
        """Raise if labels are drawn with trained probabilities: no gradient would reach these."""
        if self.components > 1 and self.probs.requires_grad and torch.is_grad_enabled():
            raise PyroDropoutError(
                "the probabilities of a RowMixture's components cannot be trained: a drawn label has no gradient in its"
                " probability. Detach probs; AutoConcreteDropout learns how much to drop."
            )

    def __call__(self, sample_shape: Sequence[int] = (), *args: object, **kwargs: object) -> Tensor:
        """Draw for a guide, whose loss takes the gradient of the draw."""
        self.check_labels()
        return self.rsample(Size(sample_shape))

    def _pick(self, labels: Tensor, choices: Tensor | list[Tensor | float]) -> Tensor:
        """Return for each row the one of ``choices`` (1 or L of them, broadcastable) that its label selects."""
        picked = choices[0]
        for label in range(1, len(choices)):
            picked = torch.where(labels == label, choices[label], picked)
        return torch.as_tensor(picked)

    def _assemble(self, labels: Tensor, noise: Tensor, coefficients: Tensor | None) -> Tensor:
        """Return w = m_z + σ_z ε + V_z η by rows."""
        z = labels.unsqueeze(-1)
        value = self._pick(z, [self.mean_rows(label) for label in range(self.components)])
        if not self.noiseless:
            value = value + self._pick(z, self.to_rows(self.scale)) * noise
        if self.cov_factor is not None and coefficients is not None:
            spread = (self.cov_factor @ coefficients.unsqueeze(-1).unsqueeze(-4)).squeeze(-1)
            value = value + self._pick(z, spread.movedim(-3, 0))
        return value

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Draw weights, (*sample_shape, *batch_shape, *shape); differentiable in everything but ``probs``."""
        labels, like = self.sample_labels(sample_shape), self.like
        noise = like.new_zeros(()) if self.noiseless else drawn(torch.randn, (*labels.shape, self.rest), like)
        coefficients = self.sample_coefficients(labels.shape)
        value = self.from_rows(self._assemble(labels, noise, coefficients))
        self._draw = Draw(weakref.ref(value), labels, noise, coefficients)
        return value

    def log_joint(
        self, labels: Tensor | None, noise: Tensor, coefficients: Tensor | None = None
    ) -> Float[Tensor, "components *batch rows"]:
        """Return log p(z=l) + log N(w; m_l, Σ_l) of each row under every component l.

        Without ``labels``, ``noise`` is w itself by rows. With them, w = m_z + σ_z ε + V_z η is given by its parts, so
        that its density under component z does not suffer from the rounding of the sum.
        """
        log_scale, factor = self.log_scale(), self.factor()
        locs = [self.mean_rows(label) for label in range(self.components)]
        log_probs = self.log_probs()
        if labels is not None:
            z = labels.unsqueeze(-1)
            start = self._pick(z, locs) if self.shared_covariance else self._assemble(labels, noise, coefficients)
        terms = []
        for label in range(self.components):
            shared = min(label, log_scale.shape[0] - 1)
            eta, part = coefficients, None
            if factor is not None:
                part = Factor(*(each[min(label, len(each) - 1)] for each in vars(factor).values()))
            if labels is None:
                residual = standardise(noise - locs[label], log_scale[shared])
            elif self.shared_covariance:
                residual = noise + standardise(start - locs[label], log_scale[shared])
            else:
                own = z == label
                residual = torch.where(own, noise, standardise(start - locs[label], log_scale[shared]))
                eta = None if coefficients is None else torch.where(own, coefficients, 0.0)
            log_det = 2 * log_scale[shared].sum(-1) + (0.0 if part is None else part.log_det)
            terms.append(log_probs[:, label] - 0.5 * (mahalanobis(residual, part, eta) + log_det + self.rest * LOG_2PI))
        return torch.stack(torch.broadcast_tensors(*terms))

    def label_log_prob(self) -> Tensor:
        """Return log p(z) of the labels of the last draw, (*sample_shape, *batch_shape)."""
        assert self._draw is not None
        labels = cast(Tensor, self._draw.labels)
        return self._pick(labels.unsqueeze(-1), self.log_probs().mT.unsqueeze(-1)).sum((-2, -1))

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density of ``value``; for the last draw it is computed from the noise that made it."""
        if self.lenient and (self.singular or is_placeholder(value)):
            lead = value.shape[: value.dim() - len(self.event_shape)]
            return no_density(value, broadcast_shape(lead, self.batch_shape), self.site)
        if self.singular:
            raise SingularError(
                f"{type(self).__name__} has no density at scale=0: its draws lie on a set of volume zero, and KL(q||p)"
                " is infinite. Use scale > 0 for a density, or compare predictive scores, which need none."
            )
        self._check_value(value)
        made = self._made_of(value)
        joint = self.log_joint(None, self.to_rows(value)) if made is None else self.log_joint(*made[1:])
        total = torch.logsumexp(joint, 0).sum(-1)
        return total.expand(broadcast_shape(total.shape, self.batch_shape))

    def _center(self) -> Tensor:
        probs = self.per_row(self.probs.mT)
        parts = [p * mean for p, mean in zip(probs, self.means, strict=True) if mean is not None]
        return torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]

    @property
    def mean(self) -> Tensor:
        """E[w], (*batch_shape, *shape)."""
        return self._center().expand(self._extended_shape())

    @property
    def variance(self) -> Tensor:
        """Var[w] of each weight, (*batch_shape, *shape)."""
        spread = self.component_variance() + (self.locs - self._center()).square()
        return (self.per_row(self.probs.mT) * spread).sum(0).expand(self._extended_shape())

    def icdf(self, value: Tensor) -> Tensor:
        """Return a quantile of each weight by itself, at one level."""
        scale = self.component_variance().sqrt().expand(self.locs.shape)
        found = mixture_quantile(self.locs, scale, float(value), self.per_row(self.probs.mT))
        return found.to(self.like).expand(self._extended_shape())

    def covariance_root(self, rows: Float[Tensor, "B *shape"]) -> Float[Tensor, "B columns"]:
        """Return root with root rootᵀ = rows Cov[w] rowsᵀ; Cov[w_r] = Σ_l π_l (diag σ_l² + Δ_l Δ_lᵀ + V_l V_lᵀ)."""
        by_row, probs = self.to_rows(rows), self.probs.mT  # (B, R, rest) and (L, R)
        found = []
        if not self.noiseless:
            variance = (self.per_row(probs) * self.scale.square()).sum(0)
            found.append((rows * variance.sqrt()).reshape(len(rows), -1))
        if self.components > 1:
            apart = self.to_rows(self.locs - self._center()) * probs.sqrt().unsqueeze(-1)
            found.append(torch.einsum("brk,lrk->brl", by_row, apart).flatten(1))
        if self.cov_factor is not None:
            # One V that all components share needs its columns once: the probabilities sum to 1.
            shared = len(self.cov_factor) == 1
            factor = self.cov_factor if shared else self.cov_factor * probs.sqrt()[..., None, None]
            found.append(torch.einsum("brk,lrkq->brlq", by_row, factor).flatten(1))
        return torch.cat(found, -1) if found else rows.new_zeros(len(rows), 0)

    def __repr__(self) -> str:
        rank = "" if self.cov_factor is None else f", rank={self.cov_factor.shape[-1]}"
        return (
            f"{type(self).__name__}(event_shape={tuple(self.event_shape)}, components={self.components},"
            f" row_dim={self.row_dim}{rank}, singular={self.singular})"
        )


def apart(stacked: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors along the first dimension; the gradient of a single one is a view, and not a copy."""
    return (stacked.squeeze(0),) if len(stacked) == 1 else stacked.unbind(0)
