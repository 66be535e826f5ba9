"""Bad input to models: priors, likelihoods, networks, standardisation and Gaussian processes."""

from typing import Any

import torch
from torch import nn, tensor

import pyro_dropout as pd
from pyro_dropout import generative, paper, references
from tests.bad_input.row import LABELS, NAN, OTHER, RANGE, SHAPE, Row, X, Y, classes, model, net, out_of_range


def deep_gp(**options: Any) -> paper.DeepGP:
    return paper.DeepGP(**{"in_features": 1, "widths": [3], "out_features": 1, **options})


def wide() -> pd.Standardised:
    """Three inputs and two targets, standardised."""
    return pd.Standardised(pd.BayesianNet(nn.Linear(3, 2)), torch.randn(12, 3), torch.randn(12, 2))


ROWS = [
    *out_of_range(pd.Prior, length_scale=0.0, width_scaled="yes"),
    Row(OTHER, "length_scale", "'9.weight'", lambda: pd.BayesianNet(net(), pd.Prior(length_scale={"9.weight": 1.0}))),
    Row(SHAPE, "length-scale of 0.weight", "got (7,)",
        lambda: pd.BayesianNet(net(), pd.Prior(length_scale=torch.ones(7)))),
    Row(RANGE, "length_scale of 0.weight", "got -1.0",
        lambda: pd.BayesianNet(net(), pd.Prior(length_scale=lambda s: -1.0))),
    *out_of_range(pd.Gaussian, tau=0.0, learn="abc"),
    Row(RANGE, "y", "got torch.bool", lambda: model()(X, Y > 0)),
    Row(SHAPE, "tau", "got shape (2,)",
        lambda: pd.BayesianNet(net(), likelihood=pd.Gaussian(tau=tensor([1.0, 1.0])))(X, Y)),
    Row(RANGE, "whole_batch", "got 'yes'", lambda: pd.BayesianNet(net(), whole_batch="yes")),
    Row(SHAPE, "x['mask']", "got shape (5, 1)", lambda: model()({"x": X, "mask": X[:5]}, Y)),
    Row(SHAPE, "dims", "got [3, 4]", lambda: pd.Categorical(dims=[3, 4])),
    Row(SHAPE, "y", "got (12,)", lambda: model()(X, Y[:, 0])),
    Row(RANGE, "num_data", "got 0", lambda: model()(X, Y, 0)),
    Row(SHAPE, "the model", "got 1", lambda: model(pd.HeteroscedasticGaussian())(X, Y)),
    Row(SHAPE, "y", "got (12, 2)",
        lambda: pd.BayesianNet(nn.Linear(1, 2), likelihood=pd.HeteroscedasticGaussian())(X, torch.ones(12, 2))),
    Row(SHAPE, "y", "got (12, 1)", lambda: classes()[0](X, LABELS[:, None])),
    Row(SHAPE, "y", "got (12, 2)", lambda: model(pd.Bernoulli())(X, torch.ones(12, 2))),
    Row(SHAPE, "y", "got (12,)", lambda: model(pd.Poisson())(X, torch.ones(12))),
    Row(OTHER, "net", "no parameter that is random", lambda: pd.BayesianNet(nn.ReLU())),
    Row(SHAPE, "x", "got (5, 3): mat1 and mat2 shapes cannot be", lambda: model()(torch.ones(5, 3))),
    Row(RANGE, "x", "got torch.float64", lambda: model()(X.double(), Y)),
    Row(RANGE, "x", "got torch.int64", lambda: model()(LABELS[:, None])),
    Row(SHAPE, "net", "it gave (12,)", lambda: pd.BayesianNet(nn.Sequential(nn.Linear(1, 1), nn.Flatten(0)))(X)),
    Row(OTHER, "site of this model", "'zz'", lambda: model().evaluate({"zz": torch.ones(4, 1)}, X)),
    Row(SHAPE, "x", "got (12, 1)", lambda: wide()(X, torch.ones(12, 2))),
    Row(SHAPE, "y", "got (12, 1)", lambda: wide()(torch.ones(12, 3), Y)),
    Row(OTHER, "model", "Linear has no likelihood", lambda: pd.Standardised(nn.Linear(1, 1), X, Y)),
    Row(OTHER, "model", "is already Standardised", lambda: pd.Standardised(pd.Standardised(model(), X, Y), X, Y)),
    Row(SHAPE, "x and y", "got 1 and 1", lambda: pd.Standardised(model(), X[:1], Y[:1])),
    Row(SHAPE, "x", "got (12,) and (12, 1)", lambda: pd.Standardised(model(), X[:, 0], Y)),
    Row(RANGE, "x", "got a tensor of shape (12, 1) with no", lambda: pd.Standardised(model(), X * NAN, Y)),
    Row(RANGE, "x", "got torch.int64", lambda: pd.Standardised(model(), LABELS[:, None], Y)),
    *out_of_range(deep_gp, in_features=0, widths=[], nonlinearity="swish", space="time"),
    Row(RANGE, "nonlinearity", "got a list of 2", lambda: deep_gp(nonlinearity=["relu", "relu"])),
    Row(SHAPE, "length_scale", "got (3,)", lambda: deep_gp(length_scale=torch.ones(3))),
    Row(RANGE, "x", "got torch.float64", lambda: deep_gp()(X.double())),
    Row(RANGE, "num_data", "got 20", lambda: deep_gp(space="function")(X, Y, 20)),
    Row(RANGE, "width", "got 0", lambda: paper.FiniteRankGP(1, 0, 1)),
    Row(RANGE, "kernel", "got 'matern'", lambda: generative.GP("matern")),
    *out_of_range(generative.GP, tau=0.0, jitter=-1.0),
    Row(OTHER, "this GP", "has no data yet", lambda: generative.GP().predict(X)),
    Row(SHAPE, "y", "got (12,)", lambda: generative.GP().fit(X, Y[:, 0], steps=0)),
    Row(OTHER, "gp", "got BayesianNet", lambda: references.gp_posterior(model())),
    # what a compiled step cannot look at, and the doors do
    Row(RANGE, "y", "12 not finite", lambda: pd.Gaussian().check_values(Y, Y * NAN)),
    Row(RANGE, "y", "got 1 to 3", lambda: pd.Categorical().check_values(torch.zeros(12, 3), LABELS + 1)),
    Row(RANGE, "y", "got [[0.0], [2.0]]", lambda: pd.Bernoulli().check_values(Y, tensor([[0.0], [2.0]]))),
    Row(RANGE, "y", "got -1.0", lambda: pd.Poisson().check_values(Y, tensor([[-1.0]]))),
    Row(OTHER, "likelihood", "got Poisson", lambda: pd.Transformed(pd.Poisson(), "log")),
    Row(RANGE, "link", "got 'sqrt'", lambda: pd.Transformed(pd.Gaussian(), "sqrt")),
    Row(RANGE, "y", "got 0.0", lambda: pd.Transformed(pd.Gaussian(), "log").check_values(Y, tensor([[0.0]]))),
    Row(RANGE, "y", "got 1.0", lambda: pd.Transformed(pd.Gaussian(), "logit").check_values(Y, tensor([[1.0]]))),
    Row(RANGE, "concentration", "got -1.0", lambda: pd.Counts(-1.0)),
    Row(SHAPE, "outputs", "got 1", lambda: pd.Counts(by_input=True).distribution(torch.zeros(3, 1))),
    Row(OTHER, "Counts(by_input=True)", "no curvature", lambda: pd.Counts(by_input=True).curvature(torch.zeros(3, 2))),
]  # fmt: skip
