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
    "make", [pd.Categorical, lambda: pd.Gaussian(4.0, learn=True), lambda: Own([]), lambda: Own("a")]
)
def test_a_copy_stands_alone(make: Any) -> None:
    likelihood = make()
    copied = frozen(likelihood)
    assert type(copied) is type(likelihood)
    assert list(copied.state_dict()) == list(likelihood.state_dict())
    likelihood.register_buffer("later", torch.zeros(1))
    likelihood.extra = 1
    with torch.no_grad():
        for parameter in likelihood.parameters():
            parameter += 1
    assert "later" not in copied.state_dict()
    assert not hasattr(copied, "extra")
    for own, other in zip(copied.parameters(), likelihood.parameters(), strict=True):
        assert not torch.equal(own, other)


@pytest.mark.parametrize("kept", [[1, [2]], {"a": [1]}, [[]], torch.zeros(2)])
def test_what_is_inside_is_copied_too(kept: Any) -> None:
    likelihood = Own(kept)
    copied = frozen(likelihood)
    assert copied.kept is not kept
    if isinstance(kept, list):
        kept.append(3)
        kept[0 if kept == [[], 3] else 1].append(4)
    elif isinstance(kept, dict):
        kept["a"].append(2)
    else:
        kept += 1
    assert repr(copied.kept) in ("[1, [2]]", "{'a': [1]}", "[[]]", "tensor([0., 0.])")
