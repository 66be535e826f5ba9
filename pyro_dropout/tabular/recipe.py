"""What is trained on a table: the guide, the scale of the target, the noise and the network, as plain settings.

A recipe is made of JSON values; it is the section "model" of a run's record. ``build`` makes the model and its guide.
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pyro_dropout.comparison.standard_models import standard_guide
from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.generative.likelihoods import (
    Categorical,
    Counts,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    Transformed,
)
from pyro_dropout.generative.networks import BayesianNet
from pyro_dropout.generative.priors import Prior
from pyro_dropout.generative.standardised import Standardised
from pyro_dropout.mathematics.checks import check_choice
from pyro_dropout.registry import guide_names
from pyro_dropout.training.loss.elbo import ELBO
from pyro_dropout.training.loss.temperature import warm_up
from pyro_dropout.training.optimisers import cosine_decay

STEPS, LEARNING_RATE = 1200, 0.05  # of the final training, with guide="auto"; the rate falls to zero

Data = tuple[Tensor, Tensor]
Noise = Literal["constant", "by-input"]
Scale = Literal["plain", "log", "logit", "count"]
_LARGEST_MEAN = 200.0  # of counts; larger ones are as good as continuous
_SKEWED = 0.5
_STRAIGHT = 1e-3  # a range, beside the distance from 0 or 1, over which log and logit are straight lines
Activation = Literal["relu", "silu"]
Widths = Literal["default", "fixed", "learned"]


@dataclass(frozen=True)
class Wanted:
    """What is to be trained on a table; "auto" is chosen on the held-back rows.

    Attributes:
        guide: by its name; "auto" is mean field with a learned prior, or an ensemble.
        scale: of a numeric target.
        noise: of a numeric target.
        width: hidden units; None for 50, and fewer for more than 500 inputs.
        members: of an ensemble; None for its default.
    """

    guide: str = "auto"
    scale: str = "auto"
    noise: str = "auto"
    width: int | None = None
    members: int | None = None

    def check(self, classes: bool) -> None:
        """Raise unless all of it makes sense for a target that is a class, or a number."""
        check_choice("guide", self.guide, ("auto", *guide_names()))
        check_choice("scale", self.scale, ("auto", "plain", "log", "logit", "count"))
        check_choice("noise", self.noise, ("auto", "constant", "by-input"))
        if classes and (self.scale not in ("auto", "plain") or self.noise == "by-input"):
            given = f"scale={self.scale!r} and noise={self.noise!r}"
            raise PyroDropoutError(f"classes have no scale and no noise; got {given}.")

    def training(self, steps: int | None = None, lr: float | None = None, **others: Any) -> "Training":
        """Return how to train; steps and rate that are not given are those that suit the guide."""
        own = (STEPS, LEARNING_RATE) if self.guide == "auto" else (2000, 0.01)
        return Training(own[0] if steps is None else steps, own[1] if lr is None else lr, **others)


@dataclass(frozen=True)
class Training:
    """How long and how a guide is trained, and what is made of the held-back rows.

    Attributes:
        steps: an argument of ``fit``, as the next four are.
        lr: learning rate.
        batch_size: rows in a step; None for all, up to 2,048, and otherwise 1,024.
        seed: of all random numbers.
        compile: whether steps are compiled.
        conformal: whether intervals are calibrated on the held-back rows.
    """

    steps: int = STEPS
    lr: float = LEARNING_RATE
    batch_size: int | None = None
    seed: int = 0
    compile: bool | Literal["auto"] = "auto"
    conformal: bool = True

    def options(self) -> dict[str, Any]:
        """Return the arguments of ``fit``."""
        return {name: value for name, value in asdict(self).items() if name != "conformal"}


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what is trained on a table.

    Attributes:
        guide: name of the guide, as on the command line.
        width: hidden units.
        members: of an ensemble; None for its default, and for any other guide.
        noise: "constant", or "by-input": the network also gives the precision of the noise at each input.
        scale: of the target: "plain"; "log" for positive numbers, "logit" for proportions between 0 and 1, and "count"
            for whole numbers from 0. Classes have none.
        activation: of the hidden units: "relu", or "silu", which is smooth.
        prior: "default", that of ``BayesianNet``; "fixed", the paper's
            ``Prior()``; or "learned": the prior of the first layer has a width for
            each input, and that of the last layer one, learned with the guide, so that inputs which say nothing are
            left out of account. For guides that have a density, such as "mean-field".
        temperature: factor on the KL; below 1 the posterior is narrower than Bayes' rule makes it.
        decay: whether the learning rate falls to zero along half a cosine, instead of staying as it is.

    Example:
        >>> import torch
        >>> x = torch.randn(30, 2)
        >>> model, guide = Recipe("mean-field", width=20, noise="by-input").build((x, x[:, :1].exp()))
        >>> model.model.net[-1].out_features
        2
    """

    guide: str
    width: int = 50
    members: int | None = None
    noise: Noise = "constant"
    scale: Scale = "plain"
    activation: Activation = "relu"
    prior: Widths = "fixed"
    temperature: float = 1.0
    decay: bool = False

    def build(self, train: Data, classes: tuple[str, ...] = ()) -> tuple[Standardised, nn.Module]:
        """Return the untrained model, in the units of the data, and its guide.

        Args:
            train: the rows to train on: x, (N, Q), and y, (N, D), or the indices of classes, (N,).
            classes: names of the classes, where the target is one of several.
        """
        x, y = train
        outputs = len(classes) or y.shape[1] * (1 if self.noise == "constant" else 2)
        hidden = nn.ReLU() if self.activation == "relu" else nn.SiLU()
        net = nn.Sequential(nn.Linear(x.shape[1], self.width), hidden, nn.Linear(self.width, outputs))
        by_input = Prior(torch.ones(x.shape[1]), learn="*.weight", tempered=False)
        prior = {"default": None, "fixed": Prior(), "learned": by_input}[self.prior]
        model = Standardised(BayesianNet(net, prior, self._likelihood(y, bool(classes))), x, y)
        options = {} if self.members is None else {"members": self.members}
        guide = standard_guide(self.guide, **options)(model)
        assert isinstance(guide, nn.Module)
        return model, guide

    def _likelihood(self, y: Tensor, classes: bool) -> Likelihood:
        """Return p(y | f) on standardised targets; classes have neither noise nor scale."""
        constant = self.noise == "constant"
        if classes:
            return Categorical()
        if self.scale == "count":
            return Counts(10.0, learn=constant, by_input=not constant, offset=y.mean(0).clamp_min(1e-3).log())
        normal = Gaussian(10.0, learn=True) if constant else HeteroscedasticGaussian()
        return normal if self.scale == "plain" else Transformed(normal, self.scale)

    def how(self, steps: int) -> dict[str, Any]:
        """Return the loss and the schedule of ``fit`` for a training of so many steps.

        With a learned prior, the KL grows to its weight over the first half. At once it would narrow the priors before
        the weights have found the data, and they would stay at zero.
        """
        loss = None if self.temperature == 1 else ELBO(per_example="auto", temperature=self.temperature)
        if self.prior == "learned":
            rise = warm_up(max(1, steps // 2))
            loss = ELBO(per_example="auto", temperature=lambda done: self.temperature * rise(done))
        return {"loss": loss, "schedule": cosine_decay(steps) if self.decay else None}


def natural_scale(y: Tensor) -> Scale:
    """Return the scale that a target of numbers, (N, D), asks for by its values.

    Example:
        >>> import torch
        >>> targets = [0.1, 0.5, 0.9], [0.0, 3.0, 7.0], [1.5, 2.0, 90.0], [1e6, 1e6 + 1, 1e6 + 9]
        >>> [natural_scale(torch.tensor(y).unsqueeze(-1)) for y in targets]
        ['logit', 'count', 'log', 'plain']
    """
    y = y.double()
    low, high = float(y.min()), float(y.max())
    if low > 0 and high < 1:
        return "logit" if _bends(y, torch.minimum(y, 1 - y)) else "plain"
    if 0 <= low <= 1 < high and bool((y == y.floor()).all()) and float(y.mean(0).max()) <= _LARGEST_MEAN:
        return "count"
    apart = y - y.mean(0)
    skewness = apart.pow(3).mean(0) / apart.square().mean(0).pow(1.5)
    return "log" if low > 0 and bool((skewness > _SKEWED).any()) and _bends(y, y) else "plain"


def _bends(y: Tensor, room: Tensor) -> bool:
    """Whether a scale is more than another unit of values, (N, D), that are so far from where it ends, (N, D).

    If not, it gains nothing, and single precision would merge the logarithms of numbers around 1e6.
    """
    return bool((y.amax(0) - y.amin(0) > _STRAIGHT * room.amin(0)).all())
