"""Memory that runs out in training: a message that says what needs less, and nothing lost."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pyro_dropout as pd
from pyro_dropout.errors import OutOfMemoryError

X = torch.linspace(-1, 1, 1000).unsqueeze(-1)


def pair() -> Any:
    torch.manual_seed(0)
    model = pd.BayesianNet(nn.Linear(1, 1), likelihood=pd.Gaussian(4.0))
    guide = pd.AutoDropout(model, keep=0.9)
    guide(X, X)
    return model, guide


def short_of_memory(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Make a device of which a step of more than ``most`` points would ask too much."""
    real = pd.ELBO.differentiable_loss

    def loss(self: pd.ELBO, model: Any, guide: Any, x: Tensor, *rest: Any) -> Tensor:
        if len(x) > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        return real(self, model, guide, x, *rest)

    monkeypatch.setattr(pd.ELBO, "differentiable_loss", loss)


def test_the_message_says_what_needs_less_and_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    model, guide = pair()
    before = {name: value.clone() for name, value in guide.state_dict().items()}
    short_of_memory(monkeypatch, 100)
    quiet: Any = {"compile": False, "progress": False, "steps": 2}
    with pytest.raises(OutOfMemoryError, match=r"a step of 1000 points: CUDA out of memory\. Use a smaller batch_size"):
        pd.fit(model, guide, X, X, **quiet)
    assert all(torch.equal(value, before[name]) for name, value in guide.state_dict().items())
    assert pd.fit(model, guide, X, X, batch_size=100, **quiet).steps == 2
