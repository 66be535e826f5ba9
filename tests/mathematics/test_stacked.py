"""Distributions side by side, against each of them alone."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

import pyro_dropout as pd
from pyro_dropout.mathematics.scored import Stacked


def parts(dtype: torch.dtype, scale: float = 0.1) -> list[pd.paper.BernoulliMixture]:
    return [pd.paper.BernoulliMixture(torch.randn(2, 3, dtype=dtype), keep=0.8, scale=scale) for _ in range(6)]


def test_it_is_its_parts(dtype: torch.dtype) -> None:
    each = parts(dtype)
    q = Stacked(each, (3, 2)).expand((4, 3, 2))
    value = torch.randn(5, 4, 3, 2, 2, 3, dtype=dtype)
    found = q.log_prob(value)
    assert found.shape == (5, 4, 3, 2)
    assert torch.allclose(found[:, :, 2, 1], each[5].log_prob(value[:, :, 2, 1]))
    assert torch.allclose(q.mean[1, 2, 0], each[4].mean)
    assert torch.allclose(q.variance[1, 0, 1], each[1].variance)
    assert q.rsample((7,)).shape == (7, 4, 3, 2, 2, 3)


@pytest.mark.parametrize("method", ["large_k", "exact"])
def test_its_kl_is_that_of_each_part(method: pd.mathematics.divergence.Method, dtype: torch.dtype) -> None:
    each = parts(dtype)
    loc, scale = torch.randn(6, 2, 3, dtype=dtype), torch.rand(6, 2, 3, dtype=dtype) + 0.5
    found = pd.paper.kl(Stacked(each, (6,)), dist.Normal(loc, scale).to_event(2), method)
    expected = [pd.paper.kl(q, dist.Normal(loc[k], scale[k]).to_event(2), method) for k, q in enumerate(each)]
    assert torch.allclose(found, torch.stack(expected))
    whole = torch.distributions.kl_divergence(Stacked(each, (6,)), dist.Normal(loc, scale).to_event(2))
    assert whole.shape == (6,)


def weights_in_a_plate(x: Tensor, group: Tensor, y: Tensor | None = None) -> None:
    with pyro.plate("groups", 4):
        weight = pyro.sample("W", dist.Normal(0.0, 1.0).expand([1, 3]).to_event(2), infer={"kind": "weight"})
    mean = (weight[group] @ x.unsqueeze(-1)).squeeze(-1)
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(mean, 0.1).to_event(1), obs=y)


@pytest.mark.deep
def test_a_weight_in_a_plate_is_one_where_the_model_says_so() -> None:
    """Every group drops rows of its own matrix, never a group."""
    x, group = torch.randn(40, 3), torch.arange(40) % 4
    y = x.sum(1, keepdim=True) * (1 + group.unsqueeze(-1))
    guide = pd.AutoDropout(weights_in_a_plate, keep=0.9)
    slower = pyro.optim.ClippedAdam({"lr": 0.2, "lrd": 0.01 ** (1 / 400), "clip_norm": 1e6})
    svi = pyro.infer.SVI(weights_in_a_plate, guide, slower, pd.ELBO(per_example=False))
    for _ in range(400):
        svi.step(x, group, y)
    draws = guide.sample_weights(200)["W"]
    assert draws.shape == (200, 4, 1, 3)
    dropped = draws == 0
    assert dropped.float().mean().item() == pytest.approx(0.1, abs=0.05)
    assert not (dropped[:, 0] == dropped[:, 1]).all()
    best = torch.stack([dropped_least_squares(x[group == k], y[group == k, 0], keep=0.9, noise=0.1) for k in range(4)])
    assert torch.allclose(guide.mean()["W"][:, 0], best, atol=0.05), (guide.mean()["W"][:, 0], best)


def dropped_least_squares(x: Tensor, y: Tensor, keep: float, noise: float) -> Tensor:
    """E[w] at the minimum of E‖y - X(m∘b)‖² / (2σ²) + keep ‖m‖² / 2, in closed form."""
    gram = x.T @ x
    pull = keep**2 * gram + keep * (1 - keep) * gram.diag().diag() + noise**2 * keep * torch.eye(x.shape[1])
    return keep * torch.linalg.solve(pull, keep * x.T @ y)


def test_a_matrix_in_a_plate_is_not_a_weight_unless_told() -> None:
    def model(y: Tensor) -> None:
        with pyro.plate("rows", 5, dim=-2), pyro.plate("columns", 3, dim=-1):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Normal(z, 1.0), obs=y)

    guide = pd.AutoDropout(model, keep=0.5)
    with pytest.warns(UserWarning, match="finds no weight in this model"):
        guide(torch.zeros(5, 3))
    assert not (guide.sample_weights(50)["z"] == 0).any()
