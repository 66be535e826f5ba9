"""Bad input to the comparison and to the estimators."""

from typing import Any

import numpy as np
import pandas
import pytest
import torch

import pyro_dropout as pd
from pyro_dropout import tables
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
    names,
    net,
    refused,
)  # fmt: skip

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


ROWS = [
    Row("plot_kl_gap", lambda: pd.comparison.plot_kl_gap(keeps=(1.5,)), RANGE, "keeps", "got 1.5", "lie in (0, 1]"),
    Row("compare", lambda: compare(guides="dropout"),
        OTHER, "guides", "got str", "be a list of names such as"),
    Row("compare", lambda: compare(guides=["mean field"]),
        RANGE, "guides", "'mean field'", "'mean-field'"),
    Row("compare", lambda: compare(guides={}),
        OTHER, "guides", "there is none", "functions that return a guide for a model"),
    Row("compare", lambda: compare(guides={"reference": pd.AutoDropout}),
        OTHER, "a guide", "'reference'", "cannot be called"),
    Row("compare", lambda: compare(train=X), SHAPE, "train", "got Tensor", "be a pair of tensors (x, y)"),
    Row("compare", lambda: compare(test=(X, Y[:3])),
        SHAPE, "test", "got 12 points and 3 points", "be tensors with the same number of points, at"),
    Row("compare", lambda: compare(test=(X, Y[:, 0])),
        SHAPE, "y", "got (12,)", "have shape (N, D) = (12, 1), as the model's"),
    Row("compare", lambda: compare(train=(X, Y * NAN)),
        RANGE, "y", "got a tensor of shape (12, 1) with no", "be finite"),
    Row("compare", lambda: compare(seeds=0), RANGE, "seeds", "got 0", "be a whole number of at least 1"),
    Row("compare", lambda: compare(seeds="abc"), RANGE, "seed", "got 'a'", "be a whole number or None"),
    Row("compare", lambda: compare(lr=-1.0), RANGE, "lr", "got -1.0", "be positive and finite"),
    Row("compare", lambda: compare(compile="a"), RANGE, "compile", "got 'a'", "be 'auto', True or False"),
    Row("compare", lambda: compare(reference="hmc"),
        RANGE, "reference", "got 'hmc'", "be 'nuts' or a posterior that predict takes"),
    Row("compare", lambda: compare(model="m"),
        OTHER, "model", "got 'm'", "be a model to copy, or a function of the seed"),
    Row("compare", lambda: compare(model=net()),
        OTHER, "model", "got Sequential, which takes (input)", "Write BayesianNet(net, likelihood=...)"),
    Row("compare", lambda: compare(model=lambda a, b, c: None),
        OTHER, "model", "<lambda> takes (a, b, c); called with a seed, it raises", "takes the arguments in train"),
    Row("compare", lambda: compare(model=lambda seed: 3),
        OTHER, "model", "called with a seed, it returns int", "or a function of the seed that returns one"),
    Row("compare", lambda: compare(model=line, train=X), SHAPE, "train", "got Tensor", "be a tuple of the model's"),
    Row("compare", lambda: compare(model=line, test=(X,)),
        OTHER, "test", "observes nothing with these arguments", "Give it its data"),
    Row("compare", lambda: compare(labels="a"), OTHER, "labels", "got 'a'", "be a dict such as {'title': ...}"),
    Row("compare", lambda: pd.compare(classes()[0], {"d": pd.AutoDropout}, (X, LABELS + 1), (X, LABELS), steps=1,
        seeds=1, progress=False),
        RANGE, "y", "got 1 to 3", "hold class indices from 0 to 2"),
    Row("compare", lambda: compare(train=(torch.ones(12, 3), Y)),
        SHAPE, "x", "got (12, 3): mat1 and mat2 shapes cannot be", "have the shape that net takes, (N, ...)"),
    Row("DropoutRegressor", lambda: regressor(hidden_layer_sizes=0),
        RANGE, "hidden_layer_sizes", "got 0", "hold whole numbers of at least 1, such as (50,),"),
    Row("DropoutRegressor", lambda: regressor(activation="swish"),
        RANGE, "activation", "got 'swish'", "be 'relu' or 'tanh'"),
    Row("DropoutRegressor", lambda: regressor(guide="swag"),
        RANGE, "guide", "got 'swag'", "be 'auto', 'dropout', 'concrete',"),
    Row("DropoutRegressor", lambda: regressor(keep=0.0), RANGE, "keep", "got 0.0", "lie in (0, 1]"),
    Row("DropoutRegressor", lambda: regressor(length_scale=-1.0),
        RANGE, "length_scale", "got -1.0", "be positive and finite"),
    Row("DropoutRegressor", lambda: regressor(tau="high"),
        RANGE, "tau", "got 'high'", "be 'auto' or a positive number, 1/noise variance"),
    Row("DropoutRegressor", lambda: regressor(max_steps=0),
        RANGE, "max_steps", "got 0", "be a whole number of at least 1"),
    Row("DropoutRegressor", lambda: regressor(validation_fraction=1.0),
        RANGE, "validation_fraction", "got 1.0", "lie strictly between 0 and 1"),
    Row("DropoutRegressor", lambda: regressor(device="abacus"),
        OTHER, "device", "got 'abacus'", "be a torch device that can be used here, such as"),
    Row("DropoutRegressor", lambda: regressor(compile="a"), RANGE, "compile", "got 'a'", "be 'auto', True or False"),
    Row("DropoutRegressor", lambda: regressor(early_stopping="yes"),
        RANGE, "early_stopping", "got 'yes'", "be True or False"),
    Row("DropoutRegressor", lambda: regressor(keep=[0.9]),
        RANGE, "keep", "got 1 numbers", "be a number, or one for each of the 2 weight"),
    Row("DropoutClassifier", lambda: classifier(np.zeros(12)),
        OTHER, "y", "got one class, 0.0", "have at least two classes"),
    Row("fit_table", lambda: pd.fit_table(3, "price"), OTHER, "data frame", "got int", "with named columns is needed"),
    Row("fit_table", lambda: pd.fit_table(frame(), "cost"),
        OTHER, "no column 'cost'", "its columns are", "size, price"),
    Row("fit_table", lambda: pd.fit_table(frame(), "price", held_back=1.0), RANGE, "held_back", "got 1.0", "lie in"),
    Row("fit_table", lambda: pd.fit_table(frame(), "price", guide="swag"), RANGE, "guide", "got 'swag'", "be 'auto',"),
    Row("FittedTable.load", lambda: pd.tabular.FittedTable.load("nowhere"),
        OTHER, "'nowhere'", "there is no folder", "create a run with pyro-dropout fit"),
    Row("Table.column", lambda: tables.Table("t", {"a": [1]}, [0]).column("b"),
        OTHER, "no column 'b'", "t has", "are a"),
]  # fmt: skip


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("row", ROWS, ids=names(ROWS))
def test_bad_input_is_refused(row: Row) -> None:
    refused(row)
