"""Which recipe a table gets: its guide, the scale of its target and its noise, chosen on rows that are held back.

The rule (``docs/first_hour.md``): each candidate is trained on the other rows with a quarter of the steps,
and scored by its mean log density of the held-back targets, in the units of the target. There are at most four, one
after another: the natural scale of the target with constant noise; the plain scale; noise by input, or for classes a
cold posterior; and an ensemble of points instead of mean field. Each is compared with the best so far, and replaces it
if it is better by more than two standard errors of the difference. What is given is not chosen.

What is chosen is then trained on the other rows with all steps, so that the held-back rows calibrate a network like the
final one; if more steps have made it worse than another candidate, that one is trained instead.
"""

import math
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyro_dropout.errors import DivergedError, IgnoredInputsWarning, PyroDropoutError, ShapeError
from pyro_dropout.prediction.prediction import Prediction
from pyro_dropout.tables.settings import SCORED, Training, Wanted
from pyro_dropout.tabular.recipe import Data, Pair, Recipe, natural_scale
from pyro_dropout.training.checkpoints.training_checkpoint import Checkpoint
from pyro_dropout.training.history import History
from pyro_dropout.training.loop import progress_bar, sharing_bar

_MEMBERS, _COLD = 8, 0.3
_NOISY = 0.2  # nats that noise by input must gain, and that more steps may lose
_WHOLE_BATCH, _BATCH = 2048, 1024
_WIDEST, _NARROWEST, _WEIGHTS = 50, 10, 25_000  # hidden units, and weights of the first layer that are enough
_WORST = 1e6  # nats, instead of infinity
MEAN_FIELD = Recipe("mean-field", activation="silu", prior="learned", decay=True)
_REMEDY = "the loss is not finite after the last step of a candidate. Lower the learning rate."
_NOISE = {"constant": "constant noise", "by-input": "noise by input"}


@dataclass(frozen=True, eq=False)
class Choice:
    """What was chosen for a table, and why; returned by ``choose_recipe``. Each candidate is one, too.

    Attributes:
        recipe: what to train.
        prediction: what the recipe, trained without them, says about the held-back rows: for conformal intervals.
        log_prob: the log density of each target there.
        trained: the model and the guide that say so.
        history: of their training.
        scores: the mean log density of a held-back target, in nats, by candidate, in the order of their training.
        said: the choice in one line.
    """

    recipe: Recipe
    prediction: Prediction
    log_prob: Tensor
    trained: Pair
    history: History
    scores: dict[str, float] = field(default_factory=dict)
    said: str = ""

    def gain(self, other: "Choice") -> tuple[float, float]:
        """Return the mean of what one candidate gains over another on a row, and its standard error."""
        gain = self.log_prob - other.log_prob
        return gain.mean().item(), gain.std().item() / math.sqrt(len(gain)) if len(gain) > 1 else 0.0


def choose_recipe(
    train: Data,
    held: Data,
    classes: tuple[str, ...] = (),
    wanted: Wanted | None = None,
    training: Training | None = None,
    *,
    device: torch.device | str | None = None,
    progress: bool = False,
    checkpoint: Path | None = None,
) -> Choice:
    """Choose what to train on a table, by the rule at the head of this file; the same call gives the same choice."""
    wanted, training = wanted or Wanted(), training or Training()
    wanted.check(bool(classes))
    if not len(held[0]):
        raise ShapeError("held has no rows, so that nothing can be chosen; hold some rows back.")
    few, steps, auto = max(1, training.steps // 4), training.steps, wanted.guide == "auto"
    place = train[0].device if device is None else device
    there = held[0].to(place), held[1].to(place)
    search = _Search(train, there, classes, few, training, {"device": device, "progress": False}, checkpoint)
    chosen = first_recipe(train[0].shape[1], torch.cat([train[1], held[1]]), bool(classes), wanted)
    both = wanted.scale == "auto" and chosen.scale != "plain"
    noisy = wanted.noise == "auto" and not classes
    count = 1 + both + noisy + (1 + bool(classes)) * auto
    with progress_bar(count * few + steps, progress) as bar, sharing_bar(bar):
        search.attempt(chosen)
        if both:
            search.attempt(replace(search.base, scale="plain"))
        bends = search.base.scale != "count" or wanted.guide != "laplace"  # such counts have no curvature
        if noisy and bends:
            search.attempt(replace(search.base, noise="by-input"), _NOISY)
        if auto and classes:
            search.attempt(replace(search.base, temperature=_COLD))
        if auto:
            several = replace(search.base, guide="ensemble", members=wanted.members or _MEMBERS)
            search.attempt(replace(several, prior="fixed", temperature=1.0))
        search.train_longer(steps)
    return search.choice()


@dataclass(eq=False)
class _Search:
    """Candidates that are trained one after another, and the best so far."""

    train: Data
    held: Data
    classes: tuple[str, ...]
    steps: int
    training: Training
    how: dict[str, Any]
    folder: Path | None  # where trainings are kept until it is known what to train
    trainings: int = 0
    tried: list[Choice] = field(default_factory=list)
    lost: list[tuple[Recipe, DivergedError]] = field(default_factory=list)
    best: Choice = field(init=False)
    longer: Choice | None = None  # the best, trained with all steps

    def attempt(self, recipe: Recipe, least: float = 0.0) -> None:
        """Train a candidate; it is the best one if it is better by more than two standard errors and ``least``."""
        try:
            mine = self._tried(recipe)
        except DivergedError as cause:
            self.lost.append((recipe, cause))
            return
        gain, error = mine.gain(self.best) if self.tried else (math.inf, 0.0)
        if gain > max(2 * error, least):
            self.best = mine
        self.tried.append(mine)

    def train_longer(self, steps: int) -> None:
        """Train the best candidate anew, with all steps: what it then says about the held-back rows calibrates it.

        If more steps have made it worse than another one was after few, it has diverged, and the other one is taken.
        """
        while self.tried:
            try:
                mine = self._tried(self.best.recipe, steps)
            except DivergedError:  # as the final training may; the candidate's answers are there
                return
            others = [each for each in self.tried if each is not self.best]
            other = max(others, key=lambda each: each.log_prob.mean().item(), default=None)
            if other is None or other.gain(mine)[0] <= _NOISY:
                self.longer = mine
                return
            self.lost.append((self.best.recipe, DivergedError(_REMEDY)))
            self.tried, self.best = others, other

    @property
    def base(self) -> Recipe:
        """The best recipe so far, from which the next one differs; the first one, if all have diverged."""
        return self.best.recipe if self.tried else self.lost[0][0]

    def _tried(self, recipe: Recipe, steps: int | None = None) -> Choice:
        self.trainings += 1
        training, how = replace(self.training, steps=steps or self.steps), dict(self.how)
        if self.folder is not None:  # a training that has ended is not repeated: it resumes from its last step
            how["checkpoint"] = Checkpoint(self.folder / f"training-{self.trainings}", keep_last=1)
        with warnings.catch_warnings(action="ignore", category=IgnoredInputsWarning):  # the final training says it
            pair, history = recipe.train(self.train, self.classes, training, **how)
            if not all(bool(value.isfinite().all()) for value in pair[1].parameters()):
                raise DivergedError(_REMEDY)
            try:
                found = recipe.predict(pair, self.held[0], SCORED, training.seed, apart=False)
            except PyroDropoutError:
                raise
            except ValueError:  # what distributions say of parameters that are not finite
                raise DivergedError(_REMEDY) from None
        log_prob = found.log_prob(self.held[1]).double().cpu().nan_to_num(nan=-_WORST, neginf=-_WORST)
        return Choice(recipe, found, log_prob, pair, history)

    def choice(self) -> Choice:
        """Return the best candidate, and what is to be said about it."""
        if not self.tried:
            raise self.lost[0][1]
        if bool((self.best.log_prob <= -_WORST).all()):
            raise DivergedError(_REMEDY)
        best, mine = self.best, self._parts(self.best.recipe)
        scores = {", ".join(self._parts(each.recipe)): each.log_prob.mean().item() for each in self.tried}
        share = len(best.log_prob) / (len(best.log_prob) + len(self.train[1]))
        others = [(each.recipe, self._against(each)) for each in self.tried if each is not best]
        others += [(recipe, "diverged") for recipe, _ in self.lost]
        told = [f"{' with '.join(p for p in self._parts(each) if p not in mine)} {how}" for each, how in others]
        said = f"{', '.join(mine)}: chosen on {100 * share:.0f} % held back" + f"; {', '.join(told)}" * bool(told)
        return replace(self.longer or best, scores=scores, said=f"{said}.")

    def _parts(self, recipe: Recipe) -> list[str]:
        """Return what a recipe is, in words."""
        guide = recipe.guide + (" with a learned prior" if recipe.prior == "learned" else "")
        guide += " (cold)" if recipe.temperature < 1 else ""
        return [guide] if self.classes else [guide, f"{recipe.scale} target", _NOISE[recipe.noise]]

    def _against(self, other: Choice) -> str:
        """Return what another candidate would have lost."""
        loss, error = self.best.gain(other)
        if loss >= 0:
            return f"would lose {loss:.2g} nats"
        if -loss <= 2 * error:
            return f"would gain {-loss:.2g} ± {error:.1g} nats (may be chance)"
        noisier = other.recipe.noise == "by-input" != self.best.recipe.noise
        return f"would gain {-loss:.2g} nats (too few to count{'; --noise by-input takes it' if noisier else ''})"


def first_recipe(inputs: int, y: Tensor, classes: bool, wanted: Wanted) -> Recipe:
    """Return the first candidate for targets y: what is given, and for "auto" the head of the rule in this file.

    Points that are anchored at draws of the prior take it at full weight, and the paper's, which is wider where there
    are many inputs, holds them back less. All other guides have the default of ``BayesianNet``.
    """
    auto = wanted.guide == "auto"
    start = MEAN_FIELD if auto else Recipe(wanted.guide, prior="fixed" if wanted.guide == "ensemble" else "default")
    on: Any = "plain" if classes else natural_scale(y) if wanted.scale == "auto" else wanted.scale
    noise: Any = "constant" if wanted.noise == "auto" else wanted.noise
    # A step costs rows x inputs x units.
    width = max(_NARROWEST, min(_WIDEST, _WEIGHTS // inputs)) if wanted.width is None else wanted.width
    return replace(start, width=width, members=None if auto else wanted.members, scale=on, noise=noise)


def batch_for(rows: int, given: int | None = None) -> int | None:
    """Return how many rows a step takes: those given, all rows of a small table, and 1,024 of a larger one."""
    return given if given is not None or rows <= _WHOLE_BATCH else _BATCH
