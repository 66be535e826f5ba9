"""What the outputs of a function say about the data: p(y | f), one likelihood or family of them per file."""

from pyro_dropout.generative.likelihoods.bernoulli import Bernoulli
from pyro_dropout.generative.likelihoods.categorical import Categorical
from pyro_dropout.generative.likelihoods.counts import Counts, Poisson
from pyro_dropout.generative.likelihoods.gaussian import Gaussian
from pyro_dropout.generative.likelihoods.heteroscedastic import HeteroscedasticGaussian
from pyro_dropout.generative.likelihoods.likelihood import Likelihood, likelihood_of
from pyro_dropout.generative.likelihoods.transformed import Transformed

__all__ = [
    "Bernoulli",
    "Categorical",
    "Counts",
    "Gaussian",
    "HeteroscedasticGaussian",
    "Likelihood",
    "Poisson",
    "Transformed",
    "likelihood_of",
]
