"""Anchored replicas: each moves its priors to a draw from them and perturbs its targets, as a member of an ensemble.

A replica with seed s solves the problem of the member of an anchored ``Ensemble`` that has this seed. Its noise belongs
to the rows of all data, whichever of them it trains on.
"""

from collections.abc import Sequence

from torch import Tensor

from pyro_dropout.generative.model_call import ModelCall
from pyro_dropout.guides.base import SiteGuide
from pyro_dropout.guides.points import is_gaussian, prior_of
from pyro_dropout.mathematics.checks import check_seed, describe
from pyro_dropout.mathematics.errors import PyroDropoutError, ShapeError
from pyro_dropout.training.ensemble.anchoring import perturbation
from pyro_dropout.training.fleet.replicas import Replica
from pyro_dropout.training.loss.learned_widths import learned_sites

Problem = dict[str, dict[str, Tensor]]  # anchors and noise by site, with the replicas in front


def anchored(
    replica: Replica, seeds: Sequence[int] | Tensor, count: int, call: tuple[Tensor, Tensor, int], batch: int
) -> Problem:
    """Draw the anchors and the noise of all replicas, each from its own seed.

    Args:
        replica: the first; all have its sites.
        seeds: one for each replica.
        count: how many replicas there are.
        call: all data and how many of them a replica sees, (x, y, n).
        batch: points in a mini-batch.
    """
    listed = seeds.tolist() if isinstance(seeds, Tensor) else seeds
    if not isinstance(listed, Sequence) or len(listed) != count:
        got = len(listed) if isinstance(listed, Sequence) else describe(seeds)
        raise ShapeError(f"anchors must be a list of seeds, one for each of {count} replicas; got {got}.")
    for seed in listed:
        check_seed(seed)
    model, guide = replica
    if learned_sites(model):
        raise PyroDropoutError("anchors are drawn from the prior, whose widths must be fixed; it has learn=True.")
    if not isinstance(guide, SiteGuide):
        raise PyroDropoutError(f"anchors need a guide of this package; got {type(guide).__name__}.")
    for name in guide._sites:
        if not is_gaussian(prior_of(guide, name)):
            raise PyroDropoutError(
                f"site {name!r} has a prior that is not Gaussian, so a replica of a fleet cannot be anchored there."
                " Train an Ensemble instead."
            )
    problem = perturbation(guide, listed, ModelCall(model, call), batch)
    if problem.weights:
        raise PyroDropoutError(
            "replicas of a fleet are anchored by noise in their targets, which needs a Gaussian likelihood. Train an"
            " Ensemble instead: its members weight the data points."
        )
    return problem.tensors()
