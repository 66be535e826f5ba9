"""KL(q‖p) of row mixtures against a Gaussian prior: the paper's large-K form, the exact value, and the gap (Prop. 1).

Since H(w) = H(z) + H(w|z) - H(z|w), the exact divergence is the large-K form, constants kept, plus E[H(z|w)]: what a
draw of the weights still leaves unknown about which component it came from.
"""

import functools
import math
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from pyro.distributions.torch_distribution import ExpandedDistribution
from torch import Size, Tensor
from torch.distributions import Distribution, Independent, Normal, kl_divergence, register_kl

from pyro_dropout.errors import PyroDropoutError, ShapeError, SingularError
from pyro_dropout.mathematics.checks import check_choice, check_count
from pyro_dropout.mathematics.label_entropy import label_entropy
from pyro_dropout.mathematics.row_mixture_distribution import RowMixture
from pyro_dropout.mathematics.shapes import base_distribution, broadcast_shape, keeps_density
from pyro_dropout.mathematics.weight_distribution import LOG_2PI, drawn

Method = Literal["large_k", "exact", "monte_carlo"]
# Draws are made in blocks of about this many numbers, so that a million samples need no million-fold memory.
_BLOCK = 2**22


def _prior(q: RowMixture, p: Distribution) -> tuple[Tensor, Tensor]:
    """Return the prior's mean and log standard deviation by rows, (*batch, rows, rest), or 1 where they repeat."""
    base = base_distribution(p, ExpandedDistribution)
    if not keeps_density(base, Normal):
        raise PyroDropoutError(f"p must be a Gaussian prior, torch's or Pyro's Normal; got {type(p).__name__}.")
    shape = p.batch_shape + p.event_shape
    try:
        shape = broadcast_shape(shape, q.event_shape)
    except ValueError:
        raise ShapeError(
            f"p must broadcast to the weights, shape {tuple(q.event_shape)}; got {tuple(shape)}."
        ) from None
    loc, scale = (compact(q.to_rows(t.to(q.like).expand(shape))) for t in (base.loc, base.scale))
    return loc, scale.log()


def _large_k(q: RowMixture, p: Distribution) -> Tensor:
    """Return Σ_r Σ_l π_rl KL(N_l‖p) - H(z); at scale=0 without the terms in σ, which nothing moves."""
    loc, log_prior = _prior(q, p)
    precision, size = torch.exp(-2 * log_prior), (q.rows, q.rest)
    diagonal, low_rank = _half_log_dets(q)
    # The normaliser of the prior is part of ½(l²σ² - log l²σ² - 1); with σ = 0 it goes too, unless l is being learned.
    normalised = not q.noiseless or log_prior.requires_grad
    probs = compact(q.probs)
    log_probs = probs.clamp_min(torch.finfo(probs.dtype).tiny).log()  # 0·log 0 = 0, with a finite slope
    total = _total(probs * log_probs, (q.rows, q.components))
    for label in range(q.components):
        # Where all rows have the same probability, it is a factor of one sum over all weights.
        by_row = None if len(probs) == 1 else probs[:, label].unsqueeze(-1)
        # ½(tr Λ Σ_l + m_lᵀ Λ m_l) - Σ log l, with Λ = l² the prior precision
        weighed = [_weighted(precision, each, size, by_row) for each in _squares(q, label, loc)]
        found = 0.5 * functools.reduce(torch.add, weighed)
        if normalised:
            found = found + _total(log_prior, size, by_row)
        half = [_total(values[min(label, len(values) - 1)], size, by_row) for values in diagonal]
        half += [_total(values[min(label, len(values) - 1)], (q.rows, 1), by_row) for values in low_rank]
        found = found - functools.reduce(torch.add, half) if half else found
        total = total + (probs[0, label] * found if by_row is None else found)
    return total


def _squares(q: RowMixture, label: int, loc: Tensor) -> list[Tensor]:
    """Return tensors by rows whose sum is E[(w - loc)²] under one component."""
    squares = [_square_distance(q, label, loc)]
    if not q.noiseless:
        squares.append(compact(q.to_rows(q.scale)[min(label, q.scale.shape[0] - 1)]).square())
    if (added := q.factor_variance()) is not None:
        squares.append(added[min(label, len(added) - 1)])
    # What has a number for every weight is summed in one pass; what is one number for many is not blown up first.
    dense = [each for each in squares if each.shape[-2:] == (q.rows, q.rest)]
    terms = [each for each in squares if each.shape[-2:] != (q.rows, q.rest)]
    return [*terms, functools.reduce(torch.add, dense)] if dense else terms


def compact(values: Tensor) -> Tensor:
    """Return a tensor with one element along every dimension in which it repeats itself: a number is not a matrix."""
    for d, (size, stride) in enumerate(zip(values.shape, values.stride(), strict=True)):
        if stride == 0 and size > 1:
            values = values.narrow(d, 0, 1)
    return values


def _total(values: Tensor, size: tuple[int, int], by_row: Tensor | None = None) -> Tensor:
    """Sum over rows and their weights, each row with its factor; one value may stand for all along a dimension."""
    values = values if by_row is None else by_row * values
    repeats = [count for count, held in zip(size, values.shape[-2:], strict=True) if held == 1]
    # Along memory first: a compiled step can make these sums on the way, where it reads the weights to update them.
    inner = -1 if values.stride(-1) <= values.stride(-2) else -2
    return values.sum(inner, keepdim=True).sum((-2, -1)) * math.prod(repeats)


def _weighted(precision: Tensor, squares: Tensor, size: tuple[int, int], by_row: Tensor | None) -> Tensor:
    """Sum ``precision * squares`` over weights; a precision that they all share is multiplied with the sum."""
    if precision.shape[-2:] == (1, 1):
        return precision.squeeze(-1).squeeze(-1) * _total(squares, size, by_row)
    return _total(precision * squares, size, by_row)


def _square_distance(q: RowMixture, label: int, loc: Tensor) -> Tensor:
    """Return (mean - loc)² by rows; unlike the difference squared, it keeps nothing for its gradient but its inputs."""
    mean = q.means[label]
    if mean is None:
        return loc.square()
    # In the layout of the weights: torch goes over a transposed tensor and a broadcast one number by number.
    target = q.from_rows(loc.expand(*loc.shape[:-2], q.rows, q.rest))
    left, right = torch.broadcast_tensors(mean, target)
    return q.to_rows(F.mse_loss(left, right, reduction="none"))


def _half_log_dets(q: RowMixture) -> tuple[list[Tensor], list[Tensor]]:
    """Return ½(log det Σ_l + K), by weights and by rows, (1 or L, rows, ...); at scale=0 without the terms in σ."""
    if not q.singular:
        extra = q.low_rank_log_det()
        return [compact(q.to_rows(q.scale)).log() + 0.5], [] if extra is None else [extra.unsqueeze(-1) / 2]
    if not q.noiseless:
        raise SingularError("kl needs scale to be 0 for all weights or for none.")
    if q.cov_factor is None:
        return [], []
    # As σ → 0, log det(σ²I + VVᵀ) = (K - R) log σ² + log det VᵀV, and the second part moves with V.
    factor = q.cov_factor
    one = factor.shape[-1] == 1  # one direction, as of multiplicative noise, needs no matrix
    log_det = factor.square().sum((-2, -1)).log() if one else torch.linalg.slogdet(factor.mT @ factor)[1]
    return [], [log_det.unsqueeze(-1) / 2]


def _sampled_gap(q: RowMixture, num_samples: int) -> Tensor:
    """Estimate E[H(z|w)] with every component visited in proportion (no draw of z) and mirrored noise."""
    half = max(1, (num_samples + 1) // 2)
    block = max(1, _BLOCK // max(1, 2 * q.rows * q.rest))
    total = q.like.new_zeros(q.rows)
    for start in range(0, half, block):
        n = min(block, half - start)
        for label in range(q.components):
            noise = drawn(torch.randn, (n, q.rows, q.rest), q.like)
            eta = q.sample_coefficients((n, q.rows))
            labels = torch.full((2 * n, q.rows), label, device=q.like.device)
            mirrored = None if eta is None else torch.cat([eta, -eta])
            log_r = torch.log_softmax(q.log_joint(labels, torch.cat([noise, -noise]), mirrored), 0)
            entropy = -(log_r.exp() * log_r.clamp_min(-1e4)).sum(0)
            total = total + q.probs[:, label] * entropy.sum(0)
    return total.sum() / (2 * half)


def kl_gap(q: RowMixture, *, num_samples: int = 64) -> Tensor:
    """How much the large-K form understates the KL: E[H(z | w)] summed over rows, in nats.

    For two components with a shared covariance it is a one-dimensional integral a row, evaluated to machine precision.
    Otherwise it is estimated without bias from ``num_samples`` draws of each component; one component has no gap. At
    ``scale=0`` a row tells its label exactly, unless its components coincide.

    Equation: prop1-gap.

    Args:
        q: the mixture.
        num_samples: draws of each component where there is no closed form.

    Returns:
        A scalar between 0 and H(z), differentiable in the parameters of ``q``.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> loc = torch.zeros(4, 1, dtype=torch.float64)
        >>> loc[:, 0] = 1.0  # one row of four weights: d = 2 for scale 1
        >>> f"{pdrop.paper.kl_gap(pdrop.paper.BernoulliMixture(loc, keep=0.5, scale=1.0)).item():.8f}"
        '0.35631636'
    """
    check_count("num_samples", num_samples)
    if not isinstance(q, RowMixture):
        raise PyroDropoutError(f"q must be a RowMixture or its kin, such as BernoulliMixture; got {type(q).__name__}.")
    if q.components == 1:
        return q.like.new_zeros(())
    if q.components == 2 and q.shared_covariance:
        return label_entropy(q.probs, q.separation_sq()).sum()
    if q.singular:
        raise SingularError(
            "kl_gap at scale=0 is known for two components with one scale only: elsewhere a draw on a point mass has no"
            " density to weigh the components by. Use scale > 0."
        )
    return _sampled_gap(q, num_samples)


def _monte_carlo(q: RowMixture, p: Distribution, num_samples: int) -> Tensor:
    loc, log_prior = _prior(q, p)
    block = max(1, _BLOCK // max(1, q.rows * q.rest))
    total = q.like.new_zeros(())
    for start in range(0, num_samples, block):
        w = q.rsample((min(block, num_samples - start), *[1] * (loc.dim() - 2)))
        standard = (q.to_rows(w) - loc) * torch.exp(-log_prior)
        log_p = (-0.5 * (standard.square() + LOG_2PI) - log_prior).sum((-2, -1))
        each, log_label = q.log_prob(w) - log_p, q.label_log_prob()
        if log_label.requires_grad:  # no path leads from a label to its probability; the score of the labels does
            each = each + each.detach() * (log_label - log_label.detach())
        total = total + each.sum(0)
    return total / num_samples


def kl(q: Distribution, p: Distribution, method: Method = "large_k", *, num_samples: int = 1000) -> Tensor:
    """KL(q‖p) between a posterior over weights and its Gaussian prior.

    ``"large_k"`` is the paper's form with its constants: a lower bound on the KL, off by the gap. ``"exact"`` adds the
    gap: to machine precision for two components with a shared covariance, and elsewhere by an unbiased estimate of low
    variance. ``"monte_carlo"`` averages log q - log p over draws and assumes nothing.

    At ``scale=0`` the true KL is infinite. What is returned then leaves out ½(l²σ² - log l²σ² - 1) a weight, which no
    parameter moves (log l stays where l is learned), and keeps the rest: ½ l² p ‖m‖² - H(z) a row of a dropout layer.
    Gradients are right, and values compare within one guide only.

    Equation: prop1.

    Args:
        q: a ``RowMixture`` or its kin; any other distribution goes to ``torch.distributions.kl_divergence``.
        p: a Gaussian prior, ``Normal`` with or without ``Independent``, that broadcasts to the weights; N(0, l⁻²) has
            standard deviation 1/l.
        method: "large_k", "exact" or "monte_carlo".
        num_samples: draws for "monte_carlo", and for the gap of mixtures that have no closed form.

    Returns:
        The divergence in nats, one number for each batch of ``q`` and ``p``.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> q = pdrop.paper.BernoulliMixture(torch.full((3, 2), 0.5, dtype=torch.float64), keep=0.9, scale=0.1)
        >>> prior = torch.distributions.Normal(0.0, 1.0)
        >>> large_k, exact = pdrop.paper.kl(q, prior), pdrop.paper.kl(q, prior, "exact")
        >>> bool(torch.isclose(exact - large_k, pdrop.paper.kl_gap(q)))
        True
    """
    check_choice("method", method, get_args(Method))
    check_count("num_samples", num_samples)
    if not isinstance(q, RowMixture):
        try:
            return kl_divergence(q, p)
        except NotImplementedError:
            raise PyroDropoutError(
                f"q must be a RowMixture or its kin, or q and p a pair that torch's kl_divergence knows; got"
                f" {type(q).__name__} and {type(p).__name__}."
            ) from None
    if method == "monte_carlo":
        if q.singular:
            raise SingularError(
                "kl by Monte Carlo needs a density, and at scale=0 there is none (the KL is infinite). Use scale > 0,"
                " or method='large_k', which leaves the infinite constant out."
            )
        value = _monte_carlo(q.expand(Size()), p, num_samples)
    else:
        value = _large_k(q, p)
        if method == "exact":
            value = value + kl_gap(q, num_samples=num_samples)
    full = p.batch_shape + p.event_shape
    return value.expand(broadcast_shape(q.batch_shape, full[: max(0, len(full) - len(q.event_shape))]))


def _by_formula(q: RowMixture, p: Distribution) -> Tensor:
    """Return the large-K value, or say as torch does that there is no formula, so that a loss may sample instead."""
    if not keeps_density(base_distribution(p, ExpandedDistribution), Normal):
        raise NotImplementedError
    return kl(q, p)


# torch's own door gives the large-K value: it needs no samples and no quadrature. A prior over a weight tensor is an
# Independent, so that pair is named too.
for _family in (Normal, Independent):
    register_kl(RowMixture, _family)(_by_formula)
