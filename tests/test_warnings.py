"""Every warning of the package points at the line of the user's that called into it."""

import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pandas
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

import pyro_dropout as pd
from pyro_dropout.sklearn.estimators import DropoutRegressor

QUIET = {"progress": False, "seed": 0}
X, Y = torch.linspace(-1, 1, 30)[:, None], torch.zeros(30, 1)


def linear() -> tuple[pd.BayesianNet, pd.AutoMeanField]:
    model = pd.BayesianNet(nn.Linear(1, 1), likelihood=pd.Gaussian(1e4))
    return model, pd.AutoMeanField(model)


def loo() -> object:
    return pd.loo(*linear(), X, 5 * X.sin() + 3, samples=100, seed=0)


def nuts() -> object:
    return pd.nuts(linear()[0], X, X, samples=5, warmup=0, chains=2, **QUIET)


def normal() -> None:
    pyro.sample("z", dist.Normal(0.0, 1.0))


def fitted() -> object:
    model, guide = linear()
    return pd.fit(model, guide, X, 100 * X, steps=300, **QUIET)


def estimated() -> object:
    rows = np.linspace(-1, 1, 40)[:, None]
    found = DropoutRegressor((5,), guide="dropout", max_steps=3, random_state=0, tau=1.0).fit(rows, rows[:, 0])
    return found.interval(rows)


def predicted() -> object:
    rows = pandas.DataFrame({"a": np.linspace(0, 1, 60), "y": np.linspace(0, 1, 60)})
    run = pd.fit_table(rows, "y", steps=20, progress=False)
    return run.predict(rows * 1000)


CALLS: dict[str, tuple[Callable[[], object], str]] = {
    "loo": (loo, "above 0.7"),
    "nuts": (nuts, "R-hat"),
    "fit": (fitted, "still falling"),
    "a guide without weights": (lambda: pd.AutoDropout(normal)(), "finds no weight"),
    "an estimator": (estimated, "predict_interval"),
    "a table": (predicted, "outside its training range"),
    "an old name": (lambda: pd.LOO, "will be removed"),
}


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", CALLS)
def test_a_warning_points_at_the_line_that_called_the_package(name: str) -> None:
    call, said = CALLS[name]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        call()
    found = [each for each in told if said in str(each.message)]
    assert found, [str(each.message) for each in told]
    assert {each.filename for each in found} == {__file__}


def test_warnings_are_issued_by_one_function() -> None:
    package = Path(pd.__file__).parent
    found = [path.name for path in package.rglob("*.py") if re.search(r"warnings\.warn\(|stacklevel", path.read_text())]
    assert not found


def test_a_warning_in_a_callback_points_at_the_callback(tmp_path: Path) -> None:
    """Also where a library calls back, such as a search of scikit-learn's: the first line that is neither's."""
    script = tmp_path / "script.py"
    script.write_text("def act(call):\n    return call()\n")
    space: dict[str, object] = {"__name__": "torch.somewhere"}
    exec(compile(script.read_text(), str(script), "exec"), space)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        space["act"](partial(pd.errors.warn_caller, "here"))
    assert told[0].filename == __file__
