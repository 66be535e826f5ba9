"""The covariance of every guide's weights: against the variances of its sites, and against its draws."""

import math
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn

import pyro_dropout as pd
from pyro_dropout import AutoMeanField, BayesianNet
from pyro_dropout.errors import PyroDropoutError
from tests.contracts.guides import GUIDES

F64 = torch.float64
DRAWS = 20_000


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).to(F64)


def unit_rows(shapes: dict[str, torch.Size]) -> dict[str, Tensor]:
    """One row for each weight of all sites, so that their root is one of Σ itself."""
    sizes = [shape.numel() for shape in shapes.values()]
    blocks = torch.eye(sum(sizes), dtype=F64).split(sizes, -1)
    return {name: block.unflatten(-1, shape) for (name, shape), block in zip(shapes.items(), blocks, strict=True)}


@pytest.mark.parametrize("name", GUIDES)
def test_the_root_is_that_of_the_covariance(name: str) -> None:
    """Every entry against that of draws, at 6 standard errors: wrong in one of 5e6 runs; the diagonal to 1e-12."""
    torch.manual_seed(0)
    guide = GUIDES[name](BayesianNet(net()))
    with torch.no_grad():
        for value in guide.parameters():
            value += 0.3 * torch.randn_like(value)
    mean = guide.mean()
    root = guide.covariance_root(unit_rows({site: value.shape for site, value in mean.items()}))
    found = root @ root.T
    variances = torch.cat([guide.posterior(site).variance.flatten() for site in mean])
    assert torch.allclose(found.diagonal(), variances, rtol=1e-12, atol=0)
    apart = torch.cat([(draws - mean[site]).flatten(1) for site, draws in guide.sample_weights(DRAWS).items()], -1)
    products = apart.unsqueeze(-1) * apart.unsqueeze(-2)
    error = products.std(0) / DRAWS**0.5
    assert bool(((products.mean(0) - found).abs() <= 6 * error + 1e-14).all())
    assert float((found - found.diagonal().diag()).abs().max()) > 0 or "weight" in name or name == "mean-field"


def test_any_distribution_with_known_moments_will_do() -> None:
    class Own(AutoMeanField):
        def weight_distribution(self, site, state):  # type: ignore[no-untyped-def]
            if site.name == "0.weight":
                return dist.Laplace(state.loc, state.log_scale.exp()).to_event(2)
            return dist.Cauchy(state.loc, state.log_scale.exp()).to_event(2)

    guide = Own(BayesianNet(net()))
    variance = guide.posterior("0.weight").variance
    root = guide.covariance_root(unit_rows({"0.weight": variance.shape}))
    assert torch.allclose(root @ root.T, variance.flatten().diag())
    with pytest.raises(PyroDropoutError, match=r"covariance of site '2.weight' is not known.* Cauchy"):
        guide.covariance_root({"2.weight": torch.ones(1, 1, 3, dtype=F64)})


def test_constrained_sites_and_plates_are_refused() -> None:
    def model(x: Tensor) -> None:
        pyro.sample("width", dist.HalfNormal(1.0))
        with pyro.plate("groups", 3):
            pyro.sample("effect", dist.Normal(0.0, 1.0))

    guide = AutoMeanField(model)
    guide(torch.zeros(1))
    for name, shape, why in (("width", (1,), "constrained"), ("effect", (1, 3), "in a plate")):
        with pytest.raises(PyroDropoutError, match=f"site '{name}' is not known: it is {why}"):
            guide.covariance_root({name: torch.ones(shape)})


class Losses(dist.TorchDistribution):  # type: ignore[misc]
    """Minus a number with an exponential distribution: its support is mapped downward from the real line."""

    arg_constraints: dict[str, Any] = {}
    support = torch.distributions.constraints.less_than(0.0)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        return -torch.empty(sample_shape).exponential_()

    def log_prob(self, value: Tensor) -> Tensor:
        return value


@pytest.mark.parametrize(
    "prior",
    [
        dist.Dirichlet(torch.tensor([1.0, 2.0, 3.0])), dist.LKJCholesky(3, 1.0), Losses(validate_args=False),
        dist.LogNormal(torch.zeros(2), 1.0).to_event(1), dist.Uniform(-1.0, 2.0), dist.Normal(0.0, 1.0),
    ],
    ids=lambda prior: type(prior).__name__,
)  # fmt: skip
def test_quantiles_are_those_of_each_element(prior: Any) -> None:
    # The share of 20,000 draws below a level from 10,000: beyond 5 standard errors in 6 of 10 million runs, 27 numbers.
    guide = AutoMeanField(lambda: pyro.sample("z", prior), init_scale=0.8)
    guide()
    levels = torch.tensor([0.05, 0.5, 0.95])
    drawn = guide.sample_weights(DRAWS)["z"]
    for level, quantile in zip(levels, guide.quantiles(levels)["z"], strict=True):
        below, fixed = (drawn <= quantile).double().mean(0), (drawn == quantile).all(0)
        error = 5 * (level * (1 - level) * (1 / DRAWS + 1 / 10_000)) ** 0.5
        assert bool((((below - level).abs() <= error) | fixed).all())


@pytest.mark.parametrize(("bias", "coins"), [("dropout", 1), ("dropout_each", 3)])
def test_a_bias_is_dropped_by_one_coin_or_by_one_for_each_weight(bias: Any, coins: int) -> None:
    # A pattern that has probability 1/8 is missing from 400 draws with probability 6e-24.
    layer = nn.Linear(1, 3).to(F64)
    model = pd.BayesianNet(layer, pd.Prior(), pd.Gaussian(1.0)).double()
    guide = pd.AutoDropout(model, keep=0.5, bias=bias)
    patterns = (guide.sample_weights(400)["bias"] != 0).unique(dim=0)
    assert len(patterns) == 2**coins
    q, m = guide.posterior("bias"), 2 * layer.bias.detach()  # means are those of the module divided by keep
    expected = 0.25 * m.square().sum() - coins * math.log(2)  # ½ p l² ‖m‖² - H(z)
    assert torch.allclose(pd.paper.kl(q, torch.distributions.Normal(0.0, 1.0)), expected)


@pytest.mark.filterwarnings("ignore:the point of this Laplace")
def test_a_laplace_approximation_without_correlations_is_drawn_from_as_a_pyro_program() -> None:
    x = torch.randn(10, 2, dtype=F64)
    model = pd.BayesianNet(nn.Linear(2, 1).to(F64), pd.Prior())
    guide = pd.laplace(model, pd.AutoDropout(model, keep=1.0), x, x[:, :1], "diagonal")
    assert not torch.equal(guide(x)["weight"], guide.mean()["weight"])


@pytest.mark.parametrize("columns", [2, 3])
def test_a_width_for_each_row_is_one_for_each_channel_of_a_convolution(columns: int) -> None:
    """Also where the kernel has as many columns as channels."""
    model = BayesianNet(nn.Conv2d(3, 2, columns))
    wanted = torch.tensor([0.1, 0.2, 0.3])
    for guide in (
        pd.AutoDropout(model, keep=1.0, scale={"weight": wanted}),
        pd.AutoMultiplicative(model, alpha=1e-12, scale={"weight": wanted}),
        pd.AutoMultiplicative(model, alpha=1e-12, scale={"weight": wanted}, per="weight"),
    ):
        found = guide.posterior("weight").stddev
        assert torch.allclose(found, wanted[:, None, None].expand(found.shape), atol=1e-5)
    alpha = pd.AutoMultiplicative(model, alpha={"weight": wanted}, per="weight")
    relative = alpha.posterior("weight").stddev / alpha.mean()["weight"].abs()
    assert torch.allclose(relative, wanted.sqrt()[:, None, None].expand(relative.shape))


@pytest.mark.parametrize("kind", [pd.AutoMeanField, pd.AutoFullRank])
def test_a_scalar_site_has_a_covariance(kind: type[pd.AutoMeanField]) -> None:
    guide = kind(lambda: pyro.sample("w", dist.Normal(0.0, 1.0)), init_scale=0.5)
    guide()
    assert guide.covariance_root({"w": torch.tensor([1.0, 2.0])}).square().sum(1).tolist() == pytest.approx([0.25, 1.0])
