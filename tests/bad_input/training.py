"""Bad input to training: fit, fleets, SVI and losses; each is and no parameter is lost."""

import pyro
import torch
from torch import nn, tensor

import pyro_dropout as pd
from pyro_dropout import errors
from tests.bad_input.row import (
    INF,
    LABELS,
    NAN,
    OTHER,
    QUIET,
    RANGE,
    SHAPE,
    Row,
    X,
    Y,
    build,
    class_fit,
    classes,
    fit,
    fleet,
    fleet_fit,
    kind_fit,
    kind_fleet_fit,
    line,
    model,
    out_of_range,
    pair,
)  # fmt: skip


class TwoSteps(torch.optim.Optimizer):
    """An optimiser that evaluates the loss itself, as sharpness-aware ones do."""

    def step(self, closure: object) -> None:  # type: ignore[override]
        """Take a step."""


def laplace_at() -> tuple[pd.BayesianNet, pd.BayesianNet]:
    made = model()
    return made, made


def fit_of_network() -> object:
    """Train a network that has ordinary parameters, with an optimiser of all parameters of the model."""
    made = pd.BayesianNet(nn.Sequential(nn.Linear(1, 3), nn.LayerNorm(3), nn.Linear(3, 1)))
    return pd.fit(made, pd.AutoDropout(made), X, Y, optim=torch.optim.SGD(made.parameters(), lr=0.1), **QUIET)


ROWS = [
    Row(OTHER, "structure", "'last' has points in all layers but one",
        lambda: pd.training.maximise_evidence(model(), X, Y, "last")),
    Row(RANGE, "structure", "got 'low-rank'", lambda: pd.training.maximise_evidence(model(), X, Y, "low-rank")),
    Row(RANGE, "rounds", "got 0", lambda: pd.training.maximise_evidence(model(), X, Y, rounds=0)),
    Row(RANGE, "y", "got", lambda: pd.training.maximise_evidence(model(), X, Y * NAN)),
    Row(OTHER, "point", "no value for '0.bias'", lambda: pd.laplace(model(), {"0.weight": X}, X, Y)),
    Row(SHAPE, "y", "got NoneType", lambda: pd.laplace(*laplace_at(), X)),
    Row(SHAPE, "x and y", "got 12 points and 3 points", lambda: pd.laplace(*laplace_at(), X, Y[:3])),
    Row(SHAPE, "y", "got (12,)", lambda: pd.laplace(*laplace_at(), X, Y[:, 0])),
    Row(OTHER, "target", "got 'y' with x and y", lambda: pd.laplace(*laplace_at(), X, Y, target="y")),
    Row(SHAPE, "lr", "got shape (2,)", lambda: fit(lr=tensor([0.1, 0.2]))),
    Row(OTHER, "loss", "got <class", lambda: fit(loss=pd.ELBO)),
    Row(RANGE, "steps or epochs", "neither", lambda: fit(steps=None)),
    *out_of_range(fit, steps=0, lr=0.0, compile="yes"),
    Row(RANGE, "lr", "got inf", lambda: fit(lr=INF)),
    Row(OTHER, "optim", "got 'lbfgs'", lambda: fit(optim="lbfgs")),
    Row(OTHER, "optim", "this RMSprop holds none of them",
        lambda: fit(optim=torch.optim.RMSprop([nn.Parameter(torch.ones(1))]))),
    Row(OTHER, "optim", "this SGD holds weights of the network in their place", fit_of_network),
    Row(OTHER, "patience", "patience=3 is for", lambda: fit(patience=3)),
    Row(OTHER, "check_every", "check_every=5 is for", lambda: fit(check_every=5)),
    Row(SHAPE, "validation", "got 12 points and 3 points", lambda: fit(validation=(X, Y[:3]))),
    Row(SHAPE, "x", "got ndarray", lambda: fit(X.numpy(), Y.numpy())),
    Row(OTHER, "guide", "got the class AutoDropout. Write AutoDropout(model)",
        lambda: pd.fit(model(), pd.AutoDropout, X, Y, **QUIET)),
    Row(OTHER, "model", "got the class BayesianNet", lambda: pd.fit(pd.BayesianNet, pair()[1], X, Y, **QUIET)),
    Row(OTHER, "model and guide", "got AutoDropout, which is a guide", lambda: pd.fit(*pair()[::-1], X, Y, **QUIET)),
    Row(OTHER, "guide", "got the class AutoNormal. Write AutoNormal(model)",
        lambda: pd.SVI(model(), pyro.infer.autoguide.AutoNormal, pyro.optim.Adam({}))),
    Row(OTHER, "model and guide", "got AutoDropout, which is a guide",
        lambda: pd.SVI(*pair()[::-1], pyro.optim.Adam({}))),
    Row(SHAPE, "x", "'meta'", lambda: fit(X.to("meta"), Y)),
    Row(SHAPE, "y", "'meta'", lambda: fit(X, Y.to("meta"))),
    Row(OTHER, "device", "got 'meta'", lambda: fit(device="meta")),
    Row(SHAPE, "'net.weight' of the model", "'meta'", lambda: pd.fit(
        pd.BayesianNet(nn.Linear(1, 1, device="meta")), lambda *_: None, X, Y, **QUIET)),
    Row(RANGE, "x must be finite", "(12, 1) with no finite value and 12", lambda: fit(X * NAN, Y)),
    Row(RANGE, "y must be finite", "(12, 1) with no finite value and 12", lambda: fit(X, Y * NAN)),
    Row(errors.DivergedError, "x and y that are not finite", "the loss is inf at step 1", lambda: fit(X, Y + 1e30)),
    Row(SHAPE, "y", "got (12,)", lambda: fit(X, Y[:, 0])),
    Row(SHAPE, "x", "got (12, 3): mat1 and mat2 shapes cannot be", lambda: fit(torch.ones(12, 3), Y)),
    Row(RANGE, "x", "got torch.float64", lambda: fit(X.double(), Y.double())),
    Row(RANGE, "y", "got torch.float32", lambda: class_fit(X, LABELS.float())),
    Row(RANGE, "y", "got torch.bool", lambda: fit(X, Y > 0)),
    Row(SHAPE, "x", "layout torch.sparse_coo", lambda: fit(X.to_sparse(), Y)),
    Row(RANGE, "validation: x", "with no finite value", lambda: fit(validation=(X * NAN, Y))),
    Row(RANGE, "y", "got a tensor of shape (12, 1) from 2 to 2",
        lambda: kind_fit(pd.Bernoulli(), torch.full_like(Y, 2.0))),
    Row(RANGE, "y", "got a tensor of shape (12, 1) from 0.5 to 0.5",
        lambda: kind_fit(pd.Poisson(), torch.full_like(Y, 0.5))),
    Row(OTHER, "optim", "got LBFGS",
        lambda: pd.fit(*(own := pair()), X, Y, optim=torch.optim.LBFGS(own[1].parameters()), **QUIET)),
    Row(OTHER, "optim", "got TwoSteps",
        lambda: pd.fit(*(own := pair()), X, Y, optim=TwoSteps(own[1].parameters(), {}), **QUIET)),
    Row(OTHER, "model", "got Linear, which takes (input", lambda: pd.fit(nn.Linear(1, 1), pair()[1], X, Y, **QUIET)),
    Row(OTHER, "model", "<lambda> has no sample site", lambda: pd.fit(lambda x, y: None, pair()[1], X, Y, **QUIET)),
    Row(OTHER, "fit", "no option 'stpes'", lambda: fit(stpes=3)),
    Row(OTHER, "batch_size", "got 3: line takes no num_data", lambda: pd.fit(line, line, X, Y, batch_size=3, **QUIET)),
    Row(OTHER, "distributed", "one process", lambda: pd.fit(line, line, X, Y, distributed=True, **QUIET)),
    Row(OTHER, "guide", "'0.weight'", lambda: pd.fit(model(), classes()[1], X, Y, **QUIET)),
    Row(RANGE, "gamma", "got -1.0", lambda: pd.training.inverse_decay(gamma=-1.0)),
    Row(RANGE, "batch_size", "got 99", lambda: pd.swag(model(), {}, X, Y, rank=2, steps=9, lr=0.1, batch_size=99)),
    Row(RANGE, "start", "got 2.0", lambda: pd.training.warm_up(10, start=2.0)),
    Row(RANGE, "steps", "got 0", lambda: pd.training.warm_up(0)),
    Row(OTHER, "Update", "its own schedule and clip_norm",
        lambda: fit(optim=pd.training.Update("h", 1.0, 0, lambda p, g, s, lr, t: (p, s)), schedule=lambda t: t)),
    Row(RANGE, "slots", "got -1", lambda: pd.training.Update("h", 1.0, -1, lambda p, g, s, lr, t: (p, s))),
    Row(SHAPE, "settings", "got lengths {}", lambda: pd.Fleet(build, {})),
    Row(OTHER, "build", "it returned BayesianNet", lambda: pd.Fleet(lambda seed: model(), {"seed": [0]})),
    Row(OTHER, "keep", "{'keep': 1.0} differs in structure", lambda: pd.Fleet(build, {"keep": [0.9, 1.0]})),
    Row(RANGE, "chosen", "got [5]", lambda: fleet().select([5])),
    Row(SHAPE, "lr", "got (3,)", lambda: fleet_fit(lr=tensor([0.1, 0.1, 0.1]))),
    Row(SHAPE, "indices", "got (3, 4) of torch.int64", lambda: fleet_fit(indices=torch.zeros(3, 4).long())),
    Row(RANGE, "indices", "the rows of x", lambda: fleet_fit(indices=torch.full((2, 4), 99))),
    Row(SHAPE, "y", "got (12,)", lambda: fleet_fit(X, Y[:, 0])),
    Row(RANGE, "y", "got a tensor of shape (12, 1) from 2 to 2",
        lambda: kind_fleet_fit(pd.Bernoulli(), torch.full_like(Y, 2.0))),
    Row(RANGE, "y", "got a tensor of shape (12, 1) from -1 to -1",
        lambda: kind_fleet_fit(pd.Poisson(), torch.full_like(Y, -1.0))),
    Row(SHAPE, "clip_norm", "got shape (2,)", lambda: fleet_fit(clip_norm=torch.ones(2))),
    Row(RANGE, "compile", "got 'maybe'", lambda: pd.SVI(*pair(), pyro.optim.Adam({}), compile="maybe")),
    Row(SHAPE, "y", "got (12,)", lambda: pd.SVI(*pair(), pyro.optim.Adam({"lr": 0.1}), compile=False).step(X, Y[:, 0])),
    *out_of_range(pd.ELBO, kl="approximate", num_particles=0, temperature=-0.1, per_example="yes"),
    Row(errors.SingularError, "kl", "at scale=0", lambda: pd.ELBO(kl="monte_carlo").loss(*pair(), X, Y)),
]  # fmt: skip
