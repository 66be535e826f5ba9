"""Learned keep probabilities, where a probability has rounded to one."""

import pytest
import torch

from pyro_dropout import ELBO, AutoConcreteDropout, BayesianNet
from tests.contracts.models import mlp


@pytest.mark.parametrize("logit", [-30.0, 0.0, 20.0, 60.0])
@pytest.mark.parametrize("each", [True, False])
def test_gradients_are_finite_at_any_logit(logit: float, each: bool, dtype: torch.dtype) -> None:
    model = BayesianNet(mlp().to(dtype))
    guide, x = AutoConcreteDropout(model), torch.randn(5, 2, dtype=dtype)
    with torch.no_grad():
        for name, value in guide.named_parameters():
            if name.endswith("logit"):
                value.fill_(logit)
    ELBO(per_example=each).loss_and_grads(model, guide, x, x[:, :1])
    assert all(torch.isfinite(value.grad).all() for value in guide.parameters() if value.grad is not None)
