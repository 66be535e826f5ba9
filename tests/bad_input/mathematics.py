"""Bad input to the mathematics: conversions, distributions, divergences and covariances."""

import torch
from torch import tensor
from torch.distributions import Normal

from pyro_dropout import errors, paper
from tests.bad_input.row import LABELS, NAN, OTHER, RANGE, SHAPE, Row, X, Y


def mixture() -> paper.BernoulliMixture:
    return paper.BernoulliMixture(torch.ones(2, 3), keep=0.9, scale=0.1)


ROWS = [
    Row(RANGE, "keep", "got 0.0", lambda: paper.weight_decay(0.0, 1.0, 10)),
    Row(RANGE, "tau", "got nan", lambda: paper.weight_decay(0.9, NAN, 10)),
    Row(RANGE, "num_data", "got 10.5", lambda: paper.weight_decay(0.9, 1.0, 10.5)),
    Row(RANGE, "weight_decay", "got 0.0", lambda: paper.implied_tau(0.9, 0.0, 10)),
    Row(RANGE, "tau", "got -1.0", lambda: paper.implied_length_scale(0.9, -1.0, 0.001, 10)),
    Row(RANGE, "loss", "got 'l1'", lambda: paper.optimizer_weight_decay(0.9, 1.0, 10, loss="l1")),
    Row(RANGE, "tau", "got 2.0", lambda: paper.optimizer_weight_decay(0.9, 2.0, 10, loss="cross_entropy")),
    Row(RANGE, "out_features", "got 0", lambda: paper.optimizer_weight_decay(0.9, 2.0, 10, loss="mse", out_features=0)),
    Row(RANGE, "target_std", "got 0.0", lambda: paper.standardised_tau(1.0, 0.0)),
    Row(SHAPE, "keep and tau", "got keep (2,), tau (3,)", lambda: paper.weight_decay(torch.ones(2), torch.ones(3), 10)),
    Row(SHAPE, "y and y_hat", "got (12,) and (12, 1). With (N, 1), an",
        lambda: paper.dropout_objective(X[:, 0], X, [], 0.0)),
    Row(RANGE, "y", "got a tensor of shape (12, 1) with no", lambda: paper.dropout_objective(X * NAN, X, [], 0.0)),
    Row(RANGE, "y", "got a tensor of shape (12,) from 0 to 2",
        lambda: paper.dropout_objective(LABELS, torch.zeros(12, 2), [], 0.0)),
    Row(SHAPE, "an integer y holds class indices", "got (12, 1) and (12, 3)",
        lambda: paper.dropout_objective(LABELS[:, None], torch.zeros(12, 3), [], 0.0)),
    Row(SHAPE, "weights", "got Tensor; write [w]", lambda: paper.dropout_objective(X, X, X, 0.0)),
    Row(SHAPE, "weight_decays", "got 2 for 1 weights", lambda: paper.dropout_objective(X, X, [X], [0.1, 0.2])),
    Row(SHAPE, "weight_decays", "got ['b']", lambda: paper.dropout_objective(X, X, {"a": X}, {"b": 0.1})),
    Row(RANGE, "weight_decays['a']", "got -0.1", lambda: paper.dropout_objective(X, X, {"a": X}, {"a": -0.1})),
    Row(RANGE, "locs", "got torch.int64", lambda: paper.RowMixture(torch.ones(1, 2, 2).long(), 0.1, tensor([1.0]))),
    Row(RANGE, "locs", "got [[[nan, nan], [nan, nan]]]",
        lambda: paper.RowMixture(torch.full((1, 2, 2), NAN), 0.1, tensor([1.0]))),
    Row(RANGE, "probs", "the sums are 1.1", lambda: paper.RowMixture(torch.ones(2, 2, 2), 0.1, tensor([0.5, 0.6]))),
    Row(RANGE, "probs", "got [1.5, -0.5]", lambda: paper.RowMixture(torch.ones(2, 2, 2), 0.1, tensor([1.5, -0.5]))),
    Row(SHAPE, "probs", "got (1,)", lambda: paper.RowMixture(torch.ones(2, 2, 2), 0.1, tensor([1.0]))),
    Row(RANGE, "scale", "got -0.1", lambda: paper.RowMixture(torch.ones(1, 2, 2), -0.1, tensor([1.0]))),
    Row(SHAPE, "scale", "got (3,)", lambda: paper.RowMixture(torch.ones(1, 2, 2), torch.ones(3), tensor([1.0]))),
    Row(SHAPE, "row_dim", "got 5", lambda: paper.RowMixture(torch.ones(1, 2, 2), 0.1, tensor([1.0]), row_dim=5)),
    Row(SHAPE, "cov_factor", "got (1, 2, 3, 1)",
        lambda: paper.RowMixture(torch.ones(1, 2, 2), 0.1, tensor([1.0]), cov_factor=torch.ones(1, 2, 3, 1))),
    Row(SHAPE, "locs", "got (0, 2, 2)", lambda: paper.RowMixture(torch.ones(0, 2, 2), 0.1, torch.ones(0))),
    Row(RANGE, "keep", "got 1.2", lambda: paper.BernoulliMixture(torch.ones(2, 3), 1.2)),
    Row(SHAPE, "keep", "got shape (2,)", lambda: paper.BernoulliMixture(torch.ones(2, 3), tensor([0.9, 0.8]))),
    Row(errors.SingularError, "BernoulliMixture", "scale=0",
        lambda: paper.BernoulliMixture(torch.ones(2, 3), 0.9).log_prob(torch.ones(2, 3))),
    Row(SHAPE, "value", "got (3, 2)", lambda: mixture().log_prob(torch.ones(3, 2))),
    Row(RANGE, "alpha", "got 0.0", lambda: paper.MultiplicativeNormal(torch.ones(2, 3), 0.0)),
    Row(SHAPE, "alpha", "got shape (2,)", lambda: paper.MultiplicativeNormal(torch.ones(2, 3), torch.ones(2))),
    Row(SHAPE, "alpha and scale", "got (2,) and ()",
        lambda: paper.MultiplicativeNormal(torch.ones(2, 3), torch.ones(2), row_dim=None)),
    Row(RANGE, "method", "got 'laplace'", lambda: paper.kl(mixture(), Normal(0.0, 1.0), "laplace")),
    Row(RANGE, "num_samples", "got 0", lambda: paper.kl(mixture(), Normal(0.0, 1.0), num_samples=0)),
    Row(OTHER, "p", "got Laplace", lambda: paper.kl(mixture(), torch.distributions.Laplace(0.0, 1.0))),
    Row(SHAPE, "p", "got (4,)", lambda: paper.kl(mixture(), Normal(torch.zeros(4), 1.0))),
    Row(errors.SingularError, "kl", "at scale=0",
        lambda: paper.kl(paper.BernoulliMixture(torch.ones(2, 3), 0.9), Normal(0.0, 1.0), "monte_carlo")),
    Row(errors.SingularError, "kl", "for all weights or for none",
        lambda: paper.kl(paper.RowMixture(torch.ones(1, 2, 1), tensor([[0.0], [1.0]]), torch.ones(1),
            cov_factor=torch.ones(1, 1, 2, 1)), Normal(0.0, 1.0))),
    Row(OTHER, "q", "got Normal", lambda: paper.kl_gap(Normal(0.0, 1.0))),
    Row(errors.SingularError, "kl_gap", "at scale=0",
        lambda: paper.kl_gap(paper.RowMixture(torch.stack([torch.ones(2, 3), torch.zeros(2, 3),
            -torch.ones(2, 3)]), 0.0, torch.ones(3) / 3))),
    Row(SHAPE, "probs", "got (3,) and ()", lambda: paper.label_entropy(tensor([0.5, 0.3, 0.2]), tensor(1.0))),
    Row(RANGE, "input_dim", "got 0", lambda: paper.ArcCosine(0)),
    Row(RANGE, "variance", "got -1.0", lambda: paper.ArcCosine(1, variance=-1.0)),
    Row(SHAPE, "length_scale", "got (3,)", lambda: paper.ArcSine(2, length_scale=tensor([1.0, 2.0, 3.0]))),
    Row(RANGE, "inner", "got int", lambda: paper.Layered(paper.ArcCosine(1), 3)),
    Row(RANGE, "nonlinearity", "got 'swish'", lambda: paper.FiniteRank("swish", 10)),
    Row(RANGE, "width", "got 0", lambda: paper.FiniteRank("relu", 0)),
    Row(RANGE, "bias_prior", "got 'laplace'", lambda: paper.FiniteRank("relu", 3, bias_prior="laplace")),
    Row(RANGE, "terms", "got 0", lambda: paper.SecondLayer("relu", 3, terms=0)),
    Row(SHAPE, "weight", "got (3, 2)", lambda: paper.finite_rank_features(X, torch.ones(3, 2), torch.ones(3), "relu")),
    Row(SHAPE, "h", "got (3,)", lambda: paper.second_layer_features(torch.ones(3), torch.ones(3), "relu")),
    Row(RANGE, "tau", "got 0.0", lambda: paper.finite_rank_log_marginal(Y, torch.ones(12, 3), 0.0)),
    Row(SHAPE, "y", "got (5, 1)", lambda: paper.finite_rank_log_marginal(Y[:5], torch.ones(12, 3), 1.0)),
]  # fmt: skip
