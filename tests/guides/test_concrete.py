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


def test_what_is_kept_stops_below_a_limit() -> None:
    model = BayesianNet(mlp())
    guide = AutoConcreteDropout(model)
    one_row = BayesianNet(torch.nn.Linear(1, 4))
    with torch.no_grad():
        for each in (guide, of_one := AutoConcreteDropout(one_row)):
            assert all(torch.allclose(keep, torch.tensor(0.9)) for keep in each.keeps().values())
            for name, value in each.named_parameters():
                if name.endswith("share_logit"):
                    value.fill_(60.0)
    assert all(keep == torch.tensor(0.95) for keep in guide.keeps().values())
    assert of_one.keeps()["weight"] == 1  # its only row need not be dropped


@pytest.mark.parametrize("limit", [0.7, 0.95, 1.0])
def test_relaxed_flips_have_the_odds_of_keep(limit: float) -> None:
    guide = AutoConcreteDropout(BayesianNet(mlp().double()), keep=0.6, max_keep=limit)
    q = guide._distribution(guide._sites["0.weight"])
    assert torch.allclose(q.logit, q.keep.log() - (1 - q.keep).log(), rtol=1e-12)  # type: ignore[attr-defined]


def test_limits_are_given_by_site_and_by_row() -> None:
    model = BayesianNet(mlp())
    limits = torch.tensor([0.5, 1.0])
    guide = AutoConcreteDropout(model, {"0.weight": 0.4}, max_keep={"0.weight": limits, "2.weight": 0.99})
    assert torch.allclose(guide.keeps()["0.weight"], torch.tensor(0.4))
    assert guide._state(guide._sites["0.weight"]).max_keep.tolist() == [0.5, 1.0]
