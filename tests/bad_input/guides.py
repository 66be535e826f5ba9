"""Bad input to guides: what all of them refuse, what each refuses, and networks that from_dropout cannot read."""

from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import nn, tensor

import pyro_dropout as pd
from pyro_dropout.errors import EmptyModelError
from pyro_dropout.guides import GUIDES
from tests.bad_input.row import INF, NAN, OTHER, RANGE, SHAPE, Row, X, model, net, out_of_range


def plain(x: torch.Tensor, y: torch.Tensor | None = None) -> None:
    slope = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(slope * x[:, 0], 1.0), obs=y)


def same_guide() -> Any:
    made = pd.AutoDropout(model())
    return lambda m: made


def discrete(x: torch.Tensor) -> None:
    pyro.sample("k", dist.Bernoulli(0.5))


def whatever(guide: Any) -> list[Row]:
    """What every guide refuses, whichever it is."""
    rows = [
        *out_of_range(lambda **wrong: guide(model(), **wrong), init="zeros", init_scale=0.0, bias="none"),
        Row(SHAPE, "init", "has shape (1,) for '0.weight'",
            lambda: guide(model(), init=lambda site, shape: torch.zeros(1))),
        Row(RANGE, "init of '0.weight'", "got [[nan], [nan], [nan], [nan]]",
            lambda: guide(model(), init=lambda site, shape: torch.full(shape, NAN))),
        Row(OTHER, "site of this guide", "'w'", lambda: guide(model()).posterior("w")),
        Row(RANGE, "n", "got 0", lambda: guide(model()).sample_weights(0)),
    ]  # fmt: skip
    if not guide.at_weights:
        return rows
    return [
        *rows,
        Row(RANGE, "row_dim of '0.weight'", "got 7", lambda: guide(model(), row_dim=7)),
    ]  # fmt: skip


ROWS = [
    *(row for guide in GUIDES for row in whatever(guide)),
    Row(OTHER, "AutoDropout", "has not seen its model's sites", lambda: pd.AutoDropout(plain).posterior("w")),
    Row(OTHER, "site 'k'", "is discrete", lambda: pd.AutoDropout(discrete)(X)),
    Row(EmptyModelError, "the model", "no latent site", lambda: pd.AutoDropout(lambda x: x)(X)),
    *out_of_range(lambda **wrong: pd.AutoDropout(model(), **wrong), keep=0.0, scale=-1.0),
    Row(OTHER, "model", "got the class BayesianNet", lambda: pd.AutoDropout(pd.BayesianNet)),
    Row(OTHER, "model", "got AutoDropout, which is a guide", lambda: pd.AutoMeanField(pd.AutoDropout(model()))),
    Row(SHAPE, "'net.weight' of the model", "'meta'",
        lambda: pd.AutoDropout(pd.BayesianNet(torch.nn.Linear(1, 1, device="meta")))),
    Row(OTHER, "keep", "'9.weight'", lambda: pd.AutoDropout(model(), keep={"9.weight": 0.9})),
    Row(SHAPE, "keep of 0.weight", "got shape (2,)", lambda: pd.AutoDropout(model(), keep=tensor([0.9, 0.8]))),
    Row(SHAPE, "scale", "got (9,)", lambda: pd.AutoDropout(model(), scale=torch.ones(9)).posterior("0.weight")),
    Row(RANGE, "keep of 2.weight", "got 0.97", lambda: pd.AutoConcreteDropout(model(), keep=0.97)),
    Row(RANGE, "max_keep", "got 0.0", lambda: pd.AutoConcreteDropout(model(), max_keep=0.0)),
    Row(RANGE, "temperature", "got 0.0", lambda: pd.AutoConcreteDropout(model(), temperature=0.0)),
    *out_of_range(lambda **wrong: pd.AutoMultiplicative(model(), **wrong), alpha=0.0, per="layer"),
    Row(RANGE, "scale", "got inf", lambda: pd.AutoMultiplicative(model(), scale=INF)),
    Row(RANGE, "components", "got 1", lambda: pd.AutoRowMixture(model(), components=1)),
    Row(RANGE, "probs", "got [0.5, -0.5]", lambda: pd.AutoRowMixture(model(), probs=tensor([0.5, -0.5]))),
    Row(SHAPE, "probs", "got [0.5, 0.20000000298023224,",
        lambda: pd.AutoRowMixture(model(), probs=tensor([0.5, 0.2, 0.3]))),
    Row(RANGE, "spread", "got nan", lambda: pd.AutoRowMixture(model(), spread=NAN)),
    *out_of_range(lambda **wrong: pd.Ensemble(model(), **wrong), members=0, start="zero"),
    Row(OTHER, "guide", "got AutoDropout", lambda: pd.Ensemble(model(), pd.AutoDropout(model()))),
    Row(OTHER, "guide", "the same one twice", lambda: pd.Ensemble(model(), same_guide())),
    Row(OTHER, "members", "same point", lambda: pd.Ensemble(model(), members=2, anchored=False, start="module")),
    Row(OTHER, "ensemble", "has not seen", lambda: pd.Ensemble(plain, pd.AutoMeanField, members=2).mean()),
    Row(RANGE, "numbers", "got [2]", lambda: pd.Ensemble(model(), members=2).draws_at(tensor([2]))),
    *out_of_range(lambda **wrong: pd.AutoLowRank(model(), **wrong), rank=0, per="row"),
    Row(RANGE, "per", "got 'row'", lambda: pd.AutoFullRank(model(), per="row")),
    Row(OTHER, "the network", "has 8,372 random weights, and their covariance matrix would take 0.3 GB",
        lambda: pd.AutoFullRank(pd.BayesianNet(nn.Linear(91, 91)))),
    Row(RANGE, "structure", "got 'low-rank'", lambda: pd.guides.AutoLaplace(model(), "low-rank")),
    Row(OTHER, "a BayesianNet", "got function", lambda: pd.guides.AutoLaplace(plain)),
    Row(OTHER, "curvature", "no curvature yet", lambda: pd.guides.AutoLaplace(model()).curvature),
    Row(OTHER, "members", "AutoLaplace", lambda: pd.Ensemble(model(), pd.guides.AutoLaplace)),
    Row(RANGE, "tau", "got -1.0", lambda: pd.from_dropout(net(), tau=-1.0)),
    Row(OTHER, "Dropout '1'", "p=1.0",
        lambda: pd.from_dropout(nn.Sequential(nn.Linear(1, 4), nn.Dropout(1.0), nn.Linear(4, 1)))),
    Row(OTHER, "prior", "hides '3.weight'",
        lambda: pd.from_dropout(nn.Sequential(nn.Linear(1, 4), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4,
            1)), prior=pd.Prior(hide=lambda name, module: name == "3.weight"))),
]  # fmt: skip
