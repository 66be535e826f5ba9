"""Data that are not finite are refused at every door to a training, by name and row, before anything is changed."""

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import pyro_dropout as pd
from pyro_dropout.errors import RangeError

QUIET: dict[str, Any] = {"steps": 3, "compile": False, "progress": False}
X = torch.linspace(-1, 1, 12).unsqueeze(-1)


def network() -> pd.BayesianNet:
    torch.manual_seed(0)
    return pd.BayesianNet(nn.Linear(1, 1), likelihood=pd.Gaussian(tau=4.0))


def program(x: Tensor, y: Tensor, num_data: int | None = None) -> None:
    w = pyro.sample("w", dist.Normal(torch.zeros(1), 1.0).to_event(1))
    with pyro.plate("data", num_data or len(x), subsample_size=len(x)):
        pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y.squeeze(-1))


def svi(model: Any, x: Tensor, y: Tensor) -> None:
    pd.SVI(model, pd.AutoMeanField(model), pyro.optim.Adam({"lr": 0.1}), compile=False).step(x, y)


def fit(model: Any, *data: Any) -> None:
    pd.fit(model, pd.AutoMeanField(model), *data, **QUIET)


def fleet(x: Tensor, y: Tensor) -> None:
    def build(seed: int) -> tuple[Any, Any]:
        model = network()
        return model, pd.AutoDropout(model)

    pd.Fleet(build, {"seed": [0, 1]}).fit(x, y, **QUIET)


def ensemble(x: Tensor, y: Tensor) -> None:
    model = network()
    pd.fit(model, pd.Ensemble(model, members=2), x, y, **QUIET)


POINT = {"weight": torch.ones(1, 1), "bias": torch.zeros(1)}
NUTS: dict[str, Any] = {"chains": 1, "samples": 5, "warmup": 5, "compile": False, "progress": False}
DOORS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "fit": lambda x, y: fit(network(), x, y),
    "fit of a program": lambda x, y: fit(program, x, y),
    "fit with a loader": lambda x, y: fit(network(), DataLoader(TensorDataset(x, y), batch_size=6)),
    "fit of a program with a loader": lambda x, y: fit(program, DataLoader(TensorDataset(x, y), batch_size=6)),
    "SVI": lambda x, y: svi(network(), x, y),
    "SVI of a program": lambda x, y: svi(program, x, y),
    "Fleet": fleet,
    "Ensemble": ensemble,
    "swag": lambda x, y: pd.swag(network(), POINT, x, y, steps=8, rank=2, every=2, batch_size=6, lr=0.1),
    "laplace": lambda x, y: pd.laplace(network(), POINT, x, y),
    "nuts": lambda x, y: pd.nuts(network(), x, y, **NUTS),
    "nuts of a program": lambda x, y: pd.nuts(program, x, y, **NUTS),
    "validation": lambda x, y: pd.fit(
        model := network(), pd.AutoDropout(model), X, X, **QUIET, validation=(x, y), check_every=1
    ),
}


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["x", "y"])
@pytest.mark.parametrize("door", DOORS)
def test_the_tensor_and_the_rows_are_named(door: str, name: str, bad: float) -> None:
    data = {"x": X.clone(), "y": X.clone()}
    data[name][[2, 4]] = bad
    with pytest.raises(RangeError, match=rf"\b{name}( of a batch)? must be finite; got .*Leave out rows 2, 4,"):
        DOORS[door](data["x"], data["y"])


def test_a_later_batch_is_looked_at_before_its_step() -> None:
    for model in (network(), program):
        y = X.clone()
        y[7] = torch.nan
        with pytest.raises(RangeError, match=r"y must be finite; .*Leave out row 1,"):
            fit(model, DataLoader(TensorDataset(X, y), batch_size=6))


@pytest.mark.parametrize("name", ["x", "y"])
def test_a_later_step_that_fails_names_the_data(name: str) -> None:
    data = {"x": X.clone(), "y": X.clone()}
    adam, loss = pyro.optim.Adam({"lr": 0.1}), pd.ELBO(per_example=False)
    svi = pd.SVI(program, pd.AutoMeanField(program), adam, loss, compile=False)
    svi.step(**data)
    data[name][5] = torch.nan
    with pytest.raises(RangeError, match=rf"{name} must be finite; .*Leave out row 5,"):
        svi.step(**data)


def test_the_inputs_of_a_dict_are_named() -> None:
    class Two(nn.Linear):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return super().forward(a + b)

    model = pd.BayesianNet(Two(1, 1))
    with pytest.raises(RangeError, match=r"x\['b'\] must be finite"):
        fit(model, {"a": X, "b": X * torch.nan}, X)


def test_data_that_a_model_does_not_use_may_be_missing() -> None:
    """Warnings are errors, and these models know what they do."""

    def imputed(x: Tensor, y: Tensor) -> None:
        absent = x.isnan()
        w = pyro.sample("w", dist.Normal(torch.zeros(1), 1.0).to_event(1))
        z = pyro.sample("z", dist.Normal(torch.zeros(len(x), 1), 1.0).to_event(2))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(torch.where(absent, z, x.nan_to_num()) @ w, 1.0), obs=y.squeeze(-1))

    x = X.clone()
    x[3] = torch.nan
    fit(imputed, x, X)
