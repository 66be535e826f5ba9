"""The exact Gaussian process against numpy's Cholesky factors, scipy's densities and scipy's optimiser."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyro
import pyro.contrib.gp as gp
import pytest
import torch
from pyro import poutine
from scipy import optimize, stats

import pyro_dropout as pd
from pyro_dropout.errors import SingularError
from pyro_dropout.generative.exact_gp import GP
from pyro_dropout.mathematics.covariance import ArcCosine, ArcSine, Layered
from pyro_dropout.mathematics.finite_rank import FiniteRank
from tests.oracles.predictions import close_by_chance

Kernel = Callable[[np.ndarray, np.ndarray], np.ndarray]
HYPER = {"variance": torch.tensor(1.7).double(), "lengthscale": torch.tensor([0.6, 1.9]).double()}


def se(x: np.ndarray, z: np.ndarray) -> np.ndarray:
    difference = (x[:, None] - z[None]) / HYPER["lengthscale"].numpy()
    return HYPER["variance"].item() * np.exp(-0.5 * (difference**2).sum(-1))


def posterior(
    kernel: Kernel, x: np.ndarray, y: np.ndarray, new: np.ndarray, tau: float
) -> tuple[np.ndarray, np.ndarray]:
    """Mean (M, D) and covariance (M, M) of f, by the textbook."""
    root = np.linalg.cholesky(kernel(x, x) + np.eye(len(x)) / tau)
    cross = np.linalg.solve(root, kernel(x, new))
    return cross.T @ np.linalg.solve(root, y), kernel(new, new) - cross.T @ cross


def data() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(20, 2).double()
    return x, torch.stack([torch.sin(2 * x[:, 0]), x[:, 1]], 1) + 0.3 * torch.randn(20, 2).double(), x[:7] + 0.5


def test_predictions_and_evidence_are_those_of_the_textbook() -> None:
    x, y, new = data()
    model = GP(gp.kernels.RBF(2, HYPER["variance"], HYPER["lengthscale"]), tau=3.0).fit(x, y, steps=0)
    mean, covariance = posterior(se, x.numpy(), y.numpy(), new.numpy(), 3.0)
    for noise in (False, True):
        found = model.predict(new, noise=noise)
        np.testing.assert_allclose(found[0], mean, rtol=1e-6, atol=1e-8)
        expected = np.diag(covariance) + (1 / 3.0 if noise else 0.0)
        np.testing.assert_allclose(found[1], np.stack([expected] * 2, 1), rtol=1e-6)
    marginal = stats.multivariate_normal(np.zeros(20), se(x.numpy(), x.numpy()) + np.eye(20) / 3.0)
    assert model.log_marginal_likelihood() == pytest.approx(marginal.logpdf(y.numpy().T).sum(), rel=1e-8)
    assert model.tau.item() == pytest.approx(3.0, rel=1e-12)


@pytest.mark.parametrize(
    "make",
    [
        lambda: gp.kernels.Sum(gp.kernels.Matern32(2), gp.kernels.Linear(2)),
        lambda: Layered(ArcCosine(1), ArcSine(2, bias_length_scale=0.7)),
        lambda: ArcCosine(2, bias_length_scale=1.2),
        lambda: FiniteRank("tanh", width=50, input_dim=2),
        lambda: ArcCosine(1, active_dims=[1]),
    ],
    ids=["sum", "layered", "arc-cosine", "finite-rank", "active-dims"],
)
def test_any_kernel_will_do_even_one_that_was_used_before(make: Callable[[], Any]) -> None:
    x, y, new = data()
    kernel = make().double()
    between = lambda a, b: kernel(torch.from_numpy(a), torch.from_numpy(b)).detach().numpy()  # noqa: E731
    mean, covariance = posterior(between, x.numpy(), y.numpy(), new.numpy(), 2.0)
    before = copy.deepcopy(kernel.state_dict())
    model = GP(kernel, tau=2.0)
    found = model.fit(x, y, steps=0).predict(new, noise=False)
    np.testing.assert_allclose(found[0], mean, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(found[1][:, 0], np.diag(covariance), rtol=1e-6)
    start = model.log_marginal_likelihood()
    assert model.fit(x, y, steps=20).log_marginal_likelihood() > start
    assert all(torch.equal(value, before[name]) for name, value in kernel.state_dict().items()), "it is a copy"


def test_fitting_finds_the_largest_evidence() -> None:
    x = torch.linspace(-3, 3, 25).double().unsqueeze(-1)
    y = torch.sin(2 * x) + 0.2 * torch.randn_like(x)

    def loss(logs: np.ndarray) -> float:
        variance, length, noise = np.exp(logs)
        difference = (x - x.mT).numpy() / length
        covariance = variance * np.exp(-0.5 * difference**2) + noise * np.eye(25)
        return -stats.multivariate_normal(np.zeros(25), covariance).logpdf(y[:, 0].numpy())

    best = optimize.minimize(loss, np.zeros(3), method="L-BFGS-B")
    model = GP(learn_tau=True).fit(x, y, steps=120, lr=0.15)
    assert model.log_marginal_likelihood() == pytest.approx(-best.fun, abs=1e-3)
    found = [model.kernel.variance.item(), model.kernel.lengthscale.item(), 1 / model.tau.item()]
    np.testing.assert_allclose(found, np.exp(best.x), rtol=0.05)
    assert len(model.history) == 120
    assert model.history[0] == pytest.approx(-loss(np.zeros(3)), rel=1e-8)
    fixed = GP(tau=5.0).fit(x, y, steps=20)
    assert fixed.tau.item() == pytest.approx(5.0, rel=1e-12)
    again = fixed.history
    assert fixed.fit(x, y, steps=20).history == again, "a fit starts from the values given"


def test_two_gps_and_the_parameter_store_leave_each_other_alone() -> None:
    x, y, new = data()
    first = GP(learn_tau=True).fit(x, y, steps=10)
    mean = first.predict(new)[0]
    GP().fit(x, -y, steps=25)
    assert len(pyro.get_param_store()) == 0
    pyro.param("kernel.variance", torch.tensor(99.0))
    with poutine.trace() as tape:
        torch.testing.assert_close(first.predict(new)[0], mean, rtol=0, atol=0)
        first.log_marginal_likelihood()
    assert len(tape.trace.nodes) == 0, "a model that asks a GP does not own the GP's parameters"


def test_a_singular_covariance_is_explained() -> None:
    x = torch.zeros(5, 1)
    with pytest.raises(SingularError, match="jitter such as 1e-8"):
        GP(tau=1e30).fit(x, torch.zeros(5, 1), steps=1)
    assert GP(tau=1e30, jitter=1e-8).fit(x, torch.ones(5, 1), steps=0).predict(x)[0].tolist() == [[1.0]] * 5


# --- as a posterior over functions ------------------------------------------------------------------------------------

TAU = 20.0


def fitted(dtype: torch.dtype) -> tuple[GP, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A process, its data, some points, and the mean (M, D) and covariance (M, M) of f there."""
    x, y, at = torch.randn(6, 2, dtype=dtype), torch.randn(6, 2, dtype=dtype), torch.randn(4, 2, dtype=dtype)
    kernel = gp.kernels.RBF(2, HYPER["variance"], HYPER["lengthscale"])
    exact = posterior(se, *(each.double().numpy() for each in (x, y, at)), TAU)
    return GP(kernel, tau=TAU).fit(x, y, steps=0), x, y, at, *map(torch.from_numpy, exact)


def test_draws_are_joint_draws_of_the_process(dtype: torch.dtype) -> None:
    process, _, _, at, mean, covariance = fitted(dtype)
    count = 20_000
    f = pd.references.gp_posterior(process).sample_functions(at, count)
    assert f.shape == (count, 4, 2)
    assert f.dtype == dtype
    variance = covariance.diagonal()
    close_by_chance(f.double().mean(0), mean, (variance / count).sqrt().unsqueeze(-1).expand(4, 2))
    errors = ((torch.outer(variance, variance) + covariance**2) / count).sqrt()
    for output in range(2):
        close_by_chance(torch.cov(f[..., output].double().mT), covariance, errors)
    across = (f[..., 0] - mean[:, 0]).double() * (f[..., 1] - mean[:, 1]).double()
    close_by_chance(across.mean(0), torch.zeros_like(variance), variance / count**0.5)


def test_predict_draws_whole_functions_in_any_blocks(dtype: torch.dtype) -> None:
    process, _, _, at, mean, covariance = fitted(dtype)
    model = SimpleNamespace(likelihood=pd.Gaussian(tau=process.tau))
    count = 8_000
    variance = covariance.diagonal().unsqueeze(-1).expand(4, 2)
    for chunk in (None, 400):
        answer = pd.predict(model, process, at, samples=count, chunk=chunk)
        close_by_chance(answer.mean, mean, (variance / count).sqrt())
        close_by_chance(answer.epistemic, variance, variance * (2 / count) ** 0.5)
        assert torch.allclose(answer.aleatoric, torch.full_like(answer.mean, 1 / TAU))
        f = answer.samples[..., 0].double()
        between = torch.cov(f.mT)[0, 1]  # nought if two points had functions of their own
        assert abs(between - covariance[0, 1]) < 5.5 * (variance[0, 0] * variance[1, 0] * 2 / count).sqrt()
    same = pd.predict(model, process, at[:1].expand(5, 2), samples=20, chunk=2).samples
    assert (same - same[:, :1]).abs().max() < 1e-3  # five points, in blocks that had room for two


def test_a_process_that_is_fitted_again_is_seen() -> None:
    process, x, y, at, *_ = fitted(torch.float64)
    process.sample_functions(at, 2)
    process.fit(x, y + 100, steps=0)
    assert process.sample_functions(x, 10).mean() > 30
    assert repr(process) == "GP(RBF, tau 20)"
