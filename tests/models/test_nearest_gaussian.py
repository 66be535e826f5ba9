"""The Gaussian of a simple family that is nearest to another: the least KL(q‖p)."""

import itertools
from typing import Any

import pytest
import torch
from experiments.nearest_gaussian import nearest_gaussian
from torch import Tensor, nn

import pyro_dropout as pd

F64 = torch.float64


def laplace() -> Any:
    torch.manual_seed(0)
    x = torch.linspace(-2, 2, 12, dtype=F64).unsqueeze(-1)
    net = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    model = pd.BayesianNet(net, likelihood=pd.Gaussian(tau=9.0))
    with pytest.warns(UserWarning, match="maximum"):  # not trained: any point has a curvature
        return pd.laplace(model, model, x, x, "full")


def covariance(guide: Any) -> Tensor:
    means = guide.mean()
    sizes = [mean.numel() for mean in means.values()]
    parts = torch.eye(sum(sizes), dtype=F64).split(sizes, -1)
    root = guide.covariance_root({n: p.reshape(-1, *means[n].shape) for n, p in zip(means, parts, strict=True)})
    return root @ root.mT


def kl(q: Tensor, p: Tensor) -> float:
    return 0.5 * (torch.trace(torch.linalg.solve(p, q)) - len(p) + p.logdet() - q.logdet()).item()


def test_no_other_diagonal_and_no_other_directions_are_nearer() -> None:
    target = laplace()
    p = covariance(target)
    mean_field, low_rank = nearest_gaussian(target), nearest_gaussian(target, 3)
    for guide in (mean_field, low_rank):
        assert all(torch.equal(value, target.mean()[name]) for name, value in guide.mean().items())
    least, with_directions = (kl(covariance(guide), p) for guide in (mean_field, low_rank))
    assert with_directions < least - 0.1
    torch.manual_seed(1)
    for _ in range(20):  # small steps from the minimum, in all directions
        change = 1 + 0.05 * torch.randn(len(p), dtype=F64)
        assert kl(torch.diag(covariance(mean_field).diagonal() * change.square()), p) > least
        width = torch.cat([low_rank._state(site).log_scale.exp().flatten() for site in low_rank._sites.values()])
        factor = torch.cat([low_rank._state(site).factor for site in low_rank._sites.values()]).detach()
        moved = factor + 0.05 * torch.randn_like(factor)
        other = width.unsqueeze(-1) * (torch.eye(len(p), dtype=F64) + moved @ moved.mT) * width
        assert kl(other, p) > with_directions
        assert kl(covariance(low_rank) * change[0].square(), p) > with_directions


def test_more_directions_are_nearer_and_all_of_them_are_the_guide_itself() -> None:
    target = laplace()
    p = covariance(target)
    apart = [kl(covariance(nearest_gaussian(target, rank)), p) for rank in (1, 2, 4, 8, len(p), len(p) + 3)]
    assert all(more < less - 1e-6 for less, more in itertools.pairwise(apart[:5]))
    assert abs(apart[-2]) < 1e-9
    assert abs(apart[-1]) < 1e-9
    assert torch.allclose(covariance(nearest_gaussian(target, len(p))), p)
