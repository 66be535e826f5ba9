"""MC dropout as a Pyro guide, on one scale with the other posterior approximations of neural networks.

Every public name is imported when it is first asked for, so that the command line shows its help, and completes a word,
without waiting for torch.
"""

from importlib.util import find_spec as _find_spec
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

if _TYPE_CHECKING:  # the same names, for type checkers and editors
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
    from pyro_dropout.answers.site_prediction import SitePrediction
    from pyro_dropout.answers.thompson import thompson
    from pyro_dropout.faces.comparing.comparison import compare
    from pyro_dropout.faces.comparing.findings import Comparison
    from pyro_dropout.faces.comparing.gap_figure import plot_kl_gap
    from pyro_dropout.faces.datasets.bundled import co2
    from pyro_dropout.faces.scikit_learn.estimators import DropoutClassifier, DropoutRegressor
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

__version__: str

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
    "SitePrediction",
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

if _find_spec("sklearn") is None:  # an extra: without it the estimators say so, but a star does not ask for them
    __all__.remove("DropoutClassifier")
    __all__.remove("DropoutRegressor")

# The module of every name; a test keeps this table, the imports above, __all__ and the API page the same.
_NAMES = {
    "answers.bound": "ElboReport elbo_report",
    "answers.calibration": "CoverageCurve coverage coverage_curve pit plot_pit",
    "answers.cascade": "Cascade cascade",
    "answers.class_calibration": "Reliability brier ece reliability",
    "answers.conjugate": "GaussianPosterior conjugate",
    "answers.crps": "crps",
    "answers.decisions": "RejectionCurve defer rejection_curve",
    "answers.diagnostics": "khat to_arviz",
    "answers.distance": "PredictiveDistance predictive_distance",
    "answers.fleet_predictive": "FleetPrediction predict_fleet",
    "answers.gp_posterior": "gp_posterior",
    "answers.leave_one_out": "LOO loo",
    "answers.percentile": "UncertaintyPercentile rescale",
    "answers.prediction": "Prediction",
    "answers.predictive": "predict",
    "answers.reference": "nuts",
    "answers.refit": "refit_tau refit_temperature tempered with_tau",
    "answers.sampled_posterior": "SampledPosterior",
    "answers.simulation_based": "SBC sbc",
    "answers.site_prediction": "SitePrediction",
    "answers.thompson": "thompson",
    "faces.comparing.comparison": "compare",
    "faces.datasets.bundled": "co2",
    "faces.scikit_learn.estimators": "DropoutClassifier DropoutRegressor",
    "faces.comparing.findings": "Comparison",
    "faces.comparing.gap_figure": "plot_kl_gap",
    "generative.exact_gp": "GP",
    "generative.gaussian_processes": "DeepGP FiniteRankGP",
    "generative.likelihoods": "Bernoulli Categorical Gaussian HeteroscedasticGaussian Likelihood Poisson",
    "generative.networks": "BayesianNet",
    "generative.priors": "Prior",
    "generative.standardised": "Standardised",
    "guides": "AutoConcreteDropout AutoDropout AutoLowRank AutoMeanField AutoMultiplicative AutoRowMixture",
    "guides.from_dropout": "from_dropout",
    "inference.checkpoint": "DifferentModelError load save",
    "inference.elbo": "ELBO",
    "inference.fleet": "Fleet",
    "inference.history": "DivergedError History",
    "inference.per_example": "per_example",
    "inference.resumption": "Checkpoint",
    "inference.svi": "SVI",
    "inference.tensor_file": "DamagedFileError",
    "inference.training": "fit",
    "inference.updates": "Update inverse_decay",
    "mathematics.covariance": "ArcCosine ArcSine Layered",
    "mathematics.distributions": "BernoulliMixture MultiplicativeNormal RowMixture",
    "mathematics.divergence": "kl kl_gap",
    "mathematics.errors": "PyroDropoutError RangeError ShapeError SingularError",
    "mathematics.finite_rank": (
        "FiniteRank SecondLayer finite_rank_features finite_rank_log_marginal second_layer_features"
    ),
    "mathematics.label_entropy": "label_entropy",
    "mathematics.objective": (
        "dropout_objective implied_length_scale optimizer_weight_decay precision standardised_precision weight_decay"
    ),
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}
_FLOORS = ("mathematics", "generative", "guides", "inference", "answers", "faces")


def __getattr__(name: str) -> _Any:
    """Import a public name, or a floor of the package, when it is asked for."""
    from importlib import import_module

    if name == "__version__":
        found: _Any = _version()
    elif name in _HOMES or name in _FLOORS:
        # torch's kl_divergence knows our q(w) from here, whichever of our names comes first.
        import_module(f"{__name__}.mathematics.divergence")
        found = import_module(f"{__name__}.{name}") if name in _FLOORS else _imported(name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{_meant(name)}", name=name)
    globals()[name] = found  # the next time it is simply there
    return found


def __dir__() -> list[str]:
    """Return what is there, and what would be there if it were asked for."""
    return sorted({*globals(), *__all__, *_FLOORS, "__version__"})


def _imported(name: str) -> _Any:
    from importlib import import_module

    try:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    except ModuleNotFoundError as missing:
        if _HOMES[name] != "faces.scikit_learn.estimators":
            raise
        raise ImportError(f'{name} needs scikit-learn; pip install "pyro-dropout[sklearn]"') from missing


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("pyro-dropout")
    except PackageNotFoundError:  # a source tree that was never installed
        return "0+source"


def _meant(name: str) -> str:
    """Return a question with the public name that is spelt most like this one, if there is one."""
    from difflib import get_close_matches

    known = [*__all__, *_FLOORS]
    close = [] if name.startswith("_") else get_close_matches(name, known, n=1)
    close = close or [each for each in known if each.lower() == name.lower()]
    return f"; did you mean {close[0]!r}?" if close else ""
