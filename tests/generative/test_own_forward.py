"""Networks that change ``forward``, ``sample_sites`` or a prior: every answer is of the model that is trained."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch import Tensor, nn

import pyro_dropout as pd
from pyro_dropout.errors import PyroDropoutError, ShapeError
from pyro_dropout.generative.likelihoods.likelihood import observe

X, Y = torch.randn(12, 2), torch.randn(12, 1)


class Scaled(pd.BayesianNet):
    """The network of three times its inputs."""

    def forward(self, x: Tensor, y: Tensor | None = None, num_data: int | None = None) -> Tensor:
        return super().forward(3 * x, y, num_data)


class Tripled:
    """The same, to be mixed in."""

    def forward(self, x: Tensor, y: Tensor | None = None, num_data: int | None = None) -> Tensor:
        found: Tensor = super().forward(3 * x, y, num_data)  # type: ignore[misc]
        return found


class Mixed(Tripled, pd.BayesianNet):
    pass


class Further(Scaled):
    """Inherits everything."""


class Indexed(pd.BayesianNet):
    """Five times the first output, at an index that would be a point's if draws came first."""

    def forward(self, x: Tensor, y: Tensor | None = None, num_data: int | None = None) -> Tensor:
        f = 5 * self.evaluate(self.sample_sites(num_data), x)[:, :1]
        observe(self.likelihood, f, y, num_data)
        return f


class Penalised(pd.BayesianNet):
    """A model with another term."""

    def forward(self, x: Tensor, y: Tensor | None = None, num_data: int | None = None) -> Tensor:
        weights = self.sample_sites(num_data)
        pyro.factor("ridge", -20 * weights["weight"].square().sum())
        f = self.evaluate(weights, x)
        with poutine.scale(scale=0.5):
            observe(self.likelihood, f, y, num_data)
        return f


class Heavy(pd.BayesianNet):
    """A model whose sites have other priors than ``prior_of`` says."""

    def sample_sites(self, num_data: int | None = None) -> dict[str, Tensor]:
        shapes = {name: self.net.get_parameter(name).shape for name in self.sites}
        return {n: pyro.sample(n, dist.Laplace(0.0, 0.3).expand(s).to_event(len(s))) for n, s in shapes.items()}


class HeavyPrior(pd.BayesianNet):
    def prior_of(self, name: str) -> dist.TorchDistribution:
        shape = self.net.get_parameter(name).shape
        return dist.Laplace(0.0, 0.3).expand(shape).to_event(len(shape))


def linear(kind: type[pd.BayesianNet]) -> pd.BayesianNet:
    return kind(nn.Linear(2, 1), prior=pd.Prior(), likelihood=pd.Gaussian(tau=4.0))


def by_hand(model: pd.BayesianNet, weight: Tensor, bias: Tensor) -> Tensor:
    """F of draws, (T, N, 1)."""
    f = torch.einsum("toi,ni->tno", weight, 3 * X if isinstance(model, Scaled | Mixed) else X) + bias.unsqueeze(1)
    return 5 * f if isinstance(model, Indexed) else f


class Drawn:
    """Draws of the weights, the same ones at each call."""

    def __init__(self, count: int) -> None:
        self.weights = {"weight": torch.randn(count, 1, 2), "bias": torch.randn(count, 1)}

    def sample_weights(self, n: int) -> dict[str, Tensor]:
        return {name: value[:n] for name, value in self.weights.items()}

    def mean(self) -> dict[str, Tensor]:
        return {name: value[0] for name, value in self.weights.items()}


@pytest.mark.parametrize("kind", [Scaled, Mixed, Further, Indexed])
def test_shared_draws_and_means_are_of_what_forward_returns(kind: type[pd.BayesianNet]) -> None:
    model, posterior = linear(kind), Drawn(2)
    exact = by_hand(model, **posterior.weights)
    torch.testing.assert_close(model.evaluate(posterior.weights, X), exact)
    torch.testing.assert_close(pd.predict(model, posterior, X, samples=1, shared=True).samples, exact[:1])
    torch.testing.assert_close(pd.predict(model, posterior, X, method="standard").mean, exact[0])
    own = {name: value.detach()[None] for name, value in model.net.named_parameters()}
    torch.testing.assert_close(model.evaluate({}, X), by_hand(model, **own)[0])


@pytest.mark.parametrize("kind", [Scaled, Indexed])
def test_likelihoods_of_draws_are_of_what_forward_returns(kind: type[pd.BayesianNet]) -> None:
    model = linear(kind)
    data = pd.to_arviz(model, pd.AutoMeanField(model, init_scale=0.2), X, Y, samples=5, seed=0)
    drawn = {name: torch.as_tensor(data["posterior"][name].values[0]) for name in ("weight", "bias")}
    exact = dist.Normal(by_hand(model, **drawn), 0.5).to_event(1).log_prob(Y)
    assert data["log_likelihood"]["y"].values[0] == pytest.approx(exact.numpy(), rel=1e-4)


def test_inside_standardised_it_is_what_forward_returns() -> None:
    inner, drawn = linear(Scaled), Drawn(3).weights
    model = pd.Standardised(inner, X, Y)
    exact = model.raw(inner.evaluate(drawn, model.standard_x(X)))
    at = [poutine.condition(model, data={name: value[t] for name, value in drawn.items()})(X) for t in range(3)]
    torch.testing.assert_close(model.evaluate(drawn, X), exact)
    torch.testing.assert_close(torch.stack(at), exact)


def test_a_linear_network_is_linearised_and_curved_as_it_is() -> None:
    """The posterior of three times the inputs has precision P = I + 4 XᵀX and mean 4 P⁻¹ Xᵀy."""
    model = linear(Scaled)
    inputs = torch.cat([3 * X, torch.ones(12, 1)], 1)
    covariance = torch.linalg.inv(torch.eye(3) + 4 * inputs.mT @ inputs)
    mean = (4 * covariance @ inputs.mT @ Y)[:, 0]
    guide = pd.laplace(model, {"weight": mean[None, :2], "bias": mean[2:]}, X, Y)
    answer = pd.predict(model, guide, X, method="linearised")
    torch.testing.assert_close(answer.mean[:, 0], inputs @ mean)
    torch.testing.assert_close(answer.epistemic[:, 0], ((inputs @ covariance) * inputs).sum(1), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", [Penalised, Heavy])
def test_the_density_of_a_draw_has_every_term(kind: type[pd.BayesianNet]) -> None:
    model = linear(kind)
    guide = pd.AutoMeanField(model, init_scale=0.2)
    data = pd.to_arviz(model, guide, X, Y, samples=10, seed=0)
    weights = {name: torch.as_tensor(data["posterior"][name].values[0]) for name in ("weight", "bias")}
    exact = []
    for t in range(10):
        at = poutine.condition(model, data={name: value[t] for name, value in weights.items()})
        exact.append(poutine.trace(at).get_trace(X, Y).log_prob_sum().item())
    assert data["sample_stats"]["lp"].values[0].tolist() == pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize("kind", [Penalised, Heavy])
def test_a_curvature_that_is_not_known_is_refused(kind: type[pd.BayesianNet]) -> None:
    model = linear(kind)
    with pytest.raises(PyroDropoutError, match=rf"of {kind.__name__} is .* has other terms, such as pyro.factor"):
        pd.laplace(model, model.net.state_dict(), X, Y)
    with pytest.raises(PyroDropoutError, match="Gaussian priors, and that of 'weight' is a Laplace"):
        pd.guides.AutoLaplace(linear(HeavyPrior))


def test_a_forward_that_returns_no_outputs_is_refused() -> None:
    class Silent(pd.BayesianNet):
        def forward(self, x: Tensor, y: Tensor | None = None, num_data: int | None = None) -> None:  # type: ignore[override]
            super().forward(x, y, num_data)

    with pytest.raises(ShapeError, match="forward of Silent must return the outputs f"):
        linear(Silent).evaluate({}, X)


def test_a_standardised_model_with_a_forward_of_its_own_is_refused() -> None:
    with pytest.raises(PyroDropoutError, match=r"Doubled must not define forward.* a class below BayesianNet"):

        class Doubled(pd.Standardised):
            def forward(self, x: Tensor, y: Tensor | None = None, num_data: int | None = None) -> Tensor:
                return super().forward(2 * x, y, num_data)


def test_hooks_on_the_model_itself_are_refused_where_they_would_not_run() -> None:
    model = pd.BayesianNet(nn.Linear(2, 1))
    guide = pd.AutoMeanField(model)
    model.register_forward_pre_hook(lambda module, given: (3 * given[0], *given[1:]))
    pd.fit(model, guide, X, Y, steps=2, progress=False)
    with pytest.raises(PyroDropoutError, match=r"forward hooks, which do not run at given weights.*model\.net\."):
        pd.predict(model, guide, X, samples=3, shared=True)
    with pytest.raises(PyroDropoutError, match="forward hooks"):
        model.evaluate(guide.mean(), X)
