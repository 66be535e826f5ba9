"""Scikit-learn estimators: a Bayesian network with one of six posteriors, behind ``fit`` and ``predict``.

They work in pipelines, grid searches and cross-validation. Inputs and targets are given in their own units and are
standardised internally. A prediction is a mean over functions drawn with a seed that the fit stores, so a point gets
the same prediction alone and in a batch.
"""

from collections.abc import Callable
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data
from torch import Tensor

from pyro_dropout.generative.random_state import seeded
from pyro_dropout.generative.standardised import Standardised
from pyro_dropout.mathematics.checks import check_count, check_device
from pyro_dropout.mathematics.errors import PyroDropoutError
from pyro_dropout.prediction.prediction import Prediction
from pyro_dropout.sklearn.inputs import check_settings, held_back, kept_rows, layer_widths
from pyro_dropout.sklearn.network import Architecture, Learned, alone, answers, best_noise, set_noise, train
from pyro_dropout.training.history import History

_LONG = 5000  # number of steps from which compilation, about ten seconds, pays off
_SEEDS = 2**31 - 1


class _Network(BaseEstimator):  # type: ignore[misc]
    """Base of both estimators: train a model and its guide, store what was learned, and draw functions from it."""

    learned_: Learned
    seed_: int

    # Any: by scikit-learn's convention constructors accept everything, and fit validates it.
    def __init__(
        self,
        hidden_layer_sizes: Any = (50,),
        *,
        activation: Any = "relu",
        guide: Any = "dropout",
        keep: Any = 0.9,
        length_scale: Any = 1.0,
        max_steps: Any = 1000,
        batch_size: Any = 128,
        learning_rate: Any = 0.01,
        samples: Any = 200,
        early_stopping: Any = False,
        validation_fraction: Any = 0.2,
        patience: Any = 10,
        refit: Any = True,
        warm_start: Any = False,
        random_state: Any = None,
        device: Any = None,
        compile: Any = "auto",
        verbose: Any = False,
    ) -> None:
        self.hidden_layer_sizes = hidden_layer_sizes
        self.activation = activation
        self.guide = guide
        self.keep = keep
        self.length_scale = length_scale
        self.max_steps = max_steps
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.samples = samples
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.patience = patience
        self.refit = refit
        self.warm_start = warm_start
        self.random_state = random_state
        self.device = device
        self.compile = compile
        self.verbose = verbose

    def _train(self, x: Tensor, y: Tensor, outputs: int, classes: bool) -> None:
        """Train on x, (N, Q), and y, (N, D) or class indices, and set the fitted attributes."""
        device, plan = self._settled(x.shape[1], outputs, classes)
        earlier = None if self._fresh() else self.learned_
        if earlier is not None and earlier.architecture != plan:
            raise PyroDropoutError(
                f"warm_start=True continues with the fitted network, which is {earlier.architecture}; the settings now"
                f" give {plan}. Set warm_start=False to start afresh."
            )
        random = check_random_state(self.random_state)
        seeds = [int(seed) for seed in random.randint(_SEEDS, size=3)]
        tau = None if classes or self.tau == "auto" else torch.full((outputs,), float(self.tau))
        searching = not classes and tau is None and earlier is None
        mine, held = torch.ones(len(x), dtype=torch.bool), None
        if self.early_stopping or searching:
            held = held_back(len(x), self.validation_fraction, seeds[0], y if classes else None)
            mine = ~held
        with alone(seeds[1], device):
            pair = plan.pair(x[mine], y[mine], tau) if earlier is None else earlier.continued(tau)
            watched = (x[held], y[held]) if held is not None and self.early_stopping else None
            history = self._run(pair, x[mine], y[mine], self.max_steps, device, watched)
            if searching:
                tau = best_noise(Learned.of(plan, *pair), x[held], y[held], samples=self.samples, seed=seeds[2])
                set_noise(pair[0], tau)
            validation = history.validation
            if held is not None and self.refit and earlier is None:
                pair = plan.pair(x, y, tau)
                history = self._run(pair, x, y, history.best_step or history.steps, device)
        self.learned_ = Learned.of(plan, *pair)
        self.seed_ = seeds[2]
        self.n_iter_ = history.steps
        self.loss_curve_ = history.losses.double().numpy()
        self.validation_curve_ = np.array(validation, dtype=np.float64).reshape(-1, 2)

    def _fresh(self) -> bool:
        return not (self.warm_start and hasattr(self, "learned_"))

    def _settled(self, inputs: int, outputs: int, classes: bool) -> tuple[torch.device, Architecture]:
        check_settings(self.get_params())
        hidden = layer_widths(self.hidden_layer_sizes)
        keep = kept_rows(self.keep, len(hidden) + 1)
        plan = Architecture(
            inputs, outputs, hidden, self.activation, float(self.length_scale), self.guide, keep, classes
        )
        return check_device("device", "cpu" if self.device is None else self.device), plan

    def _run(
        self, pair: Any, x: Tensor, y: Tensor, steps: int, device: torch.device, validation: Any = None
    ) -> History:
        long = self.max_steps >= _LONG
        return train(
            pair,
            x,
            y,
            validation,
            steps=steps,
            batch_size=self.batch_size,
            lr=float(self.learning_rate),
            compile=long and "auto" if self.compile == "auto" else self.compile,
            progress=bool(self.verbose),
            device=device,
            patience=self.patience,
        )

    # --- answers ------------------------------------------------------------------------------------------------------

    def model_and_guide(self) -> tuple[Standardised, Any]:
        """Return the fitted model and its guide, for use with the rest of this package.

        They are copies in float64, in the units of the data; training them does not change the estimator.
        """
        check_is_fitted(self)
        pair: tuple[Standardised, Any] = self.learned_.pair()
        return pair

    def _answers(self, X: Any, samples: int, seed: int, read: Callable[[Prediction], tuple[Tensor, ...]]) -> list[Any]:
        """Return what ``read`` finds in the prediction at X, as arrays."""
        check_is_fitted(self)
        device = check_device("device", "cpu" if self.device is None else self.device)
        x = _tensor(validate_data(self, X, reset=False, dtype=np.float64)).to(device)
        return [part.cpu().numpy() for part in answers(self.learned_, x, read, samples=samples, seed=seed)]

    def _collected(self, X: Any, read: Callable[[Prediction], tuple[Tensor, ...]]) -> list[Any]:
        check_is_fitted(self)
        check_count("samples", self.samples)
        return self._answers(X, self.samples, self.seed_, read)

    def _drawn(self, X: Any, n_samples: int, random_state: Any) -> Any:
        """Return new targets of ``n_samples`` functions at X, (N, n_samples, ...), noise included."""
        check_count("n_samples", n_samples)
        function, noise = (int(seed) for seed in check_random_state(random_state).randint(_SEEDS, size=2))
        thrown = torch.Generator().manual_seed(noise)  # seeds each piece's noise, so that no two pieces share it

        def draw(answer: Prediction) -> tuple[Tensor, ...]:
            with seeded(int(torch.randint(_SEEDS, (), generator=thrown)), answer.samples.device):
                return (answer.likelihood.distribution(answer.samples).sample().transpose(0, 1),)

        return self._answers(X, n_samples, function, draw)[0]


class DropoutRegressor(RegressorMixin, _Network):  # type: ignore[misc]
    """A Bayesian network for regression, whose predictions come with uncertainty.

    Args:
        hidden_layer_sizes: widths of the hidden layers; () for a linear model.
        activation: their non-linearity, "relu" or "tanh".
        guide: the posterior: "dropout", "concrete" (dropout that learns ``keep``), "multiplicative" (Gaussian dropout),
            "mean-field", "row-mixture" or "low-rank".
        keep: probability that an input or hidden unit is kept, for the first three guides; a number, or one for each
            weight layer, the inputs first. Given a number, an only input is always kept.
        length_scale: l of the prior N(0, l⁻²) of the first layer's weights, on standardised inputs.
        tau: precision of the noise, 1/variance in the units of y; "auto" chooses it on held-back data.
        max_steps: maximum number of training steps.
        batch_size: points per step; all points if there are fewer.
        learning_rate: of Adam.
        samples: number of functions that a prediction averages over.
        early_stopping: whether to stop when the score on held-back data no longer improves; it is evaluated fifty
            times in ``max_steps`` steps.
        validation_fraction: the fraction of rows held back, for early stopping and for tau="auto".
        patience: number of evaluations without improvement before training stops.
        refit: whether to train again on all rows, with the steps and the noise chosen on the held-back rows. Otherwise
            the held-back rows are never trained on.
        warm_start: whether ``fit`` continues from the last fit, with its weights, its standardisation and the noise
            that it chose.
        random_state: makes fit and predictions reproducible; None, an integer or a numpy RandomState.
        device: where to compute, such as "cuda"; None for the CPU.
        compile: True, False, or "auto": compile from 5000 steps on, where the ten seconds of compilation pay off.
        verbose: whether to show progress bars.

    Attributes:
        tau_: the noise precision in the units of y, one for each target.
        n_iter_: number of steps.
        loss_curve_: -ELBO of the standardised data at each step, (steps,).
        validation_curve_: step and -log p(y | w) per held-back point, (evaluations, 2), with early stopping.
        n_features_in_: number of features.
        feature_names_in_: their names, if X had any.
        learned_: the settings and weights, as plain tensors; ``model_and_guide()`` builds a model from them.

    Example:
        >>> import numpy as np
        >>> from pyro_dropout.sklearn.estimators import DropoutRegressor
        >>> X = np.linspace(-1, 1, 100)[:, None]
        >>> regressor = DropoutRegressor((20,), max_steps=200, tau=100.0, random_state=0).fit(X, X[:, 0])
        >>> mean, std = regressor.predict([[0.0], [4.0]], return_std=True)
        >>> mean.shape, bool(std[1] > std[0] > 0.1)
        ((2,), True)
        >>> lower, upper = regressor.interval([[0.0]], level=0.9)
        >>> regressor.sample_y([[0.0], [4.0]], n_samples=5, random_state=0).shape
        (2, 5)
    """

    def __init__(
        self,
        hidden_layer_sizes: Any = (50,),
        *,
        activation: Any = "relu",
        guide: Any = "dropout",
        keep: Any = 0.9,
        length_scale: Any = 1.0,
        tau: Any = "auto",
        max_steps: Any = 1000,
        batch_size: Any = 128,
        learning_rate: Any = 0.01,
        samples: Any = 200,
        early_stopping: Any = False,
        validation_fraction: Any = 0.2,
        patience: Any = 10,
        refit: Any = True,
        warm_start: Any = False,
        random_state: Any = None,
        device: Any = None,
        compile: Any = "auto",
        verbose: Any = False,
    ) -> None:
        super().__init__(
            hidden_layer_sizes,
            activation=activation,
            guide=guide,
            keep=keep,
            length_scale=length_scale,
            max_steps=max_steps,
            batch_size=batch_size,
            learning_rate=learning_rate,
            samples=samples,
            early_stopping=early_stopping,
            validation_fraction=validation_fraction,
            patience=patience,
            refit=refit,
            warm_start=warm_start,
            random_state=random_state,
            device=device,
            compile=compile,
            verbose=verbose,
        )
        self.tau = tau

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def fit(self, X: Any, y: Any) -> Self:
        """Train on inputs X, (N, Q), and targets y, (N,) or (N, D)."""
        X, y = validate_data(
            self, X, y, dtype=np.float64, multi_output=True, y_numeric=True, ensure_min_samples=2, reset=self._fresh()
        )
        self._one_column = y.ndim == 1
        targets = _tensor(y.reshape(len(y), -1))
        self._train(_tensor(X), targets, targets.shape[1], classes=False)
        likelihood: Any = self.learned_.pair()[0].likelihood
        tau = likelihood.tau.numpy()
        self.tau_ = float(tau[0]) if self._one_column else tau
        return self

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Return the expected targets at X; with ``return_std`` also their standard deviations, noise included."""
        mean, std = (self._shaped(part) for part in self._collected(X, lambda answer: (answer.mean, answer.std)))
        return (mean, std) if return_std else mean

    def interval(self, X: Any, level: float = 0.95) -> tuple[Any, Any]:
        """Return the ends of the central intervals that contain the targets at X with probability ``level``."""
        lower, upper = self._collected(X, lambda answer: answer.interval(level))
        return self._shaped(lower), self._shaped(upper)

    def sample_y(self, X: Any, n_samples: int = 1, random_state: Any = None) -> Any:
        """Draw targets at X: each sample is one function at all points, and noise; (N, n_samples) or (N, D, n_samples).

        With ``random_state=None`` every call makes new draws.
        """
        drawn = np.moveaxis(self._drawn(X, n_samples, random_state), 1, -1)
        return drawn[:, 0] if self._one_column else drawn

    def _shaped(self, values: Any) -> Any:
        return values[:, 0] if self._one_column else values


class DropoutClassifier(ClassifierMixin, _Network):  # type: ignore[misc]
    """A Bayesian network for classes, whose probabilities are averaged over its posterior.

    Takes the arguments of ``DropoutRegressor`` except ``tau``: classes have no separate noise. Rows are held back only
    with ``early_stopping``, and about the same share of every class.

    Attributes:
        classes_: the classes, sorted.
        n_iter_: number of steps.
        loss_curve_: -ELBO at each step, (steps,).
        validation_curve_: step and -log p(y | w) per held-back point, (evaluations, 2), with early stopping.
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

    classes_: Any

    def fit(self, X: Any, y: Any) -> Self:
        """Train on inputs X, (N, Q), and the classes y of its rows, (N,): numbers or strings."""
        X, y = validate_data(self, X, y, dtype=np.float64, ensure_min_samples=2, reset=self._fresh())
        y = column_or_1d(y, warn=True)
        check_classification_targets(y)
        found = np.unique(y)
        if len(found) < 2:
            raise PyroDropoutError(f"y must have at least two classes; got one class, {found.tolist()[0]!r}.")
        known = found if self._fresh() else self.classes_
        unknown = np.setdiff1d(found, known)
        if len(unknown):
            raise PyroDropoutError(
                f"warm_start=True continues with the classes of the first fit, {known.tolist()}; y also has"
                f" {unknown.tolist()[0]!r}. Set warm_start=False to start afresh."
            )
        self.classes_ = known
        self._train(_tensor(X), torch.from_numpy(np.searchsorted(known, y)), len(known), classes=True)
        return self

    def predict_proba(self, X: Any) -> Any:
        """Return the probabilities of the classes at X, (N, C), in the order of ``classes_``."""
        return self._collected(X, lambda answer: (answer.probs,))[0]

    def predict(self, X: Any) -> Any:
        """Return the most probable class at each row of X."""
        best = self.predict_proba(X).argmax(1)
        return self.classes_[best]

    def sample_y(self, X: Any, n_samples: int = 1, random_state: Any = None) -> Any:
        """Draw classes at X: each sample is one function at all points, and a class drawn at each; (N, n_samples).

        With ``random_state=None`` every call makes new draws.
        """
        return self.classes_[self._drawn(X, n_samples, random_state)]


def _tensor(values: Any) -> Tensor:
    """Return a copy in float64; arrays from scikit-learn may be read-only."""
    return torch.tensor(np.asarray(values, dtype=np.float64))
