"""Bad input to guides: what all of them refuse, what each refuses, and networks that from_dropout cannot read."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn, tensor

import pyro_dropout as pd
from pyro_dropout.errors import EmptyModelError
from pyro_dropout.guides import GUIDES
from tests.bad_input.row import INF, NAN, OTHER, RANGE, SHAPE, Row, X, model, names, net, refused


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
    name = guide.__name__
    *others, last = map(repr, guide.biases)
    biases = f"be {', '.join(others)} or {last}"
    rows = [
        Row(name, lambda: guide("model"), OTHER, "model", "got 'model'", "be a Pyro model, a function or a module"),
        Row(name, lambda: guide(model(), init="zeros"), RANGE, "init", "got 'zeros'", "'paper' or a function"),
        Row(name, lambda: guide(model(), init=lambda site, shape: torch.zeros(1)),
            RANGE, "init", "gave shape (1,) for '0.weight'", "it needs (4, 1)"),
        Row(name, lambda: guide(model(), init=lambda site, shape: None),
            SHAPE, "init('0.weight', shape)", "got NoneType", "must be a tensor"),
        Row(name, lambda: guide(model(), init=lambda site, shape: torch.full(shape, NAN)),
            RANGE, "init('0.weight', shape)", "got [[nan], [nan], [nan], [nan]]", "must be finite"),
        Row(name, lambda: guide(model(), init_scale=0.0), RANGE, "init_scale", "got 0.0", "be positive and finite"),
        Row(name, lambda: guide(model(), init_scale="wide"), RANGE, "init_scale", "got 'wide'", "a positive number"),
        Row(name, lambda: guide(model(), bias="none"), RANGE, "bias", "got 'none'", biases),
        Row(name, lambda: guide(model(), create_plates=3),
            OTHER, "create_plates", "got 3", "be a function of the model's arguments that returns plates"),
        Row(name, lambda: guide(model()).posterior("w"), OTHER, "site of this guide", "'w'", "the sites are 0.weight"),
        Row(name, lambda: guide(model()).sample_weights(0), RANGE, "n", "got 0", "a whole number of at least 1"),
    ]  # fmt: skip
    if not guide.drops:
        return rows
    return [
        *rows,
        Row(name, lambda: guide(model(), row_dim=7), RANGE, "row_dim of '0.weight'", "got 7", "its 2 dimensions"),
        Row(name, lambda: guide(model(), row_dim="a"), RANGE, "row_dim of '0.weight'", "got 'a'", "be a whole number"),
        Row(name, lambda: guide(model(), row_dim=0.5), RANGE, "row_dim of '0.weight'", "got 0.5", "be a whole number"),
    ]  # fmt: skip


ROWS = [
    *(row for guide in GUIDES for row in whatever(guide)),
    Row("AutoDropout", lambda: pd.AutoDropout(plain).posterior("w"),
        OTHER, "AutoDropout", "has not seen its model's sites", "call it once with the model's arguments"),
    Row("AutoDropout", lambda: pd.AutoDropout(discrete)(X),
        OTHER, "site 'k'", "is discrete", "hide it with pyro.poutine.block"),
    Row("AutoDropout", lambda: pd.AutoDropout(lambda x: x)(X),
        EmptyModelError, "the model", "no latent site", "hidden or observed?"),
    Row("AutoDropout", lambda: pd.AutoDropout(model(), keep=0.0), RANGE, "keep", "got 0.0", "lie in (0, 1]"),
    Row("AutoDropout", lambda: pd.AutoDropout(model(), keep="0.9"),
        RANGE, "keep", "got str '0.9'", "be a real number or a real tensor"),
    Row("AutoDropout", lambda: pd.AutoDropout(model(), keep={"9.weight": 0.9}),
        OTHER, "keep", "'9.weight'", "the sites are 0.weight, 0.bias"),
    Row("AutoDropout", lambda: pd.AutoDropout(model(), keep=tensor([0.9, 0.8])),
        SHAPE, "keep of 0.weight", "got shape (2,)", "be a number or one for each of 1 rows"),
    Row("AutoDropout", lambda: pd.AutoDropout(model(), scale=-1.0),
        RANGE, "scale", "got -1.0", "be zero or positive, and finite"),
    Row("AutoDropout", lambda: pd.AutoDropout(model(), scale=torch.ones(9)).posterior("0.weight"),
        SHAPE, "scale", "got (9,)", "broadcast to the components, shape (2, 4, 1)"),
    Row("AutoConcreteDropout", lambda: pd.AutoConcreteDropout(model(), keep=1.0),
        RANGE, "keep of 0.weight", "got 1", "start below 1 to be learned"),
    Row("AutoConcreteDropout", lambda: pd.AutoConcreteDropout(model(), keep=0.0),
        RANGE, "keep", "got 0.0", "lie in (0, 1]"),
    Row("AutoConcreteDropout", lambda: pd.AutoConcreteDropout(model(), keep=lambda s: "a"),
        RANGE, "keep of 0.weight", "got str 'a'", "be a real number or a real tensor"),
    Row("AutoConcreteDropout", lambda: pd.AutoConcreteDropout(model(), temperature=0.0),
        RANGE, "temperature", "got 0.0", "be positive and finite"),
    Row("AutoConcreteDropout", lambda: pd.AutoConcreteDropout(model(), keep=tensor([0.9, 0.8])),
        SHAPE, "keep of 0.weight", "got shape (2,)", "be a number or one for each of 1 rows"),
    Row("AutoMultiplicative", lambda: pd.AutoMultiplicative(model(), alpha=0.0),
        RANGE, "alpha", "got 0.0", "be positive and finite"),
    Row("AutoMultiplicative", lambda: pd.AutoMultiplicative(model(), alpha={"x": 1.0}),
        OTHER, "alpha", "'x'", "the sites are 0.weight, 0.bias"),
    Row("AutoMultiplicative", lambda: pd.AutoMultiplicative(model(), per="layer"),
        RANGE, "per", "got 'layer'", "be 'row' or 'weight'"),
    Row("AutoMultiplicative", lambda: pd.AutoMultiplicative(model(), learn_alpha="abc"),
        RANGE, "learn_alpha", "got 'abc'", "be True or False"),
    Row("AutoMultiplicative", lambda: pd.AutoMultiplicative(model(), scale=INF),
        RANGE, "scale", "got inf", "be zero or positive, and finite"),
    Row("AutoRowMixture", lambda: pd.AutoRowMixture(model(), components=1),
        RANGE, "components", "got 1", "be a whole number of at least 2"),
    Row("AutoRowMixture", lambda: pd.AutoRowMixture(model(), probs=tensor([0.5, -0.5])),
        RANGE, "probs", "got [0.5, -0.5]", "be positive and finite"),
    Row("AutoRowMixture", lambda: pd.AutoRowMixture(model(), probs=tensor([0.5, 0.2, 0.3])),
        SHAPE, "probs", "got [0.5, 0.20000000298023224,", "be a tensor of 2 numbers"),
    Row("AutoRowMixture", lambda: pd.AutoRowMixture(model(), probs=[0.5, 0.5]),
        RANGE, "probs", "got list [0.5, 0.5]", "be a real number or a real tensor"),
    Row("AutoRowMixture", lambda: pd.AutoRowMixture(model(), spread=NAN),
        RANGE, "spread", "got nan", "be zero or positive, and finite"),
    Row("Ensemble", lambda: pd.Ensemble("model"), OTHER, "model", "got str", "be a Pyro model, a function or a module"),
    Row("Ensemble", lambda: pd.Ensemble(model(), members=0), RANGE, "members", "got 0", "number of at least 1"),
    Row("Ensemble", lambda: pd.Ensemble(model(), guide=3), OTHER, "guide", "got int", "such as AutoDropout, or None"),
    Row("Ensemble", lambda: pd.Ensemble(model(), pd.AutoDropout(model())),
        OTHER, "guide", "got AutoDropout", "a guide already"),
    Row("Ensemble", lambda: pd.Ensemble(model(), same_guide()),
        OTHER, "guide", "the same one twice", "make a new guide"),
    Row("Ensemble", lambda: pd.Ensemble(model(), anchored="yes"), RANGE, "anchored", "got 'yes'", "True or False"),
    Row("Ensemble", lambda: pd.Ensemble(model(), start="zero"), RANGE, "start", "got 'zero'", "'anchor' or 'module'"),
    Row("Ensemble", lambda: pd.Ensemble(model(), members=2, anchored=False, start="module"),
        OTHER, "members", "same point", "Let them be anchored"),
    Row("Ensemble", lambda: pd.Ensemble(model(), members=2).more(0), RANGE, "members", "got 0", "at least 1"),
    Row("Ensemble", lambda: pd.Ensemble(plain, members=2).mean(),
        OTHER, "ensemble", "has not seen", "fit it, or call it"),
    Row("Ensemble", lambda: pd.Ensemble(model(), members=2).draws_at(tensor([2])),
        RANGE, "numbers", "got [2]", "between 0 and 1"),
    Row("AutoLowRank", lambda: pd.AutoLowRank(model(), rank=0),
        RANGE, "rank", "got 0", "be a whole number of at least 1"),
    Row("AutoLowRank", lambda: pd.AutoLowRank(model(), rank="full"), RANGE, "rank", "full", "AutoFullRank(model,"),
    Row("AutoFullRank", lambda: pd.AutoFullRank(model(), per="row"), RANGE, "per", "got 'row'", "be 'net' or 'layer'"),
    Row("AutoFullRank", lambda: pd.AutoFullRank(pd.BayesianNet(nn.Linear(91, 91))),
        OTHER, "the network", "has 8,372 random weights, and their covariance matrix would take 0.3 GB", "per='layer'"),
    Row("AutoFullRank", lambda: pd.AutoFullRank(pd.BayesianNet(nn.Linear(91, 91)), per="layer"),
        OTHER, "layer ''", "has 8,372 random weights", "AutoLowRank(model, per='net')"),
    Row("AutoLowRank", lambda: pd.AutoLowRank(model(), per="row"), RANGE, "per", "got 'row'", "be 'layer' or 'net'"),
    Row("AutoLaplace", lambda: pd.guides.AutoLaplace(model(), "low-rank"),
        RANGE, "structure", "got 'low-rank'", "be 'full', 'layer', 'kron', 'diagonal', 'last' or None"),
    Row("AutoLaplace", lambda: pd.guides.AutoLaplace(plain),
        OTHER, "a BayesianNet", "got function", "AutoLaplaceApproximation"),
    Row("AutoLaplace", lambda: pd.guides.AutoLaplace(model()).curvature,
        OTHER, "curvature", "no curvature yet", "train it"),
    Row("AutoLaplace", lambda: pd.Ensemble(model(), pd.guides.AutoLaplace),
        OTHER, "members", "AutoLaplace", "Ensemble(model)"),
    Row("from_dropout", lambda: pd.from_dropout("net"),
        OTHER, "net", "got 'net'", "be a torch nn.Module with dropout"),
    Row("from_dropout", lambda: pd.from_dropout(net(), tau=-1.0), RANGE, "tau", "got -1.0", "be positive and finite"),
    Row("from_dropout", lambda: pd.from_dropout(nn.Sequential(nn.Linear(1, 4), nn.Dropout(1.0), nn.Linear(4, 1))),
        OTHER, "Dropout '1'", "p=1.0", "Use a smaller p"),
    Row("from_dropout", lambda: pd.from_dropout(net(), likelihood="cat"),
        OTHER, "likelihood", "got 'cat'", "be a pyro_dropout.generative.Likelihood, such as"),
    Row("from_dropout", lambda: pd.from_dropout(net(), prior=3),
        OTHER, "prior", "got 3", "be a pyro_dropout.Prior, such as"),
    Row("from_dropout", lambda: pd.from_dropout(nn.Sequential(nn.Linear(1, 4), nn.ReLU(), nn.Dropout(0.5),
        nn.Linear(4, 1)), prior=pd.Prior(hide=lambda name, module: name == "3.weight")),
        OTHER, "prior", "hides '3.weight'", "it must be random"),
]  # fmt: skip


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("row", ROWS, ids=names(ROWS))
def test_bad_input_is_refused(row: Row) -> None:
    refused(row)
