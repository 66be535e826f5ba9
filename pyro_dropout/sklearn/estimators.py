"""Scikit-learn estimators: a Bayesian network with any registered guide, behind ``fit`` and ``predict``.

They work in pipelines, grid searches and cross-validation. Inputs and targets are given in their own units and are
standardised internally. A prediction is a mean over functions drawn with a seed that the fit stores, so a point gets
the same prediction alone and in a batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Literal, Self, overload

import numpy as np
import torch
from numpy.random import RandomState
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import Tags, check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data
from torch import Tensor

from pyro_dropout.errors import PyroDropoutError, warn_caller
from pyro_dropout.generative.standardised import moments
from pyro_dropout.judging.conformal import conformal
from pyro_dropout.judging.support import Support, some_of
from pyro_dropout.mathematics.checks import also, check_count, check_device, check_level
from pyro_dropout.prediction.prediction import Prediction
from pyro_dropout.registry import resolve_guide
from pyro_dropout.sklearn.inputs import (
    check_numbers,
    check_settings,
    dense_tensor,
    held_back,
    layer_widths,
)
from pyro_dropout.sklearn.network import Learned, Named, alone
from pyro_dropout.tables.settings import SAMPLES, Training, Wanted
from pyro_dropout.tabular.calibration import Calibration
from pyro_dropout.tabular.choice import batch_for, choose_recipe
from pyro_dropout.tabular.recipe import Pair, natural_scale

_SEEDS = 2**31 - 1
_STEPS = 1000  # of a guide that is named
_SETTINGS = {"max_iter": "max_steps", "n_estimators": "members", "n_samples": "samples"}  # scikit-learn's own names

Array = NDArray[Any]  # of numbers or of classes
Floats = NDArray[np.float64]


@dataclass(eq=False, repr=False)  # its constructor stores every setting as given, which is what scikit-learn asks for
class _Network(BaseEstimator):  # type: ignore[misc]
    """Base of both estimators: train a model and its guide, store what was learned, and draw functions from it."""

    hidden_layer_sizes: int | Sequence[int] | NDArray[np.integer] = (50,)
    _: KW_ONLY
    activation: str = "relu"
    guide: str = "auto"
    keep: float = 0.9
    members: int | None = None
    length_scale: float = 1.0
    max_steps: int | None = None
    batch_size: int = 128
    learning_rate: float = 0.01
    samples: int = SAMPLES
    validation_fraction: float = 0.2
    refit: bool = True
    random_state: int | RandomState | None = None
    device: torch.device | str | int | None = None
    compile: bool | Literal["auto"] = "auto"
    verbose: bool = False

    def _train(self, x: Tensor, y: Tensor, classes: tuple[str, ...] = ()) -> None:
        """Train on x, (N, Q), and y, (N, D) or indices of classes, and set the fitted attributes."""
        check_settings(self)
        device = check_device("device", "cpu" if self.device is None else self.device)
        split, seed, self.seed_ = (int(seed) for seed in check_random_state(self.random_state).randint(_SEEDS, size=3))
        auto = self.guide == "auto"
        searching = auto or (not classes and self.tau == "auto")
        held = torch.zeros(len(x), dtype=torch.bool)
        if searching:
            held = held_back(len(x), self.validation_fraction, split, y if classes else None)
        # Networks compute in single precision, so their numbers are standardised before, in double precision.
        plain = not classes and not (auto and natural_scale(y) != "plain")
        units = moments("x", x), moments("y", y) if plain else (torch.zeros(()), torch.ones(()))
        inputs, targets = ((each - mean) / std for each, (mean, std) in zip((x, y), units, strict=True))
        whole = inputs.float(), y if classes else targets.float()
        near, far = ((whole[0][rows], whole[1][rows]) for rows in (~held, held))
        steps = self.max_steps or (Training.steps if auto else _STEPS)
        how: Any = {"device": device, "progress": bool(self.verbose)}
        self.calibration_ = Calibration()
        with alone(seed, device):
            if auto:
                (width,), batch = layer_widths(self.hidden_layer_sizes), batch_for(len(x))
                training = Training(steps, batch_size=batch, seed=seed, compile=self.compile)
                wanted = Wanted(width=width, members=self.members)
                choice = choose_recipe(near, far, classes, wanted, training, device=device)
                recipe, pair, history = choice.recipe, choice.trained, choice.history
                intervals = conformal(choice.prediction, far[1].to(choice.prediction.mean.device))
                self.choice_, self.calibration_ = choice.said, Calibration(int(held.sum()), intervals=intervals)
            else:
                training = Training(steps, float(self.learning_rate), self.batch_size, seed, self.compile)
                recipe = self._named(classes, units[1][1])
                pair, history = recipe.train(near, classes, training, **how)
                if searching:
                    recipe = replace(recipe, tau=recipe.best_noise(pair, far, self.samples, self.seed_))
                    recipe.set_noise(pair[0])
            if searching and self.refit:
                pair, history = recipe.train(whole, classes, training, **how)
        self._rows = some_of(x, self.seed_)
        self.learned_ = Learned.of(recipe, classes, pair, *units)
        self.n_iter_ = history.steps
        self.loss_curve_ = history.losses.double().numpy()

    def _named(self, classes: tuple[str, ...], std: Tensor) -> Named:
        """Return the recipe of a guide that is named, for targets that are divided by ``std``."""
        return Named(
            resolve_guide(self.guide).name,
            members=self.members if "members" in resolve_guide(self.guide).options else None,
            activation=self.activation,  # type: ignore[arg-type]
            prior="default",
            hidden=layer_widths(self.hidden_layer_sizes),
            keep=float(self.keep),
            length_scale=float(self.length_scale),
            tau=None if classes or self.tau == "auto" else tuple((float(self.tau) * std.square()).tolist()),
        )

    set_params = also(**_SETTINGS)(BaseEstimator.set_params)

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    # --- answers ------------------------------------------------------------------------------------------------------

    def model_and_guide(self) -> Pair:
        """Return the fitted model and its guide, for use with the rest of this package.

        They are copies in float64, in the units of the data; training them does not change the estimator.
        """
        check_is_fitted(self)
        return self.learned_.pair()

    def unfamiliar(self, X: object) -> NDArray[np.bool_]:
        """Return which rows of X are unlike the training rows, (N,): beyond them, or in a hole between them.

        As the column of that name of ``pyro-dropout predict``; at least ten training rows are needed. About one row in
        thirty of those like the training rows is among them.

        Example:
            >>> import numpy as np
            >>> from pyro_dropout.sklearn.estimators import DropoutRegressor
            >>> X = np.random.default_rng(0).normal(size=(200, 2))
            >>> regressor = DropoutRegressor(guide="dropout", tau=1.0, max_steps=5, random_state=0).fit(X, X[:, 0])
            >>> regressor.unfamiliar([[0.1, 0.2], [0.1, 8.0]]).tolist()
            [False, True]
        """
        x = self._inputs(X)
        found: NDArray[np.bool_] = Support.of(self._rows, seed=self.seed_).flag(x).numpy()
        return found

    def _inputs(self, X: object) -> Tensor:
        """Return the rows of X, checked."""
        check_is_fitted(self)
        x = dense_tensor(validate_data(self, X, reset=False, dtype=np.float64, accept_sparse="csr"))
        check_numbers("X", X)
        return x

    def _answers(self, X: object, read: Callable[[Prediction], tuple[Tensor, ...]]) -> list[Array]:
        """Return what ``read`` finds in the prediction at X, as arrays."""
        check_count("samples", self.samples)
        x = self._inputs(X).to(check_device("device", "cpu" if self.device is None else self.device))
        own = self.learned_
        with alone(self.seed_, x.device):  # all from the same draws
            outputs, pair = max(own.outputs, len(own.classes)), own.pair(x.device)
            found = [read(each) for each in own.recipe.in_pieces(pair, x, self.samples, self.seed_, outputs)]
        return [torch.cat(each).cpu().numpy() for each in zip(*found, strict=True)]


@also(**_SETTINGS)
@dataclass(eq=False, repr=False)
class DropoutRegressor(RegressorMixin, _Network):  # type: ignore[misc]
    """A Bayesian network for regression, whose predictions come with uncertainty.

    ``max_iter``, ``n_estimators`` and ``n_samples``, as other estimators call them, are accepted for ``max_steps``,
    ``members`` and ``samples``.

    Args:
        hidden_layer_sizes: widths of the hidden layers; () for a linear model.
        activation: their non-linearity, "relu" or "tanh".
        guide: the posterior. By default "auto": guide, scale of the target and noise are chosen on held-back rows, and
            intervals are calibrated on them, as ``pyro-dropout fit`` does, usually in at most the steps of three
            trainings; the settings that this decides must be left at their defaults. Or a guide by its name, as
            ``pyro-dropout fit --help`` lists them: "dropout-ensemble", "dropout", "mean-field", ….
        keep: probability that an input or hidden unit is kept, for guides with dropout. An only input always is.
        members: of an ensemble; by default 8 with guide="auto", and else those of the guide.
        length_scale: l of the prior N(0, l⁻²) of the first layer's weights, on standardised inputs.
        tau: precision of the noise, 1/variance in the units of y; "auto" chooses it on held-back data.
        max_steps: maximum number of training steps; by default 1200 with guide="auto", and else 1000.
        batch_size: points per step; all points if there are fewer.
        learning_rate: of Adam.
        samples: number of functions that a prediction averages over.
        validation_fraction: the fraction of rows held back, for guide="auto" and for tau="auto".
        refit: whether to train again on all rows, with what was chosen on the held-back rows. Otherwise the held-back
            rows are never trained on.
        random_state: makes fit and predictions reproducible; None, an integer or a numpy RandomState.
        device: where to compute, such as "cuda"; None for the CPU.
        compile: as in ``fit``: "auto" compiles trainings that are long enough for it.
        verbose: whether to show progress bars.

    Attributes:
        tau_: the noise precision in the units of y, one for each target; None where the noise is not one number.
        choice_: what was chosen, in a line, with guide="auto".
        calibration_: what held-back rows say of the intervals, with guide="auto".
        n_iter_: number of steps.
        loss_curve_: -ELBO of the standardised data at each step, (steps,).
        n_features_in_: number of features.
        feature_names_in_: their names, if X had any.
        learned_: the settings and weights, as plain tensors; ``model_and_guide()`` builds a model from them.

    Example:
        >>> import numpy as np
        >>> from pyro_dropout.sklearn.estimators import DropoutRegressor
        >>> X = np.linspace(-1, 1, 100)[:, None]
        >>> regressor = DropoutRegressor((20,), max_steps=200, random_state=0).fit(X, X[:, 0])
        >>> mean, std = regressor.predict([[0.0], [4.0]], return_std=True)
        >>> mean.shape, bool(std[1] > std[0])
        ((2,), True)
        >>> lower, upper = regressor.predict_interval([[0.0]], level=0.9)
        >>> regressor.predict_quantiles([[0.0]], [0.1, 0.5, 0.9]).shape
        (1, 3)
    """

    tau: float | Literal["auto"] = field(default="auto", kw_only=True)

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def fit(self, X: object, y: object) -> Self:
        """Train on inputs X, (N, Q), and targets y, (N,) or (N, D)."""
        how = {"dtype": np.float64, "accept_sparse": "csr", "ensure_min_samples": 2}
        x, values = validate_data(self, X, y, multi_output=True, y_numeric=True, **how)
        check_numbers("X", X)
        check_numbers("y", y)
        self._one_column = values.ndim == 1
        targets = dense_tensor(values.reshape(len(values), -1))
        self._train(dense_tensor(x), targets)
        found = self.learned_.noise()
        tau = None if found is None else found.numpy()
        self.tau_ = float(tau[0]) if tau is not None and self._one_column else tau
        return self

    @overload
    def predict(self, X: object, return_std: Literal[False] = False) -> Floats: ...

    @overload
    def predict(self, X: object, return_std: Literal[True]) -> tuple[Floats, Floats]: ...

    def predict(self, X: object, return_std: bool = False) -> Floats | tuple[Floats, Floats]:
        """Return the expected targets at X; with ``return_std`` also their standard deviations, noise included."""
        mean, std = (self._shaped(part) for part in self._answers(X, lambda answer: (answer.mean, answer.std)))
        if lost := int((~np.isfinite(mean)).sum()):
            warn_caller(
                f"{lost} of {mean.size} means are not finite; predict_quantiles(X, [0.5]) may be.",
            )
        return (mean, std) if return_std else mean

    def predict_interval(self, X: object, level: float = 0.95) -> tuple[Floats, Floats]:
        """Return the ends of the central intervals that contain the targets at X with probability ``level``.

        With guide="auto" they are calibrated on the held-back rows, if these are enough for the level.
        """
        check_level("level", level)
        check_is_fitted(self)
        own = self.calibration_
        lower, upper = self._answers(X, lambda answer: own.interval(answer, level))
        return self._shaped(lower), self._shaped(upper)

    def predict_quantiles(self, X: object, quantiles: Sequence[float] = (0.05, 0.5, 0.95)) -> Floats:
        """Return quantiles of the targets at X, (N, len(quantiles)) or (N, D, len(quantiles)).

        With guide="auto" they are ends of calibrated central intervals, without a guarantee for each side.
        """
        for level in quantiles:
            check_level("quantiles", level)
        check_is_fitted(self)
        own = self.calibration_
        found = self._answers(X, lambda answer: tuple(own.quantile(answer, level) for level in quantiles))
        return self._shaped(np.stack(found, -1))

    def interval(self, X: object, level: float = 0.95) -> tuple[Floats, Floats]:
        """Return what ``predict_interval`` does, which is its name now."""
        warn_caller("interval is called predict_interval now; this name will go.", DeprecationWarning)
        return self.predict_interval(X, level)

    def _shaped(self, values: Floats) -> Floats:
        return values[:, 0] if self._one_column else values


@also(**_SETTINGS)
class DropoutClassifier(ClassifierMixin, _Network):  # type: ignore[misc]
    """A Bayesian network for classes, whose probabilities are averaged over its posterior.

    Takes the arguments of ``DropoutRegressor`` except ``tau``: classes have no separate noise. With a named guide, no
    rows are held back.

    Attributes:
        classes_: the classes, sorted.
        n_iter_: number of steps.
        loss_curve_: -ELBO at each step, (steps,).
        n_features_in_: number of features.
        feature_names_in_: their names, if X had any.
        learned_: the settings and weights, as plain tensors; ``model_and_guide()`` builds a model from them.

    Example:
        >>> import numpy as np
        >>> from pyro_dropout.sklearn.estimators import DropoutClassifier
        >>> X = np.linspace(-1, 1, 60)[:, None]
        >>> y = np.where(X[:, 0] > 0, "right", "left")
        >>> classifier = DropoutClassifier((20,), max_steps=100, random_state=0).fit(X, y)
        >>> classifier.predict([[-0.9], [0.9]]).tolist()
        ['left', 'right']
        >>> bool(classifier.predict_proba([[0.9]])[0, 1] > 0.8)
        True
    """

    classes_: Array

    def fit(self, X: object, y: object) -> Self:
        """Train on inputs X, (N, Q), and the classes y of its rows, (N,): numbers or strings."""
        x, values = validate_data(self, X, y, dtype=np.float64, accept_sparse="csr", ensure_min_samples=2)
        check_numbers("X", X)
        values = column_or_1d(values, warn=True)
        check_classification_targets(values)
        found = np.unique(values)
        if len(found) < 2:
            raise PyroDropoutError(f"y must have at least two classes; got one class, {found.tolist()[0]!r}.")
        self.classes_ = found
        names = tuple(map(str, range(len(found))))
        self._train(dense_tensor(x), torch.from_numpy(np.searchsorted(found, values)), names)
        return self

    def predict_proba(self, X: object) -> Floats:
        """Return the probabilities of the classes at X, (N, C), in the order of ``classes_``."""
        return self._answers(X, lambda answer: (answer.probs,))[0]

    def predict(self, X: object) -> Array:
        """Return the most probable class at each row of X."""
        best: Array = self.predict_proba(X).argmax(1)
        return self.classes_[best]
