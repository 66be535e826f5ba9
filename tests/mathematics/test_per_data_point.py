"""A draw for every data point scales the units of an input, and makes nothing of an input that has too few."""

from typing import Any

import pytest
import torch
from torch import nn

import pyro_dropout as pd

Y = torch.zeros(6, 1)
QUIET: Any = {"steps": 2, "compile": False, "progress": False}


def picture(layer: nn.Module, units: int) -> nn.Module:
    return nn.Sequential(layer, nn.Flatten(), nn.Linear(units, 1))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))


CASES = {
    "one column": (mlp, (1,)),
    "seven columns": (mlp, (7,)),
    "one column, in positions": (mlp, (5, 1)),
    "one channel": (lambda: picture(nn.Conv2d(3, 2, 3), 8), (1, 4, 4)),
    "one channel, in groups": (lambda: picture(nn.Conv2d(4, 2, 3, groups=2), 8), (1, 4, 4)),
    "half the channels, in groups": (lambda: picture(nn.Conv2d(4, 2, 3, groups=2), 8), (2, 4, 4)),
    "one channel, transposed": (lambda: picture(nn.ConvTranspose2d(3, 2, 3), 72), (1, 4, 4)),
}


def told(call: Any) -> str:
    with pytest.raises(pd.errors.ShapeError) as caught:
        call()
    return str(caught.value).splitlines()[0]


@pytest.mark.parametrize("guide", [pd.AutoDropout, pd.AutoMeanField, pd.AutoLowRank])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.thinned(2)
def test_an_input_of_another_width_is_refused(guide: Any, case: str) -> None:
    net, shape = CASES[case]
    model = pd.BayesianNet(net())
    posterior, x = guide(model), torch.ones(6, *shape)
    said = told(lambda: pd.fit(model, posterior, x, Y, **QUIET))
    assert said.startswith(f"x must have the shape that net takes, (N, ...); got {tuple(x.shape)}: ")
    own = told(lambda: pd.predict(model, posterior, x, samples=3))
    assert own == told(lambda: pd.predict(model, posterior, x, samples=3, shared=True))
