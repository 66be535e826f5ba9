"""The public names, with the module that each comes from; they are imported when first used."""

from .comparison.compare import compare as compare
from .comparison.comparison import Comparison as Comparison
from .comparison.large_k import plot_kl_gap as plot_kl_gap
from .datasets.bundled import co2 as co2
from .generative.exact_gp import GP as GP
from .generative.gaussian_processes import (
    DeepGP as DeepGP,
)
from .generative.gaussian_processes import (
    FiniteRankGP as FiniteRankGP,
)
from .generative.likelihoods import (
    Bernoulli as Bernoulli,
)
from .generative.likelihoods import (
    Categorical as Categorical,
)
from .generative.likelihoods import (
    Counts as Counts,
)
from .generative.likelihoods import (
    Gaussian as Gaussian,
)
from .generative.likelihoods import (
    HeteroscedasticGaussian as HeteroscedasticGaussian,
)
from .generative.likelihoods import (
    Likelihood as Likelihood,
)
from .generative.likelihoods import (
    Poisson as Poisson,
)
from .generative.likelihoods import (
    Transformed as Transformed,
)
from .generative.networks import BayesianNet as BayesianNet
from .generative.priors import Prior as Prior
from .generative.standardised import Standardised as Standardised
from .guides import (
    AutoConcreteDropout as AutoConcreteDropout,
)
from .guides import (
    AutoDropout as AutoDropout,
)
from .guides import (
    AutoFullRank as AutoFullRank,
)
from .guides import (
    AutoLaplace as AutoLaplace,
)
from .guides import (
    AutoLowRank as AutoLowRank,
)
from .guides import (
    AutoMeanField as AutoMeanField,
)
from .guides import (
    AutoMultiplicative as AutoMultiplicative,
)
from .guides import (
    AutoRowMixture as AutoRowMixture,
)
from .guides.ensemble import Ensemble as Ensemble
from .guides.from_dropout import from_dropout as from_dropout
from .judging.conformal import (
    Conformal as Conformal,
)
from .judging.conformal import (
    conformal as conformal,
)
from .judging.decisions import (
    Cascade as Cascade,
)
from .judging.decisions import (
    RejectionCurve as RejectionCurve,
)
from .judging.decisions import (
    cascade as cascade,
)
from .judging.decisions import (
    defer as defer,
)
from .judging.decisions import (
    rejection_curve as rejection_curve,
)
from .judging.decisions import thompson as thompson
from .judging.diagnostics.elbo_report import (
    ElboReport as ElboReport,
)
from .judging.diagnostics.elbo_report import (
    elbo_report as elbo_report,
)
from .judging.diagnostics.inference_data import (
    LOO as LOO,
)
from .judging.diagnostics.inference_data import (
    khat as khat,
)
from .judging.diagnostics.inference_data import (
    loo as loo,
)
from .judging.diagnostics.inference_data import (
    to_arviz as to_arviz,
)
from .judging.diagnostics.sbc import (
    SBC as SBC,
)
from .judging.diagnostics.sbc import (
    sbc as sbc,
)
from .judging.recalibration import (
    refit_tau as refit_tau,
)
from .judging.recalibration import (
    refit_temperature as refit_temperature,
)
from .judging.recalibration import (
    tempered as tempered,
)
from .judging.recalibration import (
    with_tau as with_tau,
)
from .judging.scores.calibration import (
    CoverageCurve as CoverageCurve,
)
from .judging.scores.calibration import (
    UncertaintyPercentile as UncertaintyPercentile,
)
from .judging.scores.calibration import (
    coverage as coverage,
)
from .judging.scores.calibration import (
    coverage_curve as coverage_curve,
)
from .judging.scores.calibration import (
    pit as pit,
)
from .judging.scores.calibration import (
    plot_pit as plot_pit,
)
from .judging.scores.calibration import (
    rescale as rescale,
)
from .judging.scores.class_calibration import (
    Reliability as Reliability,
)
from .judging.scores.class_calibration import (
    brier as brier,
)
from .judging.scores.class_calibration import (
    ece as ece,
)
from .judging.scores.class_calibration import (
    reliability as reliability,
)
from .judging.scores.crps import crps as crps
from .judging.scores.distance import (
    PredictiveDistance as PredictiveDistance,
)
from .judging.scores.distance import (
    predictive_distance as predictive_distance,
)
from .judging.scores.errors import interval_score as interval_score
from .judging.support import Support as Support
from .mathematics.covariance import (
    ArcCosine as ArcCosine,
)
from .mathematics.covariance import (
    ArcSine as ArcSine,
)
from .mathematics.covariance import (
    Layered as Layered,
)
from .mathematics.distributions import (
    BernoulliMixture as BernoulliMixture,
)
from .mathematics.distributions import (
    MultiplicativeNormal as MultiplicativeNormal,
)
from .mathematics.distributions import (
    RowMixture as RowMixture,
)
from .mathematics.divergence import (
    kl as kl,
)
from .mathematics.divergence import (
    kl_gap as kl_gap,
)
from .mathematics.errors import (
    IgnoredInputsWarning as IgnoredInputsWarning,
)
from .mathematics.errors import (
    NoWeightWarning as NoWeightWarning,
)
from .mathematics.errors import (
    PyroDropoutError as PyroDropoutError,
)
from .mathematics.errors import (
    RangeError as RangeError,
)
from .mathematics.errors import (
    ShapeError as ShapeError,
)
from .mathematics.errors import (
    SingularError as SingularError,
)
from .mathematics.finite_rank import (
    FiniteRank as FiniteRank,
)
from .mathematics.finite_rank import (
    SecondLayer as SecondLayer,
)
from .mathematics.finite_rank import (
    finite_rank_features as finite_rank_features,
)
from .mathematics.finite_rank import (
    finite_rank_log_marginal as finite_rank_log_marginal,
)
from .mathematics.finite_rank import (
    second_layer_features as second_layer_features,
)
from .mathematics.label_entropy import label_entropy as label_entropy
from .mathematics.objective import (
    dropout_objective as dropout_objective,
)
from .mathematics.objective import (
    implied_length_scale as implied_length_scale,
)
from .mathematics.objective import (
    optimizer_weight_decay as optimizer_weight_decay,
)
from .mathematics.objective import (
    precision as precision,
)
from .mathematics.objective import (
    standardised_precision as standardised_precision,
)
from .mathematics.objective import (
    weight_decay as weight_decay,
)
from .prediction.linearised_prediction import LinearisedPrediction as LinearisedPrediction
from .prediction.predict import predict as predict
from .prediction.predict_fleet import (
    FleetPrediction as FleetPrediction,
)
from .prediction.predict_fleet import (
    predict_fleet as predict_fleet,
)
from .prediction.prediction import Prediction as Prediction
from .prediction.sampled_posterior import SampledPosterior as SampledPosterior
from .prediction.site_prediction import SitePrediction as SitePrediction
from .references.exact import (
    GaussianPosterior as GaussianPosterior,
)
from .references.exact import (
    conjugate as conjugate,
)
from .references.exact import gp_posterior as gp_posterior
from .references.nuts.nuts import nuts as nuts
from .sklearn.estimators import (
    DropoutClassifier as DropoutClassifier,
)
from .sklearn.estimators import (
    DropoutRegressor as DropoutRegressor,
)
from .tables.table import Table as Table
from .tabular.fit_table import fit_table as fit_table
from .tabular.fitted import FittedTable as FittedTable
from .training.checkpoints.posterior_file import (
    DifferentModelError as DifferentModelError,
)
from .training.checkpoints.posterior_file import (
    load as load,
)
from .training.checkpoints.posterior_file import (
    save as save,
)
from .training.checkpoints.tensor_file import DamagedFileError as DamagedFileError
from .training.checkpoints.training_checkpoint import Checkpoint as Checkpoint
from .training.fit import fit as fit
from .training.fleet.fleet import Fleet as Fleet
from .training.history import (
    DivergedError as DivergedError,
)
from .training.history import (
    History as History,
)
from .training.laplace.evidence import (
    Evidence as Evidence,
)
from .training.laplace.evidence import (
    maximise_evidence as maximise_evidence,
)
from .training.laplace.laplace import laplace as laplace
from .training.loss.elbo import ELBO as ELBO
from .training.loss.per_example import per_example as per_example
from .training.loss.temperature import warm_up as warm_up
from .training.optimisers import (
    Update as Update,
)
from .training.optimisers import (
    inverse_decay as inverse_decay,
)
from .training.svi import SVI as SVI
from .training.swag import swag as swag

__version__: str
