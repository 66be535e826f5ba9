"""Joint draws of an exact Gaussian process, against its moments written out in numpy."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

import pyro_dropout as pd
from tests.oracles.predictions import F64, close_by_chance

TAU = 20.0


def problem(dtype: torch.dtype, outputs: int = 2) -> tuple[Any, Tensor, Tensor, Tensor]:
    x, y = torch.randn(6, 1, dtype=dtype), torch.randn(6, outputs, dtype=dtype)
    return pd.generative.GP(tau=TAU).fit(x, y, steps=0), x, y, torch.linspace(-1, 1, 4, dtype=dtype).unsqueeze(-1)


def exact(x: Tensor, y: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """Mean (M, D) and covariance (M, M) of f, with the squared exponential of length-scale one."""

    def k(a: Any, b: Any) -> Any:
        return np.exp(-0.5 * (a - b.T) ** 2)

    a, b = x.double().numpy(), at.double().numpy()
    inverse = np.linalg.inv(k(a, a) + np.eye(len(a)) / TAU)
    mean, covariance = k(b, a) @ inverse @ y.double().numpy(), k(b, b) - k(b, a) @ inverse @ k(a, b)
    return torch.from_numpy(mean), torch.from_numpy(covariance)


def test_draws_are_joint_draws_of_the_process(dtype: torch.dtype) -> None:
    gp, x, y, at = problem(dtype)
    count = 20_000
    f = pd.references.gp_posterior(gp).sample_functions(at, count)
    assert f.shape == (count, 4, 2)
    assert f.dtype == dtype
    mean, covariance = exact(x, y, at)
    variance = covariance.diagonal()
    close_by_chance(f.double().mean(0), mean, (variance / count).sqrt().unsqueeze(-1).expand(4, 2))
    errors = ((torch.outer(variance, variance) + covariance**2) / count).sqrt()
    for output in range(2):
        close_by_chance(torch.cov(f[..., output].double().mT), covariance, errors)
    across = (f[..., 0] - mean[:, 0]).double() * (f[..., 1] - mean[:, 1]).double()
    close_by_chance(across.mean(0), torch.zeros(4, dtype=F64), variance / count**0.5)


def test_predict_draws_whole_functions_in_any_blocks(dtype: torch.dtype) -> None:
    gp, x, y, at = problem(dtype)
    model = SimpleNamespace(likelihood=pd.Gaussian(tau=gp.tau))
    count = 8_000
    mean, covariance = exact(x, y, at)
    variance = covariance.diagonal().unsqueeze(-1).expand(4, 2)
    for chunk in (None, 400):
        answer = pd.predict(model, pd.references.gp_posterior(gp), at, samples=count, chunk=chunk)
        close_by_chance(answer.mean, mean, (variance / count).sqrt())
        close_by_chance(answer.epistemic, variance, variance * (2 / count) ** 0.5)
        assert torch.allclose(answer.aleatoric, torch.full_like(answer.mean, 1 / TAU))
        f = answer.samples[..., 0].double()
        between = torch.cov(f.mT)[0, 1]  # nought if two points had functions of their own
        assert abs(between - covariance[0, 1]) < 5.5 * (variance[0, 0] * variance[1, 0] * 2 / count).sqrt()
    same = pd.predict(model, pd.references.gp_posterior(gp), at[:1].expand(5, 1), samples=20, chunk=2).samples
    assert (same - same[:, :1]).abs().max() < 1e-3  # five points, in blocks that had room for two


def test_a_process_that_is_fitted_again_is_seen(dtype: torch.dtype) -> None:
    gp, x, y, at = problem(dtype)
    posterior = pd.references.gp_posterior(gp)
    posterior.sample_functions(at, 2)
    gp.fit(x, y + 100, steps=0)
    assert posterior.sample_functions(x, 10).mean() > 30
    assert "GP(RBF, tau 20" in repr(posterior)
