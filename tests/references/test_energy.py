"""The energy of weights, against Pyro's own log density and its differences, for networks and for other models."""

import warnings
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch import Tensor, nn

import pyro_dropout as pd
from pyro_dropout.generative.model_call import ModelCall
from pyro_dropout.references.nuts.energy import Energy
from tests.contracts.models import recurrent


def scaled(x: Tensor, y: Tensor | None = None) -> Tensor:
    """A model with a site that is positive, one on a simplex, and no network."""
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    shares = pyro.sample("shares", dist.Dirichlet(torch.ones(3, dtype=x.dtype)))
    f = x * scale + shares[0] - shares[1] ** 2
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(f, 0.5).to_event(1), obs=y)
    return f


def cases() -> list[Any]:
    points, targets = torch.randn(6, 2), torch.randn(6, 1)
    tanh = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
    classes = pd.BayesianNet(nn.Linear(2, 3), likelihood=pd.Categorical())
    one_number = recurrent(nn.RNN(2, 3, batch_first=True), 1)  # whose kernel cannot be mapped over weights
    return [
        pytest.param(pd.BayesianNet(tanh, pd.Prior(0.5), pd.Gaussian(tau=4.0)), points, targets, id="net"),
        pytest.param(classes, points, torch.tensor([0, 1, 2, 0, 1, 2]), id="classes"),
        pytest.param(pd.BayesianNet(one_number), torch.randn(6, 4, 2), targets, id="recurrent"),
        pytest.param(pd.paper.DeepGP(2, [3], 1, nonlinearity="tanh"), points, targets, id="deep-gp"),
        pytest.param(scaled, points[:, :1].double(), targets.double(), id="constrained"),
    ]


def joint(model: Any, weights: dict[str, Tensor], x: Tensor, y: Tensor) -> float:
    return float(poutine.trace(poutine.condition(model, data=weights)).get_trace(x, y).log_prob_sum())


@pytest.mark.parametrize(("model", "x", "y"), cases())
@pytest.mark.parametrize("chains", [1, 3])
def test_it_is_minus_the_log_density_and_its_gradient(model: Any, x: Tensor, y: Tensor, chains: int) -> None:
    energy = Energy(ModelCall(model, (x, y)))
    z = torch.stack([energy.start() for _ in range(chains)])
    values, slopes = energy(z)
    assert values.shape == (chains,)
    assert slopes.shape == z.shape
    step = 1e-5
    for k in range(z.shape[1]):
        shift = torch.zeros_like(z)
        shift[:, k] = step
        numeric = (energy(z + shift)[0] - energy(z - shift)[0]) / (2 * step)
        torch.testing.assert_close(slopes[:, k], numeric, rtol=1e-5, atol=1e-5)
    own = energy.weights(z)
    if model is scaled:  # densities change with the way to measure: dw = |dw/dz| dz, here by torch's own transforms
        for chain in range(chains):
            one = {name: value[chain] for name, value in own.items()}
            stick = torch.distributions.StickBreakingTransform()
            change = one["scale"].log() + stick.log_abs_det_jacobian(stick.inv(one["shares"]), one["shares"])
            assert float(values[chain]) == pytest.approx(-joint(model, one, x, y) - float(change), rel=1e-6)
        return
    for chain in range(chains):
        one = {name: value[chain] for name, value in own.items()}
        exact = -joint(energy.model, one, x.double(), y.double() if y.is_floating_point() else y)
        assert float(values[chain]) == pytest.approx(exact, rel=1e-9)


def test_the_model_itself_is_left_alone() -> None:
    model = pd.BayesianNet(nn.Sequential(nn.Linear(1, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = torch.randn(5, 1)
    energy = Energy(ModelCall(model, (x, x)))
    energy(energy.start()[None])
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert next(model.parameters()).dtype == torch.float32
    assert len(pyro.get_param_store()) == 0


def _within(x: Tensor) -> None:
    theta = pyro.sample("theta", dist.Gamma(5.0, 2.0))
    u = pyro.sample("u", dist.Uniform(torch.zeros(()), theta))
    pyro.sample("y", dist.Normal(u, 0.5), obs=x)


def _within_a_parameter(x: Tensor) -> None:
    u = pyro.sample("u", dist.Uniform(torch.zeros(()), pyro.param("end", torch.tensor(2.0))))
    pyro.sample("y", dist.Normal(u, 0.5), obs=x)


def test_a_support_that_depends_on_other_sites_is_refused() -> None:
    """By the sampler and by guides; a parameter that the sampler does not move is a number to it."""
    refused = r"support of site 'u' depends on another.*pyro\.sample\('u_unit', dist\.Uniform\(0, 1\)\)"
    for run in (
        Energy,
        lambda call: pd.nuts(call.model, *call.args),
        lambda call: pd.AutoMeanField(call.model)(*call.args),
    ):
        with pytest.raises(pd.errors.PyroDropoutError, match=refused):
            run(ModelCall(_within, (torch.ones(()),)))
    with pytest.raises(pd.errors.PyroDropoutError, match=refused):
        pd.AutoMeanField(_within_a_parameter)(torch.ones(()))
    assert torch.isfinite(Energy(ModelCall(_within_a_parameter, (torch.ones(()),)))(torch.zeros(1, 1))[0])


AFFINE = dist.transforms.AffineTransform(1.0, 2.0)
EXP = dist.transforms.ExpTransform()


@pytest.mark.parametrize(
    ("base", "transforms"),
    [
        (dist.Beta(2.0, 2.0), [AFFINE]),
        (dist.HalfNormal(1.0), [AFFINE]),
        (dist.Normal(0.0, 1.0), [EXP, AFFINE]),
        (dist.Normal(0.0, 1.0), [dist.transforms.ComposeTransform([EXP, AFFINE])]),
        (dist.Uniform(0.0, 3.0), [dist.transforms.SigmoidTransform().inv]),
    ],
)
def test_a_support_that_torch_declares_wrongly_is_refused(base: Any, transforms: list[Any]) -> None:
    """It declares the real line for what an affine transform gives, whatever it is given."""

    def model() -> None:
        pyro.sample("u", dist.TransformedDistribution(base, transforms).expand([2]).to_event(1).mask(True))

    for run in (pd.nuts, lambda program: pd.AutoMeanField(program)()):
        with pytest.raises(pd.errors.PyroDropoutError, match=r"site 'u'.*support is not known.*pyro\.sample\('u_unit'"):
            run(model)


def test_a_hidden_latent_site_is_refused() -> None:
    """It would be drawn anew at every call."""
    with pytest.raises(pd.errors.PyroDropoutError, match=r"energy at the same weights changes.*poutine\.block"):
        Energy(ModelCall(poutine.block(scaled, hide=["scale"]), (torch.ones(3, 1), torch.ones(3, 1))))


def correlated() -> None:
    """A number r and a correlation r + 0.2, whose matrix has no Cholesky decomposition from 1 on."""
    r = pyro.sample("r", dist.Normal(torch.zeros((), dtype=torch.float64), 0.6))
    matrix = torch.eye(2, dtype=r.dtype) * (0.8 - r) + (r + 0.2)
    pyro.factor("volume", torch.linalg.cholesky(matrix).diagonal().log().sum())


def test_it_is_infinite_where_a_matrix_has_no_decomposition() -> None:
    energy = Energy(ModelCall(correlated))
    near, far = torch.tensor([[0.5]]).double(), torch.tensor([[1.5]]).double()
    for _ in range(2):  # the second time after positions that can be mapped
        energies, slopes = energy(torch.cat([near, far]))
        alone, slope = energy(near)
        torch.testing.assert_close(energies, torch.tensor([float(alone), torch.inf]).double())
        torch.testing.assert_close(slopes, torch.cat([slope, torch.zeros(1, 1).double()]))
    assert energy(far)[0].isinf().all()


@pytest.mark.deep
@pytest.mark.parametrize("compile", [False, "auto"])
def test_a_trajectory_into_such_a_matrix_is_divergent(compile: Any) -> None:
    """The mean, by quadrature, is farther away than four standard errors once in 10,000 runs."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = pd.nuts(correlated, chains=2, samples=400, warmup=100, seed=1, compile=compile, progress=False)
    assert found.divergences > 0
    assert any("trajectories diverged" in str(each.message) for each in told)
    grid = torch.linspace(-1.2, 0.8, 20_001, dtype=torch.float64)[1:-1]
    weights = torch.softmax(0.5 * torch.log(1 - (grid + 0.2) ** 2) - grid**2 / 0.72, 0)
    mean = (weights * grid).sum()
    error = ((weights * (grid - mean) ** 2).sum() / 80).sqrt()  # at least a tenth of the draws counts
    assert abs(found.weights["r"].double().mean() - mean) < 4 * error
