"""The public names, with the module that each comes from; they are imported when first used."""

from .exact import GaussianPosterior as GaussianPosterior
from .exact import conjugate as conjugate
from .exact import gp_posterior as gp_posterior
