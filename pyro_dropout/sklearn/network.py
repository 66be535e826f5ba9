"""What is behind an estimator: the recipe of a guide that is named, its noise, and what is learned as plain tensors.

A model is not pickled, because a pickle depends on the code; it is rebuilt from its recipe and loaded with its tensors.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import pyro
import torch
from torch import Tensor

from pyro_dropout.generative.likelihoods import Gaussian
from pyro_dropout.generative.priors import Prior
from pyro_dropout.generative.process_state import seeded
from pyro_dropout.generative.standardised import Standardised
from pyro_dropout.judging.recalibration import refit_tau, reweighted
from pyro_dropout.tabular.recipe import Data, Pair, Recipe

Units = tuple[Tensor, Tensor]  # a mean and a standard deviation of each column


@dataclass(frozen=True)
class Named(Recipe):
    """The recipe of a guide that is named, with what the settings of an estimator say.

    Attributes:
        hidden: widths of the hidden layers, instead of ``width``.
        keep: probability that an input or a hidden unit is kept.
        length_scale: of the prior.
        tau: noise precision of each target of a regression; None to learn it.
    """

    hidden: tuple[int, ...] = ()
    keep: float = 0.9
    length_scale: float = 1.0
    tau: tuple[float, ...] | None = None

    def build(self, train: Data, classes: tuple[str, ...] = ()) -> Pair:
        """Return the untrained model and its guide."""
        prior = Prior(self.length_scale, width_scaled="all", tempered=True)
        pair = self._built(self.hidden, prior, train, classes, self.keep)
        self.set_noise(pair[0])
        return pair

    def set_noise(self, model: Standardised) -> None:
        """Let a model have the noise of this recipe, if it is not learned."""
        if self.tau is not None:
            model.model.likelihood = Gaussian(torch.tensor(self.tau).to(model.y_std) * model.y_std.square())

    def best_noise(self, pair: Pair, held: Data, samples: int, seed: int) -> tuple[float, ...]:
        """Return the noise precision of each target that fits held-back rows best.

        The precisions learned with the weights are right relative to each other; the held-back rows give the factor by
        which they are too large.
        """
        likelihood = pair[0].likelihood
        assert isinstance(likelihood, Gaussian)
        tau = likelihood.tau.detach()
        answer = self.predict(pair, held[0], samples, seed)
        in_noise = reweighted(answer, Gaussian(1.0).to(tau.device), answer.samples * tau.sqrt())
        return tuple((tau * refit_tau(in_noise, held[1].to(tau) * tau.sqrt())).expand(held[1].shape[1]).tolist())


@dataclass(frozen=True, eq=False)
class Learned:
    """A trained model and guide as plain tensors on the CPU, for pickling and for other processes."""

    recipe: Recipe
    classes: tuple[str, ...]
    inputs: int
    outputs: int
    model: dict[str, Tensor]
    guide: dict[str, Tensor]

    @classmethod
    def of(cls, recipe: Recipe, classes: tuple[str, ...], pair: Pair, x: Units, y: Units) -> "Learned":
        """Return the state of a model of data that were standardised with these units, as a model of raw data."""
        states = [{name: value.detach().cpu().clone() for name, value in part.state_dict().items()} for part in pair]
        for name, (mean, std) in (("x", x), ("y", y)):
            states[0][f"{name}_mean"] = mean + std * states[0][f"{name}_mean"]
            states[0][f"{name}_std"] = std * states[0][f"{name}_std"]
        return cls(recipe, classes, len(x[0]), y[0].numel(), *states)

    def pair(self, device: torch.device | str = "cpu") -> Pair:
        """Return the model and its guide in float64, so that predictions do not depend on how points are batched."""
        model, guide = self.recipe.empty(self.inputs, self.classes, self.outputs)
        for part, state in ((model.double(), self.model), (guide.double(), self.guide)):
            part.load_state_dict(state)
        return model.to(device), guide.to(device)

    def noise(self) -> Tensor | None:
        """Return the noise precision of each target of a regression, (D,), in the units of y; None if it has none."""
        likelihood = self.pair()[0].likelihood
        return likelihood.tau.detach().expand(self.outputs) if isinstance(likelihood, Gaussian) else None


@contextlib.contextmanager
def alone(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the random numbers and use an empty Pyro param store within this context; restore both afterwards.

    Both belong to the process, so threads take turns.
    """
    with seeded(seed, device), pyro.get_param_store().scope():
        yield
