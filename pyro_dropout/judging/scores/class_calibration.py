"""Whether predicted class probabilities are calibrated: of the points predicted with 80 %, 80 % should be right."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_dropout.generative.likelihoods.moments import is_class
from pyro_dropout.judging.scores.calibration import coverage_error
from pyro_dropout.mathematics.checks import check_count
from pyro_dropout.mathematics.shapes import Float, Int
from pyro_dropout.prediction.plot_style import axes_or_new
from pyro_dropout.prediction.prediction import Prediction, check_prediction
from pyro_dropout.protocols import Axes
from pyro_dropout.registry import score

_F64 = torch.float64


@dataclass(frozen=True, eq=False)
class Reliability:
    """Accuracy against confidence of the most probable class, in bins of equal width; returned by ``reliability``.

    Bins without points hold NaN.

    Attributes:
        confidence: the mean probability of the most probable class, (bins,).
        accuracy: how often that class is right, (bins,).
        count: number of points, (bins,).

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> table = pdrop.judging.Reliability(
        ...     confidence=torch.tensor([0.25, 0.75]), accuracy=torch.tensor([0.25, 0.5]), count=torch.tensor([10, 30])
        ... )
        >>> table.ece
        0.1875
    """

    confidence: Float[Tensor, " bins"]
    accuracy: Float[Tensor, " bins"]
    count: Int[Tensor, " bins"]

    @property
    def ece(self) -> float:
        """The expected calibration error: the distance of accuracy from confidence, averaged over points."""
        apart = (self.accuracy - self.confidence).abs().nan_to_num(0.0)
        return ((apart * self.count).sum() / self.count.sum()).item()

    def draw_band(self, ax: Axes, color: str, **how: object) -> None:
        """Draw the 95 % intervals of the accuracies on matplotlib's axes."""
        from scipy.stats import binomtest

        held = self.count > 0
        right, count = (self.accuracy * self.count)[held].round().int().tolist(), self.count[held].tolist()
        # Wilson's interval is never empty, even at 0 and 1.
        ends = [binomtest(k, n).proportion_ci(0.95, "wilson") for k, n in zip(right, count, strict=True)]
        low, high = ([getattr(end, side) for end in ends] for side in ("low", "high"))
        ax.fill_between(self.confidence[held].tolist(), low, high, color=color, linewidth=0, **how)

    def plot(self, ax: Axes = None) -> Axes:
        """Plot the reliability diagram, with 95 % intervals of the accuracies; return matplotlib's axes."""
        ax = axes_or_new(ax, 4.6, 4.2)
        held, bins, total = self.count > 0, len(self.count), int(self.count.sum())
        confidence, accuracy = self.confidence[held].tolist(), self.accuracy[held].tolist()
        middles, share = (torch.arange(bins, dtype=_F64) + 0.5) / bins, self.count.to("cpu", _F64) / total
        ax.bar(middles.tolist(), share.tolist(), width=0.95 / bins, color="0.85", label="share of points")
        ax.plot([0, 1], [0, 1], color="0.4", linewidth=0.8, label="calibrated")
        self.draw_band(ax, "#0072B2", alpha=0.2, label="95 % interval")
        ax.plot(confidence, accuracy, color="#0072B2", marker="o", markersize=4, label="accuracy")
        ax.set(xlabel="confidence: probability of the most probable class", ylabel="fraction right, or of points")
        ax.set(xlim=(0, 1), ylim=(0, 1), title=f"ECE {self.ece:.3f}, {total} points")
        ax.legend(frameon=False, loc="upper left", fontsize=8)
        return ax


def reliability(prediction: Prediction, y: Tensor, bins: int = 15) -> Reliability:
    """Return how often the most probable class is right, in bins of its predicted probability.

    Args:
        prediction: of classes. With a Bernoulli likelihood each of the N·D targets is a point with two classes.
        y: class indices, (N,); with a Bernoulli likelihood 0 and 1, (N, D).
        bins: number of bins of equal width for confidences from 0 to 1.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> model = pdrop.BayesianNet(torch.nn.Linear(2, 4), likelihood=pdrop.Categorical())
        >>> guide = pdrop.AutoDropout(model, init=lambda name, shape: torch.zeros(shape))
        >>> answer = pdrop.predict(model, guide, torch.ones(8, 2), samples=10)  # each class has a quarter
        >>> table = pdrop.judging.reliability(answer, torch.tensor([0, 0, 1, 1, 2, 2, 3, 3]), bins=10)
        >>> table.count.tolist(), table.accuracy[2].item(), table.ece
        ([0, 0, 8, 0, 0, 0, 0, 0, 0, 0], 0.25, 0.0)
    """
    check_count("bins", bins)
    y, probs = _classes_of(prediction, y, "reliability")
    if prediction.one_of_several:
        sure, chosen = probs.max(-1)
        right = chosen == y
    else:
        sure, right = torch.maximum(probs, 1 - probs), (probs > 0.5) == (y > 0.5)
    sure, right = sure.reshape(-1), right.reshape(-1)
    edges = torch.linspace(0, 1, bins + 1, dtype=_F64, device=probs.device)
    own = torch.bucketize(sure, edges[1:-1])  # bins are open below and closed above
    count = torch.bincount(own, minlength=bins)
    confidence, accuracy = (torch.bincount(own, part.to(_F64), bins) / count for part in (sure, right))
    return Reliability(confidence, accuracy, count)


@score(
    "ece",
    heading="calibration error",
    meaning="Mean distance of coverage from its level; for classes, of accuracy from confidence.",
    better="less",
    of=("classes", "numbers"),
    order=7,
)
def ece(prediction: Prediction, y: Tensor, bins: int = 15) -> float:
    """Return the expected calibration error: the mean distance of observed from predicted frequencies.

    For classes it is the distance of accuracy from confidence, of the most probable class, in bins of its probability,
    averaged over points; for continuous numbers that of coverage from its level, averaged over central intervals of the
    levels 0.05, 0.1, ... 0.95. It is biased upwards with few points: with n of them in a bin, by about 1/√n.

    Args:
        prediction: of classes; or of continuous numbers, with its samples kept.
        y: class indices, (N,), or targets, (N, D).
        bins: for classes, number of bins of equal width for the confidences; not used for regression.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> model = pdrop.BayesianNet(torch.nn.Linear(2, 4), likelihood=pdrop.Categorical())
        >>> guide = pdrop.AutoDropout(model, init=lambda name, shape: torch.zeros(shape))
        >>> answer = pdrop.predict(model, guide, torch.ones(8, 2), samples=10)  # each class has a quarter
        >>> pdrop.ece(answer, torch.zeros(8, dtype=torch.long)), pdrop.ece(answer, torch.arange(8) % 4)
        (0.75, 0.0)
    """
    check_count("bins", bins)
    check_prediction(prediction)
    if is_class(prediction.target_distribution):
        return reliability(prediction, y, bins).ece
    return coverage_error(prediction, y)


@score(
    "brier",
    heading="Brier",
    meaning="Squared error of the class probabilities.",
    better="less",
    of=("classes",),
    order=5,
)
def brier(prediction: Prediction, y: Tensor) -> Float[Tensor, "*N"]:
    """Return the Brier score of each point, (N,): the squared distance of its probabilities from the observed class.

    It is Σ_c (p_c - 1[y = c])², from 0 to 2; with a Bernoulli likelihood (p - y)², summed over the D targets. Sequences
    and maps have one for each position that is not ignored.

    Args:
        prediction: of classes.
        y: class indices, (N,); with a Bernoulli likelihood 0 and 1, (N, D).

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> model = pdrop.BayesianNet(torch.nn.Linear(2, 4), likelihood=pdrop.Categorical())
        >>> guide = pdrop.AutoDropout(model, init=lambda name, shape: torch.zeros(shape))
        >>> answer = pdrop.predict(model, guide, torch.ones(2, 2), samples=10)
        >>> pdrop.judging.brier(answer, torch.tensor([0, 3])).tolist()
        [0.75, 0.75]
    """
    y, probs = _classes_of(prediction, y, "brier")
    came = torch.nn.functional.one_hot(y, probs.shape[-1]) if prediction.one_of_several else y
    squares = (probs - came.to(_F64)).square()
    return prediction.per_point(squares.sum(-1) if prediction.one_of_several else squares).to(prediction.mean)


def _classes_of(prediction: Prediction, y: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Return the checked targets and the probabilities in float64, for the function of this name.

    Those of sequences and maps have a row for each position that counts.
    """
    check_prediction(prediction)
    prediction.check_kind(name, "classes")
    y, probs = prediction.checked_targets(y), prediction.probs.to(_F64)
    counted = prediction.counted(y)
    return (y[counted], probs[counted]) if probs.dim() > 2 or not bool(counted.all()) else (y, probs)
