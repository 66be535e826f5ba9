"""Linearised predictions: f(x, w) ≈ f(x, E w) + J(x)(w - E w), so that f is Gaussian with the covariance J Σ Jᵀ.

Σ is the covariance of the guide's weights, and never formed: the guide gives a root of J Σ Jᵀ. For an ensemble, each
member is linearised at its own mean.
"""

from collections.abc import Callable, Sequence
from typing import cast

import torch
from pyro.distributions import Delta
from torch import Tensor
from tqdm.auto import tqdm

from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.generative.inputs import AnyInputs, copies, takes_all
from pyro_dropout.generative.jacobians import Jacobians, check_single_points, last_layer
from pyro_dropout.generative.likelihoods import Gaussian, HeteroscedasticGaussian, likelihood_of
from pyro_dropout.generative.likelihoods.moments import F64
from pyro_dropout.generative.networks import BayesianNet
from pyro_dropout.generative.own_noise import silent
from pyro_dropout.generative.standardised import Standardised
from pyro_dropout.generative.trial_run import evaluating
from pyro_dropout.guides.ensemble import Ensemble
from pyro_dropout.guides.marginals import Marginals
from pyro_dropout.prediction.blocks import Block, bytes_per_row, cuts, run_blocks
from pyro_dropout.prediction.linearised_prediction import LinearisedPrediction
from pyro_dropout.prediction.predict_network import Request, frozen, keeps
from pyro_dropout.protocols import HasMoments, Likelihood, Model, Weights

# Numbers of the Jacobians that are held at once, bytes of the largest tensor in a pass, and points that run together.
_ON_CPU, _ON_GPU = (2**24, 2**30, 2**13), (2**28, 2**33, 2**15)
_MOST = 2**30  # numbers in the Jacobian of one point, in all covariances, and in what all points share


def predict_linearised(model: object, posterior: object, x: AnyInputs, asked: Request) -> LinearisedPrediction:
    """Return the prediction of a linearised network at the points ``x``."""
    if not isinstance(posterior, HasMoments | Ensemble):
        raise PyroDropoutError(
            "method='linearised' needs E[w] and Cov[w] of the posterior, by mean() and covariance_root(rows), as the"
            f" guides of this package have them; {type(posterior).__name__} has none. Use method='mc'."
        )
    if not isinstance(model, Model):
        raise PyroDropoutError(f"method='linearised' is for networks of this package; got {type(model).__name__}.")
    check_single_points(model, x)
    with evaluating(model, posterior):
        if isinstance(posterior, Ensemble):
            posterior.check_usable()
            parts = []
            for member in range(posterior.members):
                with posterior.as_member(member) as guide:
                    parts.append(_outputs(model, guide, x, asked))
        else:
            parts = [_outputs(model, posterior, x, asked)]
    mean, covariance = (torch.stack([part[k] for part in parts]) for k in range(2))
    joint = torch.stack([part[2] for part in parts]) if asked.shared else None
    return _made(frozen(likelihood_of(model)), mean, covariance, joint, asked)


def joined(parts: Sequence[LinearisedPrediction], asked: Request) -> LinearisedPrediction:
    """Return the prediction of all points of several predictions, in order; all with the same seed."""
    mean, covariance = (torch.cat(each, 1) for each in zip(*(part.outputs for part in parts), strict=True))
    return _made(parts[0].likelihood, mean, covariance, None, asked)


def _made(
    likelihood: Likelihood, mean: Tensor, covariance: Tensor, joint: Tensor | None, asked: Request
) -> LinearisedPrediction:
    seed = int(torch.randint(2**62, ())) if asked.seed is None else asked.seed
    kept = keeps(asked.keep_samples, asked.samples * mean[0].numel())
    return LinearisedPrediction(likelihood, mean, covariance, joint, samples=asked.samples, seed=seed, keeps=kept)


def _outputs(model: Model, guide: HasMoments, x: AnyInputs, asked: Request) -> tuple[Tensor, Tensor, Tensor]:
    """Return E[f], (N, D), Cov[f] of each point, (N, D, D), and of all points, if they share the draws."""
    weights = guide.mean()
    if set(weights) != set(model.sites):
        raise PyroDropoutError(f"the posterior has the sites {', '.join(weights)}, the model {', '.join(model.sites)}.")
    if isinstance(guide, Marginals):
        free = guide.random_sites()
    else:  # points need no derivative
        of = getattr(guide, "posterior", lambda name: None)
        free = [name for name in weights if not isinstance(of(name), Delta)]
    count, whole = len(x), takes_all(model)
    near = Jacobians(model, weights, free, x)
    last = None if asked.shared else _last_layer(model, guide, weights, free, x if whole else x[:2])
    if last is None:
        each = near.width * near.numbers
        _check_size("the Jacobian with respect to the random weights", count * each if whole else each, _MOST)
    _check_size("the covariances of the outputs at all points", count * near.width**2, _MOST // 4)
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    none = torch.zeros(0)

    def run(block: Block) -> tuple[Tensor, Tensor, Tensor]:
        """Return E[f], Cov[f] of each point and, if points share the draws, the root of their covariance."""
        given = None if last is None else last(x[block.points])
        if given is not None:
            return given[0], given[1].to(F64), none
        f, rows = near.rows(x[block.points])
        root = f.new_zeros(*f.shape, 0)  # of points, which have no covariance
        if rows:
            root = guide.covariance_root({k: v.flatten(0, 1) for k, v in rows.items()}).unflatten(0, f.shape)
        if asked.shared:
            outputs = count * f.shape[-1]
            most = max(outputs, root.shape[-1])
            _check_size("the covariance of all points with shared=True", most * outputs, _MOST // 4)
        return f, _squared(root), root if asked.shared else none

    def receive(block: Block, parts: tuple[Tensor, Tensor, Tensor]) -> None:
        found.append(parts)
        bar.update(len(parts[0]))

    size = asked.chunk or _points_at_once(near, x, last is not None)
    one = slice(0, 1)
    blocks = [Block(one, one, points, whole) for points in cuts(count, count if whole else size)]
    with tqdm(total=count, disable=not asked.progress, unit="point", desc="predict") as bar:
        run_blocks(blocks, run, receive)
    mean, covariance, root = (torch.cat(parts) for parts in zip(*found, strict=True))
    return mean, covariance, _squared(root.flatten(0, 1)) if asked.shared else covariance[:0]


def _points_at_once(near: Jacobians, x: AnyInputs, last: bool) -> int:
    """Return how many points keep the Jacobian, and the largest tensors of the passes behind it, small."""
    numbers, memory, most = _ON_GPU if x.is_cuda else _ON_CPU
    each, passes = bytes_per_row(lambda rows: near.outputs(copies(x[:1], rows))), 1 if last else 1 + near.width
    fit = most if last else numbers // max(1, near.width * near.numbers)
    return max(1, min(most, fit, memory // max(1, each * passes)))


def _squared(root: Tensor) -> Tensor:
    root = root.to(F64)
    return root @ root.mT


def _last_layer(
    model: Model, guide: HasMoments, weights: Weights, free: list[str], x: AnyInputs
) -> Callable[[AnyInputs], tuple[Tensor, Tensor] | None] | None:
    """Return a function of x that gives E[f] and Cov[f] from what enters the last layer, if only that is random.

    It returns None where the outputs are not those of a linear layer, as is tried with some points ``x``.
    """
    outer = model if isinstance(model, Standardised) else None
    net = model if outer is None else outer.model
    if not isinstance(net, BayesianNet) or not free or not hasattr(guide, "layer_covariance"):
        return None
    # What these likelihoods make of standardised outputs is a shift and a factor of each; others may do anything.
    scaled = outer is not None and net.likelihood.standardised_targets()  # type: ignore[attr-defined]
    if scaled and type(net.likelihood) not in (Gaussian, HeteroscedasticGaussian):
        return None

    def outputs(x: AnyInputs) -> tuple[Tensor, Tensor] | None:
        with silent():
            found = last_layer(net, weights, x if outer is None else outer.standard_x(cast(Tensor, x)))
        if found.features is None or not set(free) <= set(found.sites):
            return None
        covariance: Tensor | None = guide.layer_covariance(found.features, free)
        if covariance is None:
            return None
        if outer is None or not scaled:
            return found.outputs, covariance
        zero = torch.zeros_like(found.outputs[:1], dtype=F64)
        factor = outer.raw(zero + 1) - outer.raw(zero)
        return outer.raw(found.outputs), covariance * factor.mT * factor

    try:
        return None if outputs(x) is None else outputs
    except PyroDropoutError:  # it is not known which layer is the last
        return None


def _check_size(what: str, numbers: int, most: int) -> None:
    if numbers > most:
        raise PyroDropoutError(
            f"{what} would have {numbers:,} numbers, and at most {most:,} fit. Predict fewer points, make fewer weights"
            " random, as in BayesianNet(net, only=...), or use method='mc'."
        )
