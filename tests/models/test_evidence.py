"""Laplace approximations of a fleet of small networks equal those made one by one; the script runs."""

import math
from typing import Any

import pytest
import torch
from experiments.laplace_splits import laplace_fleet
from torch import nn

import pyro_dropout as pd

X = torch.linspace(-2, 2, 60).unsqueeze(-1)
Y = 3 * torch.sin(2 * X) + 5
HOW: Any = {"steps": 400, "compile": False, "progress": False, "seed": 0}


def build(x: torch.Tensor, y: torch.Tensor, decay: float) -> tuple[Any, Any]:
    net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
    length = pd.paper.implied_length_scale(1.0, 1.0, decay, len(x))
    prior = pd.Prior(length, bias_length_scale=length, width_scaled=False)
    model = pd.Standardised(pd.BayesianNet(net, prior, pd.Gaussian(1.0)), x, y)
    return model, pd.AutoDropout(model, keep=1.0)


@pytest.mark.deep
def test_answers_equal_those_of_the_library_one_by_one() -> None:
    torch.manual_seed(0)
    rows, asked = [torch.arange(0, 60, 2)] * 2, torch.arange(1, 60, 2).expand(2, -1)
    made: list[tuple[Any, Any]] = []

    def remembered(x: torch.Tensor, y: torch.Tensor, decay: float) -> tuple[Any, Any]:
        made.append(build(x, y, decay))
        return made[-1]

    found = laplace_fleet(remembered, {"decay": [1e-4, 1e-2], "lr": [0.03, 0.03]}, X, Y, rows, asked, **HOW)
    for k, (model, guide) in enumerate(made[-2:]):
        tau = found.tau[k, 0] * model.y_std.square().item()
        lengths = {name: float(1 / model.prior_of(name).base_dist.scale.flatten()[0]) for name in model.sites}
        posterior = pd.laplace(model, guide, X[rows[k]], Y[rows[k]], "full")
        answer = pd.predict(model, posterior, X[asked[k]], method="linearised")
        torch.testing.assert_close(found.mean[k].float(), answer.mean.squeeze(-1), rtol=1e-4, atol=1e-4)
        extra = (answer.epistemic / answer.aleatoric).squeeze(-1)
        torch.testing.assert_close(found.extra[k, 0].float(), extra, rtol=1e-3, atol=1e-5)
        scaled = {name: length * math.sqrt(tau) for name, length in lengths.items()}
        best = posterior.log_evidence(float(tau), scaled)
        assert found.log_evidence[k, 0].item() == pytest.approx(best.item(), abs=1e-2)
        for factor in (0.9, 1.1):  # no other τ with the same weight decay has more evidence
            near = {name: length * math.sqrt(factor * tau) for name, length in lengths.items()}
            assert posterior.log_evidence(factor * float(tau), near) < best
