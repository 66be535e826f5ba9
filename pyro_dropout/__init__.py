"""MC dropout as a Pyro guide, on one scale with the other posterior approximations of neural networks."""

from importlib.metadata import PackageNotFoundError as _PackageNotFoundError
from importlib.metadata import version as _version

from pyro_dropout.answers.fleet_predictive import FleetPrediction, predict_fleet
from pyro_dropout.answers.prediction import Prediction
from pyro_dropout.answers.predictive import predict
from pyro_dropout.faces.gap_figure import plot_kl_gap
from pyro_dropout.generative.exact_gp import GP
from pyro_dropout.generative.gaussian_processes import DeepGP, FiniteRankGP
from pyro_dropout.generative.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    Poisson,
)
from pyro_dropout.generative.networks import BayesianNet
from pyro_dropout.generative.priors import Prior
from pyro_dropout.generative.standardised import Standardised
from pyro_dropout.guides import (
    AutoConcreteDropout,
    AutoDropout,
    AutoLowRank,
    AutoMeanField,
    AutoMultiplicative,
    AutoRowMixture,
)
from pyro_dropout.guides.from_dropout import from_dropout
from pyro_dropout.inference.elbo import ELBO
from pyro_dropout.inference.fleet import Fleet
from pyro_dropout.inference.history import DivergedError, History
from pyro_dropout.inference.per_example import per_example
from pyro_dropout.inference.svi import SVI
from pyro_dropout.inference.training import fit
from pyro_dropout.inference.updates import Update, inverse_decay
from pyro_dropout.mathematics.covariance import ArcCosine, ArcSine, Layered
from pyro_dropout.mathematics.distributions import BernoulliMixture, MultiplicativeNormal, RowMixture
from pyro_dropout.mathematics.divergence import kl, kl_gap
from pyro_dropout.mathematics.errors import PyroDropoutError, RangeError, ShapeError, SingularError
from pyro_dropout.mathematics.finite_rank import (
    FiniteRank,
    SecondLayer,
    finite_rank_features,
    finite_rank_log_marginal,
    second_layer_features,
)
from pyro_dropout.mathematics.label_entropy import label_entropy
from pyro_dropout.mathematics.objective import (
    dropout_objective,
    implied_length_scale,
    optimizer_weight_decay,
    precision,
    standardised_precision,
    weight_decay,
)

try:
    __version__ = _version("pyro-dropout")
except _PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+source"

__all__ = [
    "ELBO",
    "GP",
    "SVI",
    "ArcCosine",
    "ArcSine",
    "AutoConcreteDropout",
    "AutoDropout",
    "AutoLowRank",
    "AutoMeanField",
    "AutoMultiplicative",
    "AutoRowMixture",
    "BayesianNet",
    "Bernoulli",
    "BernoulliMixture",
    "Categorical",
    "DeepGP",
    "DivergedError",
    "FiniteRank",
    "FiniteRankGP",
    "Fleet",
    "FleetPrediction",
    "Gaussian",
    "HeteroscedasticGaussian",
    "History",
    "Layered",
    "Likelihood",
    "MultiplicativeNormal",
    "Poisson",
    "Prediction",
    "Prior",
    "PyroDropoutError",
    "RangeError",
    "RowMixture",
    "SecondLayer",
    "ShapeError",
    "SingularError",
    "Standardised",
    "Update",
    "dropout_objective",
    "finite_rank_features",
    "finite_rank_log_marginal",
    "fit",
    "from_dropout",
    "implied_length_scale",
    "inverse_decay",
    "kl",
    "kl_gap",
    "label_entropy",
    "optimizer_weight_decay",
    "per_example",
    "plot_kl_gap",
    "precision",
    "predict",
    "predict_fleet",
    "second_layer_features",
    "standardised_precision",
    "weight_decay",
]
