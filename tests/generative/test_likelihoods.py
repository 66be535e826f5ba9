"""The likelihoods against scipy, and what a mini-batch counts for."""

from collections.abc import Callable

import numpy as np
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from pyro.optim import Adam
from scipy import special, stats

import pyro_dropout as pd
from pyro_dropout import ELBO, AutoDropout, AutoMeanField, BayesianNet, Bernoulli, Categorical, Gaussian
from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.generative.likelihoods.moments import is_one_of
from tests.contracts.likelihoods import LIKELIHOODS, N
from tests.contracts.models import mlp
from tests.contracts.test_likelihoods import density


def of_log_odds(f: np.ndarray, y: np.ndarray) -> np.ndarray:
    z = special.logit(y)
    return stats.norm.logpdf(z, f[:, :2], np.exp(-f[:, 2:] / 2)) - np.log(y * (1 - y))


def counts(y: np.ndarray, mean: np.ndarray, r: np.ndarray | float) -> np.ndarray:
    return stats.nbinom.logpmf(y, r, r / (r + mean))


# log p(y | f) of each target, (N, D), or of each class
ORACLES: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "gaussian": lambda f, y: stats.norm.logpdf(y, f, np.array([0.25, 3.0]) ** -0.5),
    "heteroscedastic": lambda f, y: stats.norm.logpdf(y, f[:, :2], np.exp(-f[:, 2:] / 2)),
    "categorical": lambda f, y: special.log_softmax(f, -1)[np.arange(N), y][:, None],
    "bernoulli": lambda f, y: stats.bernoulli.logpmf(y, special.expit(f)),
    "poisson": lambda f, y: stats.poisson.logpmf(y, np.exp(f)),
    "log-normal": lambda f, y: stats.lognorm.logpdf(y, 2.0, scale=np.exp(f)),
    "logit-normal": of_log_odds,
    "counts": lambda f, y: counts(y, np.exp(f + 1), 3.0),
    "counts by input": lambda f, y: counts(y, np.exp(f[:, :2]), 3 * np.exp(f[:, 2:])),
    "heavy tails": lambda f, y: stats.t.logpdf(y, 4.0, f, 0.5),
}


@pytest.mark.parametrize("name", ORACLES)
def test_densities_are_those_of_scipy(name: str, dtype: torch.dtype) -> None:
    case, oracle = LIKELIHOODS[name], ORACLES[name]
    f, y = torch.randn(N, case.outputs, dtype=dtype), case.targets()
    y = y.to(dtype) if y.is_floating_point() else y
    found = density(case.make().to(dtype), f, y)
    assert found.shape == (N,)
    assert found.dtype == dtype
    np.testing.assert_allclose(
        found, oracle(f.double().numpy(), y.numpy()).sum(-1), rtol=1e-4 if dtype == torch.float32 else 1e-12
    )


def test_a_learned_precision_is_trained() -> None:
    """With f held near zero and targets of variance 1/4, τ goes to 4: the residuals' own precision, to 20%."""
    model = BayesianNet(mlp(), likelihood=Gaussian(tau=1.0, learn=True))
    guide = AutoDropout(model, keep=1.0)
    x, y = torch.zeros(200, 2), 0.5 * torch.randn(200, 1)
    svi = SVI(model, guide, Adam({"lr": 0.2}), ELBO(per_example=False))
    for _ in range(50):
        svi.step(x, y)
    assert model.likelihood.tau.item() == pytest.approx(1 / y.var().item(), rel=0.2)


def test_one_output_takes_answers_without_a_column() -> None:
    f, y = torch.randn(N, 1), torch.randint(2, (N,))
    assert torch.equal(density(Bernoulli(), f, y), density(Bernoulli(), f, y.unsqueeze(-1)))
    assert torch.equal(density(Bernoulli(), f, y.bool()), density(Bernoulli(), f, y))


@pytest.mark.parametrize("scale", [1.0, 30.0, 300.0])
def test_the_root_of_classes_is_exact_for_sure_networks_too(scale: float) -> None:
    f = scale * torch.randn(50, 6, generator=torch.Generator().manual_seed(0))
    exact = f.double()
    p = torch.softmax(exact, -1)
    # p_i(1 - p_i) without a difference of numbers near 1
    others = torch.stack([torch.cat([p[:, :k], p[:, k + 1 :]], 1).sum(1) for k in range(6)], 1)
    found = Categorical().curvature(f).double()
    torch.testing.assert_close(found.diagonal(dim1=-2, dim2=-1), p * others, rtol=1e-3, atol=1e-37)
    expected = torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


class Shifted(Gaussian):
    """A Gaussian by its class, and not by its density: the mean is f + 1, and tails are heavy."""

    def distribution(self, f: torch.Tensor) -> dist.StudentT:
        return dist.StudentT(4.0, f + 1, (self.tau**-0.5).to(f)).to_event(1)


class Narrower(Gaussian):
    """A Gaussian with another root of its curvature, and the density of its parent."""

    def curvature_root(self, f: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        return 2 * super().curvature_root(f, y)


def test_a_class_with_a_density_of_its_own_is_not_taken_for_its_parent() -> None:
    """The formulas of ``Gaussian`` would give the posterior of another model, without a word."""
    x, y = torch.randn(20, 2), torch.randn(20, 1)
    model = BayesianNet(torch.nn.Linear(2, 1), likelihood=Shifted(tau=4.0))
    answer = pd.predict(model, AutoMeanField(model), x, samples=10, seed=0)
    assert not is_one_of(model.likelihood, Gaussian)
    assert is_one_of(Narrower(), Gaussian)
    with pytest.raises(PyroDropoutError, match=r"must be Gaussian\(tau\); got Shifted"):
        pd.references.conjugate(model, x, y)
    with pytest.raises(PyroDropoutError, match=r"likelihood Shifted does not say .* Define in it curvature_root"):
        pd.laplace(model, model.net.state_dict(), x, y)
    with pytest.raises(PyroDropoutError, match=r"refit_tau is for the likelihood Gaussian.* is of Shifted"):
        pd.judging.refit_tau(answer, y)
    with pytest.raises(PyroDropoutError, match=r"tune must hold 'length_scales'.* Shifted"):
        pd.training.maximise_evidence(model, x, y, tune="tau", progress=False)
    with pytest.raises(PyroDropoutError, match="must be a Gaussian or a HeteroscedasticGaussian"):
        pd.Transformed(Shifted(), "log")


def test_a_class_without_a_density_of_its_own_keeps_the_curvature_of_its_parent() -> None:
    class Renamed(Gaussian):
        pass

    class Tailed:
        distribution = Shifted.distribution

    class Mixed(Tailed, Gaussian):
        pass

    with pytest.raises(PyroDropoutError, match="likelihood Mixed does not say how its log density bends"):
        Mixed().curvature(torch.zeros(3, 1))
    f = torch.zeros(3, 1)
    assert torch.equal(Renamed(tau=4.0).curvature(f), Gaussian(tau=4.0).curvature(f))
    assert torch.equal(Narrower(tau=4.0).curvature(f), 4 * Gaussian(tau=4.0).curvature(f))
