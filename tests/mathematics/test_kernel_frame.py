"""Bad input to a covariance function is named at the door."""

import math
from collections.abc import Callable

import pyro.contrib.gp as gp
import pytest
import torch

from pyro_dropout.mathematics.covariance import ArcCosine, ArcSine, Layered
from pyro_dropout.mathematics.errors import RangeError, ShapeError
from pyro_dropout.mathematics.finite_rank import (
    FiniteRank,
    SecondLayer,
    finite_rank_features,
    finite_rank_log_marginal,
    second_layer_features,
)

# --- the door ---------------------------------------------------------------------------------------------------------

ones = torch.ones
NAN = torch.tensor([[math.nan, 0.0]])
OUT_OF_RANGE: dict[str, Callable[[], object]] = {
    "input_dim must be a whole number of at least 1; got 0": lambda: ArcCosine(0),
    "variance must be positive and finite; got -1.0": lambda: ArcSine(1, -1.0),
    "length_scale must be positive and finite; got 0.0": lambda: ArcCosine(1, None, 0.0),
    "length_scale must be positive and finite; got nan": lambda: ArcSine(1, None, math.nan),
    "length_scale must be positive and finite; got [1.0, -2.0]": lambda: ArcSine(2, None, torch.tensor([1.0, -2.0])),
    "variance must be positive and finite; got 0.0": lambda: ArcSine(1, 1e-60),
    "bias_length_scale must be positive and finite; got -2": lambda: ArcSine(1, None, None, -2),
    "X must be finite; got [[nan, 0.0]]": lambda: ArcCosine(2)(NAN),
    "X must be a floating-point tensor; got torch.int64": lambda: ArcCosine(2)(ones(1, 2, dtype=torch.int64)),
    "Z must be finite; got [[nan, 0.0]]": lambda: Layered(ArcSine(1), ArcCosine(2))(ones(1, 2), NAN),
    "outer must be ArcCosine or ArcSine (deeper layers go in inner); got RBF": lambda: Layered(
        gp.kernels.RBF(1), ArcSine(1)
    ),
    "outer must be ArcCosine or ArcSine (deeper layers go in inner); got Layered": lambda: Layered(
        Layered(ArcSine(1), ArcSine(1)), ArcSine(1)
    ),
    "inner must be a Pyro kernel; got Identity": lambda: Layered(ArcSine(1), torch.nn.Identity()),
    "nonlinearity must be one of relu, tanh, erf, cos or a callable; got 'sigmoid'": lambda: FiniteRank("sigmoid", 3),
    "nonlinearity must be one of relu, tanh, erf, cos or a callable; got ''": lambda: SecondLayer("", 3),
    "cos or a callable; got 'step'": lambda: finite_rank_features(ones(1, 1), ones(1, 1), ones(1), "step"),
    "cos or a callable; got 'RELU'": lambda: second_layer_features(ones(1, 1), ones(1), "RELU"),
    "width must be a whole number of at least 1; got 0": lambda: FiniteRank("relu", 0),
    "width must be a whole number of at least 1; got -1": lambda: SecondLayer("relu", -1),
    "terms must be a whole number of at least 1; got 0": lambda: SecondLayer("relu", 2, terms=0),
    "nodes must be a whole number of at least 1; got 0": lambda: SecondLayer("relu", 2).exact(ones(1, 2), nodes=0),
    "bias_prior must be 'normal' or 'uniform'; got 'flat'": lambda: FiniteRank("cos", 3, bias_prior="flat"),
    "bias_length_scale must be absent for a uniform prior; got 1.5": lambda: FiniteRank(
        "cos", 3, bias_length_scale=1.5, bias_prior="uniform"
    ),
    "X must be finite": lambda: FiniteRank("cos", 3, 2).features(NAN),
    "x must be finite": lambda: finite_rank_features(NAN, ones(1, 2), ones(1), "relu"),
    "weight must be finite": lambda: finite_rank_features(ones(1, 2), NAN, ones(1), "relu"),
    "bias must be finite": lambda: finite_rank_features(ones(1, 2), ones(2, 2), NAN[0], "relu"),
    "h must be finite": lambda: second_layer_features(NAN, ones(2), "relu"),
    "tau must be positive and finite; got 0.0": lambda: finite_rank_log_marginal(ones(2), ones(2, 1), 0.0),
    "tau must be positive and finite; got inf": lambda: finite_rank_log_marginal(ones(2), ones(2, 1), math.inf),
    "y must be finite": lambda: finite_rank_log_marginal(NAN, ones(1, 1), 1.0),
    "features must be finite": lambda: finite_rank_log_marginal(ones(1), NAN, 1.0),
}
OUT_OF_SHAPE: dict[str, Callable[[], object]] = {
    "length_scale must have shape () or (2,); got (3,)": lambda: ArcCosine(2, None, ones(3)),
    "bias_length_scale must have shape (); got (2,)": lambda: ArcSine(2, None, None, ones(2)),
    "variance must have shape (); got (1, 1)": lambda: ArcSine(2, ones(1, 1)),
    "active_dims must name 2 columns, counted from 0; got [1]": lambda: ArcSine(2, active_dims=[1]),
    "active_dims must name 1 columns, counted from 0; got [-1]": lambda: ArcSine(1, active_dims=[-1]),
    "X must have shape (N, 2); got (3, 4)": lambda: ArcCosine(2)(ones(3, 4)),
    "X must have shape (N, 2); got (3,)": lambda: ArcSine(2)(ones(3)),
    "X must have shape (N, 3 or more); got (3, 2)": lambda: ArcSine(1, active_dims=[2])(ones(3, 2)),
    "X must have shape (N, 2); got (1, 3)": lambda: SecondLayer("relu", 2)(ones(1, 3)),
    "Z must have shape (N, 2); got (3, 1)": lambda: ArcSine(2)(ones(3, 2), ones(3, 1)),
    "k_xy must have shape (N, M) or (N,); got ()": lambda: ArcSine(1).of_gram(ones(()), ones(1), ones(1)),
    "k_xx must have shape (2,); got (3,)": lambda: ArcSine(1).of_gram(ones(2, 3), ones(3), ones(3)),
    "k_yy must have shape (3,); got (2,)": lambda: ArcSine(1).of_gram(ones(2, 3), ones(2), ones(2)),
    "x must have shape (..., N, Q); got (2,)": lambda: finite_rank_features(ones(2), ones(1, 2), ones(1), "cos"),
    "weight must have shape (..., K, 2); got (4, 3)": lambda: finite_rank_features(
        ones(1, 2), ones(4, 3), ones(4), "cos"
    ),
    "bias must have shape (..., 4); got (3,)": lambda: finite_rank_features(ones(1, 2), ones(4, 2), ones(3), "cos"),
    "leading dimensions must broadcast; got (), (5,), (3,)": lambda: finite_rank_features(
        ones(5, 1, 2), ones(3, 4, 2), ones(4), "cos"
    ),
    "h must have shape (..., N, K₂); got (2,)": lambda: second_layer_features(ones(2), ones(2), "cos"),
    "bias must have shape (..., 2); got (3,)": lambda: second_layer_features(ones(1, 2), ones(3), "cos"),
    "leading dimensions must broadcast; got (3,), (5,)": lambda: second_layer_features(
        ones(5, 1, 2), ones(3, 2), "cos"
    ),
    "tau must have shape (); got (2,)": lambda: finite_rank_log_marginal(ones(2), ones(2, 1), ones(2)),
    "y must have shape (2,) or (2, D); got (3,)": lambda: finite_rank_log_marginal(ones(3), ones(2, 1), 1.0),
    "features must have shape (..., N, K); got (3,)": lambda: finite_rank_log_marginal(ones(3), ones(3), 1.0),
}
BAD = [(RangeError, *case) for case in OUT_OF_RANGE.items()] + [(ShapeError, *case) for case in OUT_OF_SHAPE.items()]


@pytest.mark.parametrize(("error", "message", "call"), BAD, ids=[message for _, message, _ in BAD])
def test_bad_input_is_named_at_the_door(error, message, call):
    with pytest.raises(error) as caught:
        call()
    assert message in str(caught.value)
