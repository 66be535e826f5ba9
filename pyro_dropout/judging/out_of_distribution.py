"""Inputs unlike those of training: the usual scores of a network, and how well each separates two sets of inputs.

A high score means "unlike". Mutual information, entropy and energy are read off a prediction; the distance is that of
the features of the last hidden layer to those of the training inputs.
"""

import contextlib
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.stats import rankdata
from torch import Tensor
from torch.nn.functional import normalize

from pyro_dropout.errors import NotAvailableError, ShapeError
from pyro_dropout.generative.inputs import check_inputs, takes_all
from pyro_dropout.generative.jacobians import last_layer
from pyro_dropout.generative.likelihoods.moments import is_class
from pyro_dropout.generative.networks import BayesianNet
from pyro_dropout.generative.process_state import forked
from pyro_dropout.generative.standardised import Standardised, network_in
from pyro_dropout.generative.trial_run import evaluating
from pyro_dropout.guides.base import SiteGuide
from pyro_dropout.judging.decisions import check_vector, uncertainty_of
from pyro_dropout.mathematics.checks import check_level
from pyro_dropout.mathematics.shapes import Bool, Float
from pyro_dropout.prediction.predict import predict
from pyro_dropout.prediction.prediction import Prediction, check_prediction
from pyro_dropout.protocols import PyroModel

_NEIGHBOURS, _MOST, _AT_ONCE = 5, 5000, 1024  # nearest features; training inputs that are kept; inputs in a pass


def energy(prediction: Prediction) -> Float[Tensor, " N"]:
    """Return the energy of each input, -log Σ_c exp f_c, averaged over the draws, (N,) (Liu et al. 2020)."""
    check_prediction(prediction)
    if not prediction.one_of_several or getattr(prediction.likelihood, "shape", None) is not None:
        raise NotAvailableError(
            "the energy is that of the logits of one class among several, with the likelihood Categorical(); this"
            f" prediction is of {prediction.family}. Use the distance in the features (FeatureSupport)."
        )
    return -torch.cat([prediction.samples[:, piece].logsumexp(-1).mean(0) for piece in prediction.pieces()])


def features(model: PyroModel, posterior: object, x: object) -> Float[Tensor, "N K"]:
    """Return what enters the last layer at each input, (N, K), with the mean of the weights."""
    net: Any = network_in(model)
    if not isinstance(net, BayesianNet) or not isinstance(posterior, SiteGuide):
        raise NotAvailableError(
            "the features of the last hidden layer are those of one BayesianNet at the mean of its guide's weights; got"
            f" {type(model).__name__} and {type(posterior).__name__}. Use mutual_information, entropy or energy."
        )
    inputs, weights = check_inputs(x, whole=takes_all(net)), posterior.mean()
    inputs = inputs.to(next(iter(weights.values())).device)
    if isinstance(model, Standardised):
        assert isinstance(inputs, Tensor)
        inputs = model.standard_x(inputs)
    found = []
    with forked(), evaluating(net), torch.no_grad():
        for part in [inputs] if takes_all(net) else inputs.split(_AT_ONCE):
            last = last_layer(net, weights, part)
            if last.features is None:
                raise NotAvailableError(
                    f"the network does not end with a Linear layer that gives its outputs (the last is {last.path!r}),"
                    " so its features are unknown. Use mutual_information, entropy or energy."
                )
            found.append(last.features.detach())
    return torch.cat(found)


@dataclass(frozen=True, eq=False)
class FeatureSupport:
    """Which inputs are unlike the training inputs in the features of a network; made by ``FeatureSupport.of``.

    The distance of an input is the mean of those to the five nearest training inputs, between features of length one
    (Sun et al. 2022). ``Support`` does the same for the raw rows of a table.

    Attributes:
        model: the network.
        posterior: its guide, at whose mean the features are taken.
        known: the features of training inputs, at most 5,000 of them, of length one, (n, K).
        limit: the distance above which an input is flagged.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> from pyro_dropout.judging.out_of_distribution import FeatureSupport
        >>> _ = torch.manual_seed(0)
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
        >>> model = pdrop.BayesianNet(net, likelihood=pdrop.Categorical())
        >>> x = torch.randn(200, 2) * torch.tensor([0.1, 1.0]) + torch.tensor([3.0, 0.0])
        >>> support = FeatureSupport.of(model, pdrop.AutoDropout(model), x)
        >>> support.flag(torch.tensor([[3.0, 0.0], [-3.0, 0.0]])).tolist()
        [False, True]
    """

    model: PyroModel
    posterior: object
    known: Float[Tensor, "n K"]
    limit: float

    @classmethod
    def of(cls, model: PyroModel, posterior: object, x: object, rate: float = 0.03) -> "FeatureSupport":
        """Learn what training inputs are like.

        Args:
            model: a ``BayesianNet``, or one inside ``Standardised``, whose last layer is Linear.
            posterior: its guide.
            x: training inputs, (N, ...), at least ten.
            rate: the share of them that would be flagged, each left out in turn. Fresh inputs are flagged somewhat more
                often, because the features were trained on these: give held-out inputs if there are enough.
        """
        check_level("rate", rate)
        own = normalize(features(model, posterior, x), dim=-1)
        if len(own) < 2 * _NEIGHBOURS:
            raise ShapeError(f"x must have at least {2 * _NEIGHBOURS} inputs; got {len(own)}.")
        order = torch.randperm(len(own), generator=torch.Generator().manual_seed(0), device="cpu")[:_MOST]
        known = own[order.to(own.device)]
        distance = _nearest(known, known, 1)
        return cls(model, posterior, known, float(torch.quantile(distance, 1 - rate)))

    def score(self, x: object) -> Float[Tensor, " N"]:
        """Return the distance of each input in units of the limit, (N,): above 1 it is flagged."""
        return _nearest(normalize(features(self.model, self.posterior, x), dim=-1), self.known) / max(self.limit, 1e-30)

    def flag(self, x: object) -> Bool[Tensor, " N"]:
        """Return which inputs are unlike the training inputs, (N,)."""
        return self.score(x) > 1


def _nearest(rows: Tensor, known: Tensor, itself: int = 0) -> Tensor:
    """Return the mean distance to the nearest rows, (N,); without the nearest one, if that is the row itself."""
    exact: Any = "donot_use_mm_for_euclid_dist"  # products would leave distances of 1e-3 between equal rows
    pieces = (torch.cdist(part, known, compute_mode=exact) for part in rows.split(_AT_ONCE))
    nearest = [piece.topk(_NEIGHBOURS + itself, largest=False, sorted=True).values for piece in pieces]
    return torch.cat(nearest)[:, itself:].mean(1)


@dataclass(frozen=True)
class Separation:
    """How well a score separates inputs like the training inputs from others; returned by ``separation``.

    Attributes:
        auroc: the probability that an input outside has the higher score; a tie counts half.
        error: its standard error (DeLong et al. 1988).
        fpr95: the share of inputs outside that pass where 95 % of those inside do.
    """

    auroc: float
    error: float
    fpr95: float


def separation(inside: Float[Tensor, " N"], outside: Float[Tensor, " M"]) -> Separation:
    """Return AUROC and FPR at 95 % TPR of a score that should be low inside and high outside.

    Args:
        inside: scores of fresh inputs like the training inputs, (N,).
        outside: scores of the others, (M,).

    Example:
        >>> import torch
        >>> from pyro_dropout.judging.out_of_distribution import separation
        >>> separation(torch.tensor([0.1, 0.4, 0.2, 0.6]), torch.tensor([0.9, 0.4, 0.7])).auroc  # 10½ of 12 pairs
        0.875
    """
    check_vector("inside", inside)
    check_vector("outside", outside)
    low, high = (np.asarray(each.detach().cpu(), dtype=np.float64) for each in (inside, outside))
    ranks = rankdata(np.concatenate([low, high]))  # ties count half
    won = (ranks[len(low) :] - rankdata(high)) / len(low)  # the share of inputs inside below each one outside
    lost = (ranks[: len(low)] - rankdata(low)) / len(high)
    few = min(len(won), len(lost)) < 2
    error = math.nan if few else math.sqrt(won.var(ddof=1) / len(won) + lost.var(ddof=1) / len(lost))
    passes = np.sort(low)[math.ceil(0.95 * len(low)) - 1]
    return Separation(float(won.mean()), error, float((high <= passes).mean()))


def out_of_distribution(
    model: PyroModel,
    posterior: object,
    train: object,
    inside: object,
    outside: object,
    *,
    samples: int = 200,
    seed: int | None = None,
) -> dict[str, Separation]:
    """Return how well each score of a network separates inputs outside its training data from those inside.

    Classes have "mutual_information" and "entropy", one class among several "energy", numbers "epistemic", and networks
    with features "distance".

    Args:
        model: a network.
        posterior: its guide.
        train: the training inputs, for the distance.
        inside: fresh inputs like these.
        outside: inputs unlike these.
        samples: draws of the weights.
        seed: of these draws.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> from pyro_dropout.judging.out_of_distribution import out_of_distribution
        >>> _ = torch.manual_seed(0)
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
        >>> model = pdrop.BayesianNet(net, likelihood=pdrop.Categorical())
        >>> x = torch.randn(200, 2) * 0.1 + torch.tensor([3.0, 0.0])
        >>> found = out_of_distribution(model, pdrop.AutoDropout(model), x[:100], x[100:], -x, samples=20)
        >>> sorted(found), found["distance"].auroc
        (['distance', 'energy', 'entropy', 'mutual_information'], 1.0)
    """
    answers = [predict(model, posterior, x, samples=samples, seed=seed, keep_samples=True) for x in (inside, outside)]
    found: dict[str, list[Tensor]] = {}
    with contextlib.suppress(NotAvailableError):
        support = FeatureSupport.of(model, posterior, train)
        found["distance"] = [support.score(x) for x in (inside, outside)]
    names = ("mutual_information", "entropy") if is_class(answers[0].target_distribution) else ("epistemic",)
    found |= {name: [uncertainty_of(each, name) for each in answers] for name in names}
    with contextlib.suppress(NotAvailableError):
        found["energy"] = [energy(each) for each in answers]
    return {name: separation(*values) for name, values in found.items()}
