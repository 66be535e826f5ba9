"""Copies of likelihoods that later changes do not reach."""

from typing import Any

import pytest
import torch

import pyro_dropout as pd
from pyro_dropout.prediction.predict_network import frozen


class Own(pd.Categorical):
    """A likelihood with state of its own."""

    def __init__(self, kept: Any) -> None:
        super().__init__()
        self.kept = kept


@pytest.mark.parametrize(
    "make",
    [pd.Categorical, lambda: pd.Gaussian(4.0, learn=True), lambda: Own([]), lambda: Own({"a": [1, [2]]})],
)
def test_a_copy_stands_alone(make: Any) -> None:
    likelihood = make()
    copied = frozen(likelihood)
    assert type(copied) is type(likelihood)
    before = repr(getattr(copied, "kept", None))
    likelihood.register_buffer("later", torch.zeros(1))
    likelihood.extra = 1
    with torch.no_grad():
        for parameter in likelihood.parameters():
            parameter += 1
    if isinstance(likelihood, Own):
        (likelihood.kept["a"][1] if likelihood.kept else likelihood.kept).append(3)
    assert "later" not in copied.state_dict()
    assert not hasattr(copied, "extra")
    assert repr(getattr(copied, "kept", None)) == before
    for own, other in zip(copied.parameters(), likelihood.parameters(), strict=True):
        assert not torch.equal(own, other)
