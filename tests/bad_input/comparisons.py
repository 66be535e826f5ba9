"""Bad input to the comparison and to the estimators."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas
import torch

import pyro_dropout as pd
from tests.bad_input.row import (
    LABELS,
    NAN,
    OTHER,
    RANGE,
    SHAPE,
    Row,
    X,
    Y,
    classes,
    line,
    model,
    net,
    out_of_range,
)  # fmt: skip

QUICK_RUN: Any = {"seeds": 1, "steps": 1, "samples": 2, "progress": False, "out": "nowhere"}
QUICK: Any = {"steps": 1, "seeds": 1, "samples": 3, "compile": False, "progress": False}


def compare(**given: Any) -> Any:
    given = {"model": model(), "guides": {"dropout": pd.AutoDropout}, "train": (X, Y), "test": (X, Y), **QUICK, **given}
    return pd.compare(**given)


def frame() -> pandas.DataFrame:
    return pandas.DataFrame({"size": X[:, 0].tolist(), "price": Y[:, 0].tolist()})


def regressor(**settings: Any) -> Any:
    return pd.DropoutRegressor(**{"max_steps": 2, "samples": 3, "guide": "dropout", **settings}).fit(
        X.numpy(), Y.numpy()[:, 0]
    )


def classifier(y: Any = None, **settings: Any) -> Any:
    labels = LABELS.numpy() if y is None else y
    return pd.DropoutClassifier(**{"max_steps": 2, "samples": 3, "guide": "dropout", **settings}).fit(X.numpy(), labels)


def benchmark(**given: Any) -> Any:
    return pd.benchmark.benchmark(**{"entries": ["mean-field"], "problems": ["line"], **QUICK_RUN, **given})


def laplace_of_another_network() -> Any:
    like = SimpleNamespace(model=net(), sample=lambda n: torch.zeros(n, 2))
    return pd.benchmark.FromLaplace(like).sample_weights(3)


def posed(**given: Any) -> Any:
    return pd.benchmark.problem("line", **{"title": "t", "about": "a", "kind": "numbers", **given})(dict)


ROWS = [
    *out_of_range(benchmark, seeds=0, steps=0, lr=-1.0, samples=0),
    Row(RANGE, "problems", "got 'lines'", lambda: benchmark(problems=["lines"])),
    Row(OTHER, "entries", "got []", lambda: benchmark(entries=[])),
    Row(OTHER, "unknown posterior", "'mean field'", lambda: benchmark(entries=["mean field"])),
    Row(RANGE, "suite", "'large'", lambda: pd.benchmark.problems("large")),  # type: ignore[arg-type]
    Row(RANGE, "kind", "'number'", lambda: posed(kind="number")),
    Row(OTHER, "state dicts", "empty", lambda: pd.benchmark.from_state_dicts([])),
    Row(SHAPE, "sample(n)", "2 numbers a draw", laplace_of_another_network),
    Row(RANGE, "keeps", "got 1.5", lambda: pd.comparison.plot_kl_gap(keeps=(1.5,))),
    Row(RANGE, "guides", "'mean field'", lambda: compare(guides=["mean field"])),
    Row(OTHER, "guides", "there is none", lambda: compare(guides={})),
    Row(OTHER, "a guide", "'reference'", lambda: compare(guides={"reference": pd.AutoDropout})),
    Row(SHAPE, "train", "got Tensor", lambda: compare(train=X)),
    Row(SHAPE, "test", "got 12 points and 3 points", lambda: compare(test=(X, Y[:3]))),
    Row(SHAPE, "y", "got (12,)", lambda: compare(test=(X, Y[:, 0]))),
    Row(RANGE, "y", "got a tensor of shape (12, 1) with no", lambda: compare(train=(X, Y * NAN))),
    *out_of_range(compare, seeds=0, lr=-1.0, compile="a", reference="hmc"),
    Row(OTHER, "model", "got Sequential, which takes (input)", lambda: compare(model=net())),
    Row(OTHER, "test", "observes nothing with these arguments", lambda: compare(model=line, test=(X,))),
    Row(RANGE, "y", "got 1 to 3",
        lambda: pd.compare(classes()[0], {"d": pd.AutoDropout}, (X, LABELS + 1), (X, LABELS), steps=1,
            seeds=1, progress=False)),
    Row(SHAPE, "x", "got (12, 3): mat1 and mat2 shapes cannot be", lambda: compare(train=(torch.ones(12, 3), Y))),
    *out_of_range(regressor, hidden_layer_sizes=0, activation="swish", guide="swag", keep=0.0, length_scale=-1.0),
    *out_of_range(regressor, max_steps=0, validation_fraction=1.0),
    Row(OTHER, "device", "got 'abacus'", lambda: regressor(device="abacus")),
    Row(OTHER, "y", "got one class, 0.0", lambda: classifier(np.zeros(12))),
    Row(OTHER, "no column 'cost'", "its columns are", lambda: pd.fit_table(frame(), "cost")),
    Row(RANGE, "held_back", "got 1.0", lambda: pd.fit_table(frame(), "price", held_back=1.0)),
    Row(OTHER, "'nowhere'", "there is no folder", lambda: pd.tabular.FittedTable.load("nowhere")),
]  # fmt: skip
