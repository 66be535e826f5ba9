"""A weak, fast model for most inputs, and a strong, slow one where the weak one is uncertain (§5.2)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_dropout.judging.decisions.rejection import check_vector, defer
from pyro_dropout.mathematics.checks import check_choice, check_non_negative
from pyro_dropout.mathematics.errors import PyroDropoutError, ShapeError
from pyro_dropout.mathematics.shapes import Bool, Float
from pyro_dropout.prediction.moments import is_class
from pyro_dropout.prediction.normal_mixture import checked_targets
from pyro_dropout.prediction.prediction import Prediction

_F64 = torch.float64
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
        >>> import torch, pyro_dropout as pd
        >>> model = pd.BayesianNet(torch.nn.Linear(2, 3), likelihood=pd.Categorical())
        >>> guide = pd.AutoDropout(model, keep=0.5)
        >>> weak, strong = (lambda x, T=T: pd.predict(model, guide, x, samples=T, seed=0) for T in (5, 500))
        >>> result = pd.cascade(weak, strong, torch.randn(10, 2), budget=0.3)
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
        self.weak.check_classes("probs")
        return self.mean

    def log_prob(self, y: Tensor) -> Tensor:
        """Return log p(y | x) of each input, from the model that predicted it, (N,)."""
        found = self.weak.log_prob(y)
        if self.strong is not None:
            found = found.index_put((self.deferred,), self.strong.log_prob(y.to(found.device)[self.deferred]).to(found))
        return found

    def accuracy(self, y: Tensor) -> float:
        """Return how often the most probable class is right; with a Bernoulli likelihood, over all N·D targets."""
        self.weak.check_classes("accuracy(y)")
        y = checked_targets(self.weak, y)
        right = self.mean.argmax(-1) == y if self.weak.one_of_several else (self.mean > 0.5) == (y > 0.5)
        return right[self.weak.counted(y)].to(_F64).mean().item()

    def rmse(self, y: Tensor) -> float:
        """Return the root mean squared error over all N·D targets, in units of y."""
        if is_class(self.weak.target_distribution):
            raise PyroDropoutError(
                f"rmse(y) is for numbers, and this cascade is of {self.weak.family}; use accuracy(y)."
            )
        y = checked_targets(self.weak, y)
        return (self.mean.to(_F64) - y.to(_F64)).square().mean().sqrt().item()


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
        >>> import torch, pyro_dropout as pd
        >>> model = pd.BayesianNet(torch.nn.Linear(2, 1), likelihood=pd.Gaussian(tau=4.0))
        >>> guide = pd.AutoMeanField(model)
        >>> weak, strong = (lambda x, T=T: pd.predict(model, guide, x, samples=T, seed=0) for T in (5, 500))
        >>> x = torch.arange(8.0).reshape(4, 2)  # the farther from the origin, the less certain
        >>> result = pd.cascade(weak, strong, x, budget=0.5, uncertainty="std", costs=(5.0, 500.0))
        >>> result.deferred.tolist(), result.cost
        ([False, False, True, True], 1020.0)
    """
    if not isinstance(x, Tensor) or x.dim() == 0 or len(x) == 0:
        given = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise ShapeError(f"x must hold at least one input, (N, ...); got {given}.")
    if not isinstance(costs, tuple | list) or len(costs) != 2:
        raise ShapeError(f"costs must be two numbers, of the weak and of the strong model; got {costs!r}.")
    for cost in costs:
        check_non_negative("costs", cost)
    if not callable(uncertainty):
        check_choice("uncertainty", uncertainty, ("auto", *_OF_CLASSES, *_OF_MOMENTS), "a function of a Prediction")
    first = _called("weak", weak, x)
    unsure = _uncertainty_of(first, uncertainty)
    deferred = defer(unsure, budget, threshold)
    mean, second = first.mean, None
    if bool(deferred.any()):
        second = _called("strong", strong, x[deferred.to(x.device)])
        if second.mean.shape[1:] != mean.shape[1:] or second.family != first.family:
            raise ShapeError(
                f"weak and strong must predict the same targets; {first.family} with {mean.shape[-1]} and"
                f" {second.family} with {second.mean.shape[-1]} do not fit together."
            )
        mean = mean.index_put((deferred,), second.mean.to(mean))
    cost = float(len(x) * costs[0] + int(deferred.sum()) * costs[1])
    return Cascade(mean, deferred, unsure, cost, first, second)


def _called(name: str, predict: Callable[[Tensor], Prediction], x: Tensor) -> Prediction:
    if not callable(predict):
        raise PyroDropoutError(
            f"{name} must be a function of x that returns a Prediction; got {type(predict).__name__} {predict!r}."
        )
    found = predict(x)
    if not isinstance(found, Prediction) or len(found.mean) != len(x):
        raise PyroDropoutError(
            f"{name} must be a function of x that returns a Prediction of all {len(x)} inputs, such as"
            f" lambda x: predict(model, guide, x); it returned {found!r}."
        )
    return found


def _uncertainty_of(prediction: Prediction, kind: str | Callable[[Prediction], Tensor]) -> Tensor:
    """Return one number for each input, (N,)."""
    if callable(kind):
        found = kind(prediction)
        check_vector("uncertainty(prediction)", found)
        if len(found) != len(prediction.mean):
            raise ShapeError(
                f"uncertainty must give one number for each of {len(prediction.mean)} inputs; got {len(found)}."
            )
        return found
    if kind == "auto":
        kind = "entropy" if is_class(prediction.target_distribution) else "std"
    if kind in _OF_CLASSES:
        return prediction.per_point(getattr(prediction, kind))
    each = prediction.variance if kind == "std" else prediction.epistemic
    return prediction.per_point(each.sum(-1) if prediction.one_of_several else each).sqrt()
