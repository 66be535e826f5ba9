"""MC dropout as a Pyro guide, on one scale with the other posterior approximations of neural networks."""

from importlib.metadata import PackageNotFoundError as _PackageNotFoundError
from importlib.metadata import version as _version
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from pyro_dropout.answers.bound import ElboReport, elbo_report
from pyro_dropout.answers.calibration import CoverageCurve, coverage, coverage_curve, pit, plot_pit
from pyro_dropout.answers.cascade import Cascade, cascade
from pyro_dropout.answers.class_calibration import Reliability, brier, ece, reliability
from pyro_dropout.answers.conjugate import GaussianPosterior, conjugate
from pyro_dropout.answers.crps import crps
from pyro_dropout.answers.decisions import RejectionCurve, defer, rejection_curve
from pyro_dropout.answers.diagnostics import khat, to_arviz
from pyro_dropout.answers.distance import PredictiveDistance, predictive_distance
from pyro_dropout.answers.fleet_predictive import FleetPrediction, predict_fleet
from pyro_dropout.answers.gp_posterior import gp_posterior
from pyro_dropout.answers.leave_one_out import LOO, loo
from pyro_dropout.answers.percentile import UncertaintyPercentile, rescale
from pyro_dropout.answers.prediction import Prediction
from pyro_dropout.answers.predictive import predict
from pyro_dropout.answers.reference import nuts
from pyro_dropout.answers.refit import refit_tau, refit_temperature, tempered, with_tau
from pyro_dropout.answers.sampled_posterior import SampledPosterior
from pyro_dropout.answers.simulation_based import SBC, sbc
from pyro_dropout.answers.thompson import thompson
from pyro_dropout.faces.comparison import compare
from pyro_dropout.faces.datasets import co2
from pyro_dropout.faces.findings import Comparison
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
from pyro_dropout.inference.checkpoint import DifferentModelError, load, save
from pyro_dropout.inference.elbo import ELBO
from pyro_dropout.inference.fleet import Fleet
from pyro_dropout.inference.history import DivergedError, History
from pyro_dropout.inference.per_example import per_example
from pyro_dropout.inference.resumption import Checkpoint
from pyro_dropout.inference.svi import SVI
from pyro_dropout.inference.tensor_file import DamagedFileError
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

if _TYPE_CHECKING:
    from pyro_dropout.faces.estimators import DropoutClassifier, DropoutRegressor

try:
    __version__ = _version("pyro-dropout")
except _PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+source"

__all__ = [
    "ELBO",
    "GP",
    "LOO",
    "SBC",
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
    "Cascade",
    "Categorical",
    "Checkpoint",
    "Comparison",
    "CoverageCurve",
    "DamagedFileError",
    "DeepGP",
    "DifferentModelError",
    "DivergedError",
    "DropoutClassifier",
    "DropoutRegressor",
    "ElboReport",
    "FiniteRank",
    "FiniteRankGP",
    "Fleet",
    "FleetPrediction",
    "Gaussian",
    "GaussianPosterior",
    "HeteroscedasticGaussian",
    "History",
    "Layered",
    "Likelihood",
    "MultiplicativeNormal",
    "Poisson",
    "Prediction",
    "PredictiveDistance",
    "Prior",
    "PyroDropoutError",
    "RangeError",
    "RejectionCurve",
    "Reliability",
    "RowMixture",
    "SampledPosterior",
    "SecondLayer",
    "ShapeError",
    "SingularError",
    "Standardised",
    "UncertaintyPercentile",
    "Update",
    "brier",
    "cascade",
    "co2",
    "compare",
    "conjugate",
    "coverage",
    "coverage_curve",
    "crps",
    "defer",
    "dropout_objective",
    "ece",
    "elbo_report",
    "finite_rank_features",
    "finite_rank_log_marginal",
    "fit",
    "from_dropout",
    "gp_posterior",
    "implied_length_scale",
    "inverse_decay",
    "khat",
    "kl",
    "kl_gap",
    "label_entropy",
    "load",
    "loo",
    "nuts",
    "optimizer_weight_decay",
    "per_example",
    "pit",
    "plot_kl_gap",
    "plot_pit",
    "precision",
    "predict",
    "predict_fleet",
    "predictive_distance",
    "refit_tau",
    "refit_temperature",
    "rejection_curve",
    "reliability",
    "rescale",
    "save",
    "sbc",
    "second_layer_features",
    "standardised_precision",
    "tempered",
    "thompson",
    "to_arviz",
    "weight_decay",
    "with_tau",
]


def __getattr__(name: str) -> _Any:
    """Import the estimators when they are asked for: scikit-learn is an extra, and takes a second to import."""
    if name not in ("DropoutClassifier", "DropoutRegressor"):
        raise AttributeError(f"module 'pyro_dropout' has no attribute {name!r}")
    try:
        from pyro_dropout.faces import estimators
    except ImportError as missing:
        raise ImportError(f'{name} needs scikit-learn; pip install "pyro-dropout[sklearn]"') from missing
    return getattr(estimators, name)
