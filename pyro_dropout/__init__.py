"""MC dropout as a Pyro guide, on one scale with the other posterior approximations of neural networks."""

from importlib.metadata import version as _version

from pyro_dropout.faces.gap_figure import plot_kl_gap
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

__version__ = _version("pyro-dropout")

__all__ = [
    "ArcCosine",
    "ArcSine",
    "BernoulliMixture",
    "FiniteRank",
    "Layered",
    "MultiplicativeNormal",
    "PyroDropoutError",
    "RangeError",
    "RowMixture",
    "SecondLayer",
    "ShapeError",
    "SingularError",
    "dropout_objective",
    "finite_rank_features",
    "finite_rank_log_marginal",
    "implied_length_scale",
    "kl",
    "kl_gap",
    "label_entropy",
    "optimizer_weight_decay",
    "plot_kl_gap",
    "precision",
    "second_layer_features",
    "standardised_precision",
    "weight_decay",
]
