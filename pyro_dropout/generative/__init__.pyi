"""The public names, with the module that each comes from; they are imported when first used."""

from .exact_gp import GP as GP
from .likelihoods import Likelihood as Likelihood
