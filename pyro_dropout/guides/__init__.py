"""Pyro guides: one posterior approximation a file; each reads the equation, the class, its parameters, its q(w)."""

from pyro_dropout.guides.concrete import AutoConcreteDropout
from pyro_dropout.guides.dropout import AutoDropout
from pyro_dropout.guides.low_rank import AutoLowRank
from pyro_dropout.guides.mean_field import AutoMeanField
from pyro_dropout.guides.multiplicative import AutoMultiplicative
from pyro_dropout.guides.row_mixture import AutoRowMixture
from pyro_dropout.mathematics import divergence as _divergence  # noqa: F401 - registers the KL of what guides draw from

GUIDES = (AutoDropout, AutoMultiplicative, AutoMeanField, AutoRowMixture, AutoLowRank, AutoConcreteDropout)

__all__ = [
    "GUIDES",
    "AutoConcreteDropout",
    "AutoDropout",
    "AutoLowRank",
    "AutoMeanField",
    "AutoMultiplicative",
    "AutoRowMixture",
]
