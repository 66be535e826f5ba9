"""What is trained on a table: the guide, the scale of the target, the noise and the network, as plain settings.

A recipe is made of JSON values; it is the section "model" of a run's record. ``train`` builds the model and its guide
and trains them, and ``predict`` asks them: for tables, and for the estimators of scikit-learn.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pyro_dropout.comparison.standard_models import standard_guide
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
from pyro_dropout.generative.process_state import forked
from pyro_dropout.generative.standardised import Standardised
from pyro_dropout.prediction.predict import predict
from pyro_dropout.prediction.prediction import Prediction
from pyro_dropout.registry import resolve_guide
from pyro_dropout.tables.settings import LARGEST, Noise, Scale, Settings, Training, setting
from pyro_dropout.training.fit import fit
from pyro_dropout.training.history import History
from pyro_dropout.training.loss.elbo import ELBO
from pyro_dropout.training.loss.temperature import warm_up
from pyro_dropout.training.optimisers import cosine_decay

Data = tuple[Tensor, Tensor]
Pair = tuple[Standardised, nn.Module]
_LARGEST_MEAN = 200.0  # of counts; larger ones are as good as continuous
_SKEWED = 0.5
_TOGETHER = 128  # draws of the weights that are made at once
_PIECE = 2**22  # outputs in memory at once, over rows and draws
_STRAIGHT = 1e-3  # a range, beside the distance from 0 or 1, over which log and logit are straight lines
ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "silu": nn.SiLU, "tanh": nn.Tanh}
Activation = Literal["relu", "silu", "tanh"]
Widths = Literal["default", "fixed", "learned"]


@dataclass(frozen=True)
class Recipe(Settings):
    """Everything that decides what is trained on a table.

    Attributes:
        guide: name of the guide, as on the command line.
        width: hidden units.
        members: of an ensemble; None for its default, and for any other guide.
        noise: "constant", or "by-input": the network also gives the precision of the noise at each input.
        scale: of the target: "plain"; "log" for positive numbers, "logit" for proportions between 0 and 1, and "count"
            for whole numbers from 0. Classes have none.
        activation: of the hidden units: "relu", or "silu", which is smooth, or "tanh".
        prior: "default", that of ``BayesianNet``; "fixed", the paper's ``Prior()``; or "learned": the prior of the
            first layer has a width for each input, and that of the last layer one, learned with the guide, so that
            inputs which say nothing are left out of account. For guides that have a density, such as "mean-field".
        temperature: factor on the KL; below 1 the posterior is narrower than Bayes' rule makes it.
        decay: whether the learning rate falls to zero along half a cosine, instead of staying as it is.
    """

    guide: str
    width: int = setting(50, limits=(1, LARGEST))
    members: int | None = setting(None, limits=(1, LARGEST))
    noise: Noise = "constant"
    scale: Scale = "plain"
    activation: Activation = "relu"
    prior: Widths = "fixed"
    temperature: float = setting(1.0, limits=(0.0, 1e300))
    decay: bool = False

    def build(self, train: Data, classes: tuple[str, ...] = ()) -> Pair:
        """Return the untrained model, in the units of the data, and its guide."""
        by_input = Prior(torch.ones(train[0].shape[1]), learn="*.weight", tempered=False)
        prior = {"default": None, "fixed": Prior(), "learned": by_input}[self.prior]
        return self._built((self.width,), prior, train, classes)

    def _built(
        self, hidden: Sequence[int], prior: Prior | None, train: Data, classes: tuple[str, ...], keep: float = 0.9
    ) -> Pair:
        x, y = train
        outputs = len(classes) or y.shape[1] * (1 if self.noise == "constant" else 2)
        net = layers([x.shape[1], *hidden, outputs], self.activation)
        model = Standardised(BayesianNet(net, prior, self._likelihood(y, bool(classes))), x, y)
        options = {} if self.members is None else {"members": self.members}
        guide = standard_guide(self.guide, keep, **options)(model)
        assert isinstance(guide, nn.Module)
        return model, guide

    def empty(self, inputs: int, classes: tuple[str, ...], outputs: int = 1) -> Pair:
        """Return a model and its guide with shapes only, ready for loading a state."""
        y = torch.zeros(2, dtype=torch.long) if classes else torch.full((2, outputs), 0.5)  # on any scale
        with forked():
            return self.build((torch.zeros(2, inputs), y), classes)

    def train(self, data: Data, classes: tuple[str, ...], training: Training, **how: Any) -> tuple[Pair, History]:
        """Return a model and its guide, trained from a seed with further arguments of ``fit``."""
        with forked():
            torch.manual_seed(training.seed)
            pair = self.build(data, classes)
        return pair, fit(*pair, *data, **training.options() | self.how(training.steps) | how)

    def predict(self, pair: Pair, x: Tensor, samples: int, seed: int, apart: bool = True) -> Prediction:
        """Return the prediction of rows, (N, Q), all by the same draws; ``apart``: whatever the other rows are."""
        model, guide = pair
        how: Any = {"method": resolve_guide(self.guide).method, "samples": samples, "seed": seed}
        how["shared"] = how["method"] == "mc"
        if apart and not getattr(guide, "points", False):  # points are drawn one after another in any case
            how["together"] = min(_TOGETHER, samples)
        found: Prediction = predict(model, guide, x.to(next(guide.parameters()).device), keep_samples=True, **how)
        return found

    def in_pieces(self, pair: Pair, x: Tensor, samples: int, seed: int, outputs: int) -> Iterator[Prediction]:
        """Yield the predictions of rows, (N, Q), in parts that fit into memory."""
        for part in torch.split(x, max(1, _PIECE // (samples * max(1, outputs)))):
            yield self.predict(pair, part, samples, seed)

    def _likelihood(self, y: Tensor, classes: bool) -> Likelihood:
        """Return p(y | f) on standardised targets; classes have neither noise nor scale."""
        constant = self.noise == "constant"
        if classes:
            return Categorical()
        if self.scale == "count":
            return Counts(10.0, learn=constant, by_input=not constant, offset=y.mean(0).clamp_min(1e-3).log())
        tau = 10.0 if y.shape[1] == 1 else torch.full(y.shape[1:], 10.0)
        normal = Gaussian(tau, learn=True) if constant else HeteroscedasticGaussian()
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


def layers(widths: Sequence[int], activation: str) -> nn.Sequential:
    """Return linear layers of these widths, inputs first, with a non-linearity between each two."""
    found: list[nn.Module] = []
    for before, after in pairwise(widths):
        found += [nn.Linear(before, after), ACTIVATIONS[activation]()]
    return nn.Sequential(*found[:-1])


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
