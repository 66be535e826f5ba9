"""The public names, with the module that each comes from; they are imported when first used."""

from .comparison.compare import compare as compare
from .generative.likelihoods import Bernoulli as Bernoulli
from .generative.likelihoods import Categorical as Categorical
from .generative.likelihoods import Counts as Counts
from .generative.likelihoods import Gaussian as Gaussian
from .generative.likelihoods import HeteroscedasticGaussian as HeteroscedasticGaussian
from .generative.likelihoods import Poisson as Poisson
from .generative.likelihoods import Transformed as Transformed
from .generative.networks import BayesianNet as BayesianNet
from .generative.priors import Prior as Prior
from .generative.standardised import Standardised as Standardised
from .guides import AutoConcreteDropout as AutoConcreteDropout
from .guides import AutoDropout as AutoDropout
from .guides import AutoFullRank as AutoFullRank
from .guides import AutoLowRank as AutoLowRank
from .guides import AutoMeanField as AutoMeanField
from .guides import AutoMultiplicative as AutoMultiplicative
from .guides import AutoRowMixture as AutoRowMixture
from .guides.ensemble import Ensemble as Ensemble
from .guides.from_dropout import from_dropout as from_dropout
from .judging.conformal import conformal as conformal
from .judging.decisions import defer as defer
from .judging.diagnostics.inference_data import khat as khat
from .judging.diagnostics.inference_data import loo as loo
from .judging.diagnostics.inference_data import to_arviz as to_arviz
from .judging.diagnostics.sbc import sbc as sbc
from .judging.scores.calibration import coverage as coverage
from .judging.scores.class_calibration import ece as ece
from .judging.scores.crps import crps as crps
from .prediction.predict import predict as predict
from .references.nuts.nuts import nuts as nuts
from .sklearn.estimators import DropoutClassifier as DropoutClassifier
from .sklearn.estimators import DropoutRegressor as DropoutRegressor
from .tabular.fit_table import fit_table as fit_table
from .training.checkpoints.posterior_file import load as load
from .training.checkpoints.posterior_file import save as save
from .training.fit import fit as fit
from .training.fleet.fleet import Fleet as Fleet
from .training.laplace.laplace import laplace as laplace
from .training.loss.elbo import ELBO as ELBO
from .training.loss.per_example import per_example as per_example
from .training.svi import SVI as SVI
from .training.swag import swag as swag

__version__: str
