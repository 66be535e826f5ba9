"""Pyro guides, one a file: the equation of q(w), the class with its registry entry, its parameters, its q(w)."""

from pyro_dropout.guides.concrete import AutoConcreteDropout
from pyro_dropout.guides.dropout import AutoDropout
from pyro_dropout.guides.ensemble import Ensemble
from pyro_dropout.guides.full_rank import AutoFullRank
from pyro_dropout.guides.laplace import AutoLaplace
from pyro_dropout.guides.low_rank import AutoLowRank
from pyro_dropout.guides.mean_field import AutoMeanField
from pyro_dropout.guides.multiplicative import AutoMultiplicative
from pyro_dropout.guides.row_mixture import AutoRowMixture
from pyro_dropout.mathematics import divergence as _divergence  # noqa: F401 - registers the KL of what guides draw from
from pyro_dropout.registry import guides as _guides

# Every class once, in registry order; an ensemble is made of them.
GUIDES = tuple(dict.fromkeys(entry.guide for entry in _guides().values() if entry.per_site))

__all__ = [
    "GUIDES",
    "AutoConcreteDropout",
    "AutoDropout",
    "AutoFullRank",
    "AutoLaplace",
    "AutoLowRank",
    "AutoMeanField",
    "AutoMultiplicative",
    "AutoRowMixture",
    "Ensemble",
]
