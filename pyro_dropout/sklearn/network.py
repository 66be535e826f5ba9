"""The network behind an estimator, stored as its settings and plain tensors.

A model is not pickled, because a pickle depends on the code; it is rebuilt from its settings and loaded with its
tensors.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyro
import torch
from torch import Tensor, nn

from pyro_dropout.comparison.standard_models import kept
from pyro_dropout.generative.likelihoods import Categorical, Gaussian, Likelihood
from pyro_dropout.generative.networks import BayesianNet
from pyro_dropout.generative.priors import Prior
from pyro_dropout.generative.random_state import forked, seeded
from pyro_dropout.generative.standardised import Standardised
from pyro_dropout.guides.base import SiteGuide
from pyro_dropout.guides.ensemble import Ensemble
from pyro_dropout.judging.recalibration import refit_tau, reweighted
from pyro_dropout.prediction.predict import predict
from pyro_dropout.prediction.prediction import Prediction
from pyro_dropout.registry import resolve_guide
from pyro_dropout.tabular.recipe import Recipe, layers
from pyro_dropout.training.fit import fit
from pyro_dropout.training.history import History

Pair = tuple[Standardised, SiteGuide | Ensemble]
Points = tuple[Tensor, Tensor]

_POINTS, _DRAWS = 512, 32  # per forward pass; fixed, so that the draws do not depend on the number of points
_FIRST_TAU = 10.0  # initial value for standardised targets, if the noise is learned


@dataclass(frozen=True)
class Architecture:
    """Everything needed to build a network and its posterior before training, as a ``Recipe`` is."""

    hidden: tuple[int, ...]
    activation: str
    length_scale: float
    guide: str
    keep: float
    members: int | None = None

    def build(self, train: Points, classes: tuple[str, ...] = (), tau: Tensor | None = None) -> Pair:
        """Return a model in the units of the data, and its guide, ready to be trained."""
        x, y = train
        outputs = len(classes) or y.shape[1]
        net = layers([x.shape[1], *self.hidden, outputs], self.activation)
        likelihood: Likelihood = Categorical() if classes else Gaussian(torch.ones(outputs))
        model = BayesianNet(net, Prior(self.length_scale, width_scaled="all", tempered=True), likelihood)
        whole = Standardised(model, x, y)
        if not classes:
            set_noise(whole, tau)
        entry = resolve_guide(self.guide)
        options = {"members": self.members} if self.members and "members" in entry.options else {}
        return whole, entry.make(model, kept(whole, entry.learns_keep, self.keep), **options)


def set_noise(model: Standardised, tau: Tensor | None) -> None:
    """Set the noise precision ``tau`` of each target of a regression, in the units of y; None to learn it."""
    if tau is None:
        model.model.likelihood = Gaussian(torch.full_like(model.y_std, _FIRST_TAU), learn=True)
    else:
        model.model.likelihood = Gaussian(tau.to(model.y_std) * model.y_std.square())


Plan = Architecture | Recipe  # what builds a network and its posterior


@dataclass(frozen=True, eq=False)
class Learned:
    """A trained model and guide as plain tensors on the CPU, for pickling and for other processes."""

    plan: Plan
    inputs: int
    outputs: int
    classes: tuple[str, ...]
    model: dict[str, Tensor]
    guide: dict[str, Tensor]

    @classmethod
    def of(cls, plan: Plan, inputs: int, outputs: int, classes: tuple[str, ...], *pair: nn.Module) -> "Learned":
        """Return the state of a model and its guide, with the numbers of inputs and outputs."""
        states = ({k: v.detach().cpu().clone() for k, v in part.state_dict().items()} for part in pair)
        return cls(plan, inputs, outputs, classes, *states)

    def pair(self, device: torch.device | str = "cpu") -> Pair:
        """Return the model and its guide in float64, so that predictions do not depend on how points are batched."""
        # Data of the right shape, whose targets have a logarithm and log-odds.
        x, half = torch.zeros(2, self.inputs, dtype=torch.float64), torch.full((2, self.outputs), 0.5).double()
        y = torch.zeros(2, dtype=torch.long) if self.classes else half
        noise: Any = {"tau": torch.ones(self.outputs)} if isinstance(self.plan, Architecture) else {}
        with forked():  # the initial values are overwritten
            model, guide = self.plan.build((x, y), self.classes, **noise)
        for part, state in ((model.double(), self.model), (guide.double(), self.guide)):
            part.load_state_dict(state)
        return model.to(device), guide.to(device)  # type: ignore[return-value]

    def noise(self) -> Tensor | None:
        """Return the noise precision of each target of a regression, (D,), in the units of y; None if it has none."""
        likelihood = self.pair()[0].likelihood
        return likelihood.tau.detach().expand(self.outputs) if isinstance(likelihood, Gaussian) else None

    def predict(self, model: Standardised, guide: nn.Module, x: Tensor, **how: Any) -> Prediction:
        """Return the prediction of its pair, all points from the same draws; a linearised network has none."""
        method: Any = resolve_guide(self.plan.guide).method
        found: Prediction = predict(model, guide, x, shared=method == "mc", method=method, keep_samples=True, **how)
        return found


def train(pair: Pair, x: Tensor, y: Tensor, **options: Any) -> History:
    """Train a pair in float32 on data standardised in float64, with options of ``fit``; move it to the CPU."""
    model, guide = pair
    y = model.standard_y(y)
    history = fit(model.model, guide, model.standard_x(x).float(), y.float() if y.is_floating_point() else y, **options)
    for part in pair:
        part.to("cpu")
    return history


def best_noise(learned: Learned, x: Tensor, y: Tensor, *, samples: int, seed: int) -> Tensor:
    """Return the noise precision of each target, (D,), that fits held-back rows.

    The precisions learned with the weights are right relative to each other; the held-back rows give the factor by
    which they are too large.
    """
    model, guide = learned.pair()
    likelihood = model.likelihood
    assert isinstance(likelihood, Gaussian)
    noise = likelihood.tau.sqrt()
    answer = learned.predict(model, guide, x, samples=samples, seed=seed)
    in_noise = reweighted(answer, Gaussian(1.0), answer.samples * noise)
    return torch.as_tensor(noise.square() * refit_tau(in_noise, y * noise))


def answers(
    learned: Learned,
    x: Tensor,
    read: Callable[[Prediction], tuple[Tensor, ...]],
    *,
    samples: int,
    seed: int,
) -> list[Tensor]:
    """Return what ``read`` extracts from the predictions at x, (N, Q), all from the same ``samples`` draws."""
    with alone(seed, x.device):
        ask = partial(learned.predict, *learned.pair(x.device), samples=samples, seed=seed)
        pieces = [read(ask(part, chunk=_DRAWS * len(part))) for part in x.split(_POINTS)]
    return [torch.cat(parts) for parts in zip(*pieces, strict=True)]


@contextlib.contextmanager
def alone(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the random numbers and use an empty Pyro param store within this context; restore both afterwards.

    Both belong to the process, so threads take turns.
    """
    with seeded(seed, device), pyro.get_param_store().scope():
        yield
