"""What a model, a posterior, a likelihood and a prediction are: the interfaces between the parts of the package.

Each is a ``typing.Protocol``. A class of your own that has the methods is one; it need not inherit anything.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from torch import Size, Tensor

Weights = dict[str, Tensor]

# What comes from libraries without types, each under one name that says what it is.
PyroModel = Callable[..., Any]  # a Pyro model or guide: any callable with sample statements
Predictor = Any  # a Pyro model or, beside a posterior over functions, anything with a likelihood
Message = dict[str, Any]  # a site of a Pyro trace
Trace = Any  # a pyro.poutine.Trace
Distribution = Any  # a distribution of Pyro or torch, with Pyro's methods
Tree = Any  # a tensor, or tensors in any nest of dicts, lists, tuples and dataclasses
Axes = Any  # matplotlib's
Figure = Any  # matplotlib's
Context = Any  # the ctx of a torch.autograd.Function; under vmap torch passes a class of its own
Record = dict[str, Any]  # what a JSON file holds


@runtime_checkable
class Likelihood(Protocol):
    """p(y | f): what the outputs of a function say about the targets."""

    def distribution(self, f: Tensor) -> Any:
        """Return p(y | f), with one batch element for each data point."""

    def checked(self, f: Tensor, y: Tensor) -> Tensor:
        """Return ``y`` as the distribution wants it, or raise an error that says what is wrong with it."""

    def check_values(self, f: Tensor, y: Tensor) -> None:
        """Raise an error unless every target is possible."""


@runtime_checkable
class SiteDistribution(Protocol):
    """q of one site of a guide, as Pyro's distributions are: ``pyro.distributions.Normal(m, s).to_event(2)`` is one.

    Its batch and event shapes together are the shape of the site, and its event holds all dimensions that do not belong
    to a plate. ``mean`` and ``icdf`` are optional: ``guide.mean()`` needs the first, and quantiles come from draws
    without the second.
    """

    @property
    def batch_shape(self) -> Size:
        """The sizes of the plates."""

    @property
    def event_shape(self) -> Size:
        """The shape of one draw in one element of the plates."""

    @property
    def has_rsample(self) -> bool:
        """Whether draws have gradients; a point and a mixture with trained probabilities may do without."""

    def __call__(self, sample_shape: Size = ...) -> Tensor:
        """Draw with gradients, for a sample statement."""

    def sample(self, sample_shape: Size = ...) -> Tensor:
        """Draw without gradients, (*sample_shape, *batch_shape, *event_shape)."""

    def log_prob(self, value: Tensor) -> Tensor:
        """Return log q of draws, (*sample_shape, *batch_shape)."""

    def expand(self, batch_shape: Size) -> "SiteDistribution":
        """Return the same distribution in larger plates."""


@runtime_checkable
class Model(Protocol):
    """A function with random weights, as ``BayesianNet`` and the Gaussian processes are."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model as a Pyro program."""

    @property
    def sites(self) -> Mapping[str, Any]:
        """The sites of the weights, by name, each with its shape, kind and prior."""

    def evaluate(self, weights: Mapping[str, Tensor], x: Any) -> Tensor:
        """Return the function's outputs f, (..., N, D), for given weights."""


@runtime_checkable
class Posterior(Protocol):
    """A distribution over weights that can be drawn from."""

    def sample_weights(self, n: int) -> Weights:
        """Return n draws of every site, {name: (n, *shape)}."""


@runtime_checkable
class HasMean(Posterior, Protocol):
    """A posterior that knows E[w]; a tensor, which has a mean too, is none."""

    def mean(self) -> Weights:
        """Return E[w] of every site."""


@runtime_checkable
class HasMoments(HasMean, Protocol):
    """A posterior that knows E[w] and Cov[w]."""

    def covariance_root(self, rows: Mapping[str, Tensor]) -> Tensor:
        """Return root, (B, K), with root rootᵀ = R Cov[w] Rᵀ for rows R, {site: (B, *shape)}; linear in the rows."""


@runtime_checkable
class HasDensity(Protocol):
    """A posterior with a normalised density."""

    def log_prob(self, weights: Mapping[str, Tensor]) -> Tensor:
        """Return log q(w) of each draw."""


@runtime_checkable
class HasDraws(Protocol):
    """A posterior that numbers its draws, or the members that they come from, and is asked for them by number."""

    def order(self, n: int) -> Tensor:
        """Return the numbers of n draws: each number once before any comes twice."""

    def draws_at(self, numbers: Tensor) -> Weights:
        """Return the draws with these numbers."""


@runtime_checkable
class FunctionPosterior(Protocol):
    """A posterior over functions rather than weights, such as that of a Gaussian process."""

    def sample_functions(self, x: Tensor, n: int) -> Tensor:
        """Return n functions at the points ``x``, (n, N, D)."""


@runtime_checkable
class Prediction(Protocol):
    """What a model and its posterior say about the targets at N points."""

    @property
    def mean(self) -> Tensor:
        """E[y], (N, D)."""

    @property
    def variance(self) -> Tensor:
        """Var[y], (N, D): epistemic plus aleatoric."""

    @property
    def epistemic(self) -> Tensor:
        """The variance of E[y | f] over the draws, (N, D)."""

    @property
    def aleatoric(self) -> Tensor:
        """The mean of Var[y | f] over the draws, (N, D)."""

    @property
    def samples(self) -> Tensor:
        """The model's outputs in every draw, (T, N, outputs)."""

    def log_prob(self, y: Tensor) -> Tensor:
        """Return the log density of each target."""

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Return the ends of the central interval of this probability."""
