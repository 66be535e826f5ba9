"""The decisions of §5.2: which inputs to defer to a human or to a stronger model, what that gains, and how to explore.

Thompson sampling acts as if one draw from the posterior were the truth. An action is then chosen with the probability,
under the posterior, that it is the best one. How long uncertain actions are tried depends on whether the posterior
narrows with data; that of dropout with a fixed ``keep`` need not.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_dropout.errors import PyroDropoutError, ShapeError
from pyro_dropout.generative.likelihoods.moments import is_class
from pyro_dropout.generative.own_noise import check_no_noise
from pyro_dropout.mathematics.checks import check_choice, check_finite, check_non_negative, check_number, check_rate
from pyro_dropout.mathematics.shapes import Bool, Float, Int
from pyro_dropout.prediction.plot_style import axes_or_new
from pyro_dropout.prediction.predict import predict
from pyro_dropout.prediction.prediction import Prediction, check_prediction
from pyro_dropout.protocols import Axes, PyroModel

_F64 = torch.float64


def defer(
    uncertainty: Float[Tensor, " N"], budget: float | None = None, threshold: float | None = None
) -> Bool[Tensor, " N"]:
    """Return which inputs to defer to a human: the most uncertain ones.

    Args:
        uncertainty: of each input, (N,): an entropy, a standard deviation, a percentile.
        budget: the share of inputs to defer, from 0 to 1; exactly round(budget·N) are deferred, and the first ones
            among equally uncertain inputs.
        threshold: defer all inputs that are more uncertain than this. Exactly one of the two must be given.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> uncertainty = torch.tensor([0.1, 0.9, 0.4, 0.9])
        >>> pdrop.defer(uncertainty, budget=0.25).tolist()
        [False, True, False, False]
        >>> pdrop.defer(uncertainty, threshold=0.3).tolist()
        [False, True, True, True]
    """
    check_vector("uncertainty", uncertainty)
    if (budget is None) == (threshold is None):
        raise PyroDropoutError(f"give exactly one of budget and threshold; got {budget!r} and {threshold!r}.")
    if budget is None:
        return uncertainty > check_number("threshold", threshold)
    check_rate("budget", budget)
    most = uncertainty.argsort(descending=True, stable=True)[: round(float(budget) * len(uncertainty))]
    return torch.zeros_like(uncertainty, dtype=torch.bool).index_fill(0, most, True)


@dataclass(frozen=True, eq=False)
class RejectionCurve:
    """The score of the inputs kept when the most uncertain are rejected; returned by ``rejection_curve``.

    Attributes:
        kept: the fraction of inputs kept, (N,): 1/N, 2/N, ... 1.
        score: the mean score of the inputs kept, if the least uncertain are kept, (N,).
        random: the same, if inputs are kept at random, (N,): the mean of all.
        oracle: the same, if those with the best scores are kept, (N,).
        error: the standard error of ``score``, from the spread of the scores of those kept, (N,).

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> right = torch.tensor([1.0, 0.0, 1.0, 1.0])
        >>> curve = pdrop.judging.rejection_curve(uncertainty=torch.tensor([0.1, 0.9, 0.3, 0.2]), score=right)
        >>> curve.score.tolist(), curve.ratio  # the one error is rejected first
        ([1.0, 1.0, 1.0, 0.75], 1.0)
    """

    kept: Float[Tensor, " N"]
    score: Float[Tensor, " N"]
    random: Float[Tensor, " N"]
    oracle: Float[Tensor, " N"]
    error: Float[Tensor, " N"]

    @property
    def area(self) -> float:
        """The mean of the curve over all fractions kept."""
        return self.score.mean().item()

    @property
    def ratio(self) -> float:
        """The share of the oracle's gain over chance: 1 for the best order, 0 for chance; NaN if none is possible."""
        possible = (self.oracle - self.random).mean()
        return ((self.score - self.random).mean() / possible).item()

    def band(self, errors: float) -> tuple[Tensor, Tensor]:
        """Return the score less and plus some standard errors, (N,) each; no mean is better than the best score."""
        low, high, best = self.score - errors * self.error, self.score + errors * self.error, self.oracle[0]
        return (low, high.clamp_max(best)) if best >= self.random[0] else (low.clamp_min(best), high)

    def plot(self, ax: Axes = None, *, ylabel: str = "mean score of those kept") -> Axes:
        """Plot the curve with those of chance and of the oracle; return matplotlib's axes."""
        ax = axes_or_new(ax)
        kept, score, oracle, *band = (part.cpu() for part in (self.kept, self.score, self.oracle, *self.band(2)))
        ax.fill_between(kept, *band, color="#0072B2", alpha=0.2, linewidth=0, label="± 2 standard errors")
        ax.plot(kept, oracle, color="#009E73", linestyle="--", label="best possible order")
        ax.plot(kept, score, color="#0072B2", label="by uncertainty")
        ax.plot(kept, self.random.cpu(), color="0.4", linestyle=":", label="by chance")
        ax.set(xlabel="fraction of inputs kept", ylabel=ylabel, xlim=(0, 1))
        ax.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, fontsize=8)
        return ax


def rejection_curve(
    uncertainty: Float[Tensor, " N"], score: Tensor, *, higher_is_better: bool = True
) -> RejectionCurve:
    """Return how the mean score improves as the most uncertain inputs are rejected: the accuracy-rejection curve.

    Args:
        uncertainty: of each input, (N,). Ties are averaged over random orders.
        score: of each input, (N,): whether the prediction was right, a log-likelihood, or an error.
        higher_is_better: whether a high score is good; False for errors.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> error = torch.tensor([0.5, 2.0, 1.0, 0.1])
        >>> curve = pdrop.judging.rejection_curve(torch.tensor([0.3, 0.9, 0.2, 0.1]), error, higher_is_better=False)
        >>> [round(value, 3) for value in curve.score.tolist()], 0 < curve.ratio < 1
        ([0.1, 0.55, 0.533, 0.9], True)
    """
    check_vector("uncertainty", uncertainty)
    if not isinstance(score, Tensor) or score.shape != uncertainty.shape:
        given = tuple(score.shape) if isinstance(score, Tensor) else type(score).__name__
        raise ShapeError(f"score must have one number for each of {len(uncertainty)} inputs; got {given}.")
    values = score.to(_F64)
    check_finite("score", values)
    order = uncertainty.argsort(stable=True)
    count = torch.arange(1, len(values) + 1, dtype=_F64, device=values.device)
    levels, group = uncertainty.unique(return_inverse=True)

    def kept(each: Tensor) -> Tensor:  # averaged over equally uncertain inputs: the expectation over random orders
        total = each.new_zeros(len(levels)).index_add(0, group, each)
        fair: Tensor = (total / group.bincount())[group]
        return fair[order].cumsum(0) / count

    mean, square = kept(values), kept(values.square())
    error = ((square - mean.square()).clamp_min(0) / count).sqrt()
    best = values.sort(descending=higher_is_better).values.cumsum(0) / count
    random = values.mean().expand(len(values)).clone()
    return RejectionCurve(count / len(values), mean, random, best, error)


def check_vector(name: str, value: Tensor) -> None:
    """Raise unless ``value`` is a vector of at least one finite number."""
    check_finite(name, value)
    if value.dim() != 1 or len(value) == 0:
        hint = " Sum or average over its targets first." if value.dim() == 2 else ""
        raise ShapeError(f"{name} must have one number for each input, (N,); got shape {tuple(value.shape)}.{hint}")


_OF_CLASSES = ("entropy", "mutual_information", "variation_ratio")
_OF_MOMENTS = ("std", "epistemic")


@dataclass(frozen=True, eq=False)
class Cascade:
    """The predictions of two models, the strong one's where the weak one was uncertain; returned by ``cascade``.

    Attributes:
        mean: E[y] of every input, or the probabilities of its classes, (N, D).
        deferred: which inputs were deferred to the strong model, (N,).
        uncertainty: of the weak model, which decides, (N,).
        cost: of all calls, in the unit of the given costs.
        weak: the weak model's prediction of all inputs.
        strong: the strong model's prediction of the deferred inputs; None if there were none.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> model = pdrop.BayesianNet(torch.nn.Linear(2, 3), likelihood=pdrop.Categorical())
        >>> guide = pdrop.AutoDropout(model, keep=0.5)
        >>> weak, strong = (lambda x, T=T: pdrop.predict(model, guide, x, samples=T, seed=0) for T in (5, 500))
        >>> result = pdrop.judging.cascade(weak, strong, torch.randn(10, 2), budget=0.3)
        >>> result.cost, result.probs.shape  # ten cheap calls, and three at ten times the cost
        (40.0, torch.Size([10, 3]))
    """

    mean: Float[Tensor, "N ..."]
    deferred: Bool[Tensor, " N"]
    uncertainty: Float[Tensor, " N"]
    cost: float
    weak: Prediction
    strong: Prediction | None

    @property
    def probs(self) -> Tensor:
        """Probabilities of the classes, (N, C); with a Bernoulli likelihood of "yes", (N, D)."""
        self.weak.check_kind("probs", "classes")
        return self.mean

    def accuracy(self, y: Tensor) -> float:
        """Return how often the most probable class is right; with a Bernoulli likelihood, over all N·D targets."""
        self.weak.check_kind("accuracy(y)", "classes")
        y = self.weak.checked_targets(y)
        right = self.mean.argmax(-1) == y if self.weak.one_of_several else (self.mean > 0.5) == (y > 0.5)
        return right[self.weak.counted(y)].to(_F64).mean().item()


def cascade(
    weak: Callable[[Tensor], Prediction],
    strong: Callable[[Tensor], Prediction],
    x: Tensor,
    *,
    budget: float | None = None,
    threshold: float | None = None,
    uncertainty: str | Callable[[Prediction], Tensor] = "auto",
    costs: tuple[float, float] = (1.0, 10.0),
) -> Cascade:
    """Predict all inputs with a weak model, and use a strong one only where the weak one is uncertain.

    Args:
        weak: x -> ``Prediction``; it sees all inputs.
        strong: x -> ``Prediction`` of the same targets; it sees the inputs that ``defer`` selects, and is not called
            if there are none. It may be the same model with more draws.
        x: N inputs, (N, ...).
        budget: the share of inputs that may be deferred; see ``defer``.
        threshold: defer inputs that are more uncertain than this. Exactly one of the two must be given.
        uncertainty: "entropy", "mutual_information" or "variation_ratio" for classes; "std" or "epistemic", standard
            deviations, for numbers; or a function of the weak prediction that returns (N,). Several targets of an
            input are summed (standard deviations as the root of the summed variances). "auto": "entropy" or "std".
        costs: of one input, for the weak and for the strong model.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> model = pdrop.BayesianNet(torch.nn.Linear(2, 1), likelihood=pdrop.Gaussian(tau=4.0))
        >>> guide = pdrop.AutoMeanField(model)
        >>> weak, strong = (lambda x, T=T: pdrop.predict(model, guide, x, samples=T, seed=0) for T in (5, 500))
        >>> x = torch.arange(8.0).reshape(4, 2)  # the farther from the origin, the less certain
        >>> result = pdrop.judging.cascade(weak, strong, x, budget=0.5, uncertainty="std", costs=(5.0, 500.0))
        >>> result.deferred.tolist(), result.cost
        ([False, False, True, True], 1020.0)
    """
    _check_shape("x", x, 1, "(N, ...)")
    if not isinstance(costs, tuple | list) or len(costs) != 2:
        raise ShapeError(f"costs must be two numbers, of the weak and of the strong model; got {costs!r}.")
    for cost in costs:
        check_non_negative("costs", cost)
    if not callable(uncertainty):
        check_choice("uncertainty", uncertainty, ("auto", *_OF_CLASSES, *_OF_MOMENTS), "a function of a Prediction")
    first = _called("weak", weak, x)
    unsure = uncertainty_of(first, uncertainty)
    deferred = defer(unsure, budget, threshold)
    mean, second = first.mean, None
    if bool(deferred.any()):
        second = _called("strong", strong, x[deferred.to(x.device)])
        if second.mean.shape[1:] != mean.shape[1:] or second.family != first.family:
            raise ShapeError(f"weak and strong must predict the same targets; they give {first!r} and {second!r}.")
        mean = mean.index_put((deferred,), second.mean.to(mean))
    cost = float(len(x) * costs[0] + int(deferred.sum()) * costs[1])
    return Cascade(mean, deferred, unsure, cost, first, second)


def _called(name: str, predict: Callable[[Tensor], Prediction], x: Tensor) -> Prediction:
    found = predict(x) if callable(predict) else f"{type(predict).__name__} {predict!r}"
    if not isinstance(found, Prediction) or len(found.mean) != len(x):
        advice = f"returns a Prediction of all {len(x)} inputs, such as lambda x: predict(model, guide, x)"
        raise PyroDropoutError(f"{name} must be a function of x that {advice}; got {found}.")
    return found


def uncertainty_of(prediction: Prediction, kind: str | Callable[[Prediction], Tensor]) -> Tensor:
    """Return one number for each input, (N,)."""
    check_prediction(prediction)
    if callable(kind):
        found = kind(prediction)
        check_vector("uncertainty(prediction)", found)
        if len(found) != len(prediction.mean):
            raise ShapeError(f"uncertainty must give {len(prediction.mean)} numbers, one an input; got {len(found)}.")
        return found
    if kind == "auto":
        kind = "entropy" if is_class(prediction.target_distribution) else "std"
    if kind in _OF_CLASSES:
        return prediction.per_point(getattr(prediction, kind))
    each = prediction.variance if kind == "std" else prediction.epistemic
    return prediction.per_point(each.sum(-1) if prediction.one_of_several else each).sqrt()


def thompson(model: PyroModel, posterior: object, contexts: Tensor, *, seed: int | None = None) -> Int[Tensor, "..."]:
    """Choose an action for each context: the best one under a single draw of the weights.

    All contexts and all actions share the draw, so actions are compared under one function. Every call makes a new
    draw.

    Args:
        model: a Pyro model of the reward, with one target: ``Gaussian``, ``Bernoulli`` or ``Poisson``.
        posterior: a guide of its weights.
        contexts: the model's input for each action: (N, A, features...) for N contexts of A actions, or
            (A, features) for one context.
        seed: makes the draw reproducible, and leaves torch's random state unchanged.

    Returns:
        The index of the action for each context, (N,); for one context, ().

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> model = pdrop.BayesianNet(torch.nn.Linear(2, 1, bias=False))
        >>> guide = pdrop.AutoMeanField(model, init=lambda name, shape: torch.zeros(shape), init_scale=1.0)
        >>> arms = torch.eye(2)  # two actions, equally good a priori
        >>> chosen = [pdrop.judging.thompson(model, guide, arms, seed=k).item() for k in range(20)]
        >>> set(chosen) == {0, 1}
        True
    """
    _check_shape("contexts", contexts, 2, "(N, A, features...) or (A, features)")
    lead = contexts.shape[: 1 if contexts.dim() == 2 else 2]
    x = contexts.flatten(0, len(lead) - 1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the network's own noise")  # refused below
        reward = predict(model, posterior, x, samples=1, shared=True, seed=seed, keep_samples=True).mean
    check_no_noise(model, "Thompson sampling")  # found when the network runs
    if reward.shape[-1] != 1:
        raise ShapeError(f"model must have one target, the reward of an action; it has {reward.shape[-1]}.")
    best: Tensor = reward.reshape(lead).argmax(-1)
    return best


def _check_shape(name: str, value: object, least: int, allowed: str) -> None:
    if not isinstance(value, Tensor) or value.dim() < least or value.numel() == 0:
        given = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ShapeError(f"{name} must be {allowed}, and not empty; got {given}.")
