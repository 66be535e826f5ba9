"""The paper's formulas: weight decay and τ, covariance functions, row mixtures, their KL, Gaussian processes."""

from pyro_dropout.generative.gaussian_processes import DeepGP, FiniteRankGP
from pyro_dropout.mathematics.covariance import ArcCosine, ArcSine, Layered
from pyro_dropout.mathematics.distributions import BernoulliMixture, MultiplicativeNormal, RowMixture
from pyro_dropout.mathematics.divergence import kl, kl_gap
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
    implied_tau,
    optimizer_weight_decay,
    standardised_tau,
    weight_decay,
)

__all__ = [
    "ArcCosine",
    "ArcSine",
    "BernoulliMixture",
    "DeepGP",
    "FiniteRank",
    "FiniteRankGP",
    "Layered",
    "MultiplicativeNormal",
    "RowMixture",
    "SecondLayer",
    "dropout_objective",
    "finite_rank_features",
    "finite_rank_log_marginal",
    "implied_length_scale",
    "implied_tau",
    "kl",
    "kl_gap",
    "label_entropy",
    "optimizer_weight_decay",
    "second_layer_features",
    "standardised_tau",
    "weight_decay",
]
