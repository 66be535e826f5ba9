"""Where guides start: at weights that were found before, and with widths whose noise is a small share of the signal."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pyro_dropout as pd

QUIET: Any = {"compile": False, "progress": False}
GUIDES: dict[str, Callable[..., Any]] = {
    "mean field": pd.AutoMeanField,
    "low rank": lambda model, **how: pd.AutoLowRank(model, rank=2, **how),
    "low rank, net": lambda model, **how: pd.AutoLowRank(model, rank=2, per="net", **how),
    "full rank": pd.AutoFullRank,
    "row mixture": lambda model, **how: pd.AutoRowMixture(model, spread=0.0, bias="gaussian", **how),
    "multiplicative": lambda model, **how: pd.AutoMultiplicative(model, alpha=0.1, **how),
    "concrete": pd.AutoConcreteDropout,
    "dropout": lambda model, **how: pd.AutoDropout(model, keep=0.8, **how),
    "Laplace": pd.guides.AutoLaplace,
}


def mlp(width: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 2))


@pytest.mark.parametrize("name", GUIDES)
def test_the_mean_starts_at_that_of_a_fitted_guide_and_at_given_weights(name: str) -> None:
    torch.manual_seed(0)
    model = pd.BayesianNet(mlp())
    point = pd.AutoDropout(model, keep=1.0)
    x = torch.randn(10, 3)
    pd.fit(model, point, x, x[:, :2], steps=3, lr=0.1, **QUIET)
    wanted = point.mean()
    for init in (point, wanted):
        found = GUIDES[name](model, init=init).mean()
        for site, value in wanted.items():
            assert torch.allclose(found[site], value, rtol=1e-5, atol=1e-7)
            assert found[site].data_ptr() != value.data_ptr()  # a copy: training must not move the point


def test_weights_of_some_sites_are_enough() -> None:
    model = pd.BayesianNet(mlp())
    found = pd.AutoMeanField(model, init={"2.bias": torch.tensor([3.0, 4.0])}).mean()
    assert found["2.bias"].tolist() == [3.0, 4.0]
    assert torch.equal(found["0.weight"], model.net[0].weight.detach())


def test_a_start_that_is_none_is_refused() -> None:
    torch.manual_seed(0)
    model, other = pd.BayesianNet(mlp()), pd.BayesianNet(mlp(9))
    for wrong, words in (
        ({"1.weight": torch.ones(1)}, "init names '1.weight', which is not a site; the sites are 0.weight"),
        ({"0.bias": 3.0}, "init of .0.bias. must be a tensor"),
        (pd.AutoMeanField(other), "init has shape"),
        (pd.Ensemble(model, members=2), "mean of an Ensemble"),
    ):
        with pytest.raises(pd.errors.PyroDropoutError, match=words):
            pd.AutoMeanField(model, init=wrong)  # type: ignore[arg-type]
    start = pd.AutoMeanField(model).mean()
    with pytest.raises(pd.errors.PyroDropoutError, match="leave out init"):
        pd.Ensemble(model, lambda m: pd.AutoMeanField(m, init=start), members=2)


# --- how wide ---------------------------------------------------------------------------------------------------------


def shares(guide: Any, x: Tensor) -> list[float]:
    """For each layer of a network of linear layers, the noise of its outputs beside its inputs' root mean square."""
    torch.manual_seed(1)
    found, h = [], x
    for path, layer in guide.model.net.named_children():
        if isinstance(layer, nn.Linear):
            draws = guide.sample_weights(200)[f"{path}.weight"]
            out = torch.einsum("soi,ni->sno", draws, h)
            found.append((out.std(0).square().mean().sqrt() / h.square().mean().sqrt()).item())
        h = layer(h)
    return found


@pytest.mark.parametrize("name", ["mean field", "low rank", "low rank, net", "full rank", "row mixture"])
def test_the_noise_of_a_layer_does_not_depend_on_its_width(name: str) -> None:
    torch.manual_seed(0)
    widths = (4, 40) if name == "full rank" else (4, 400)
    for width in widths:
        guide = GUIDES[name](pd.BayesianNet(mlp(width)))
        assert shares(guide, torch.randn(50, 3)) == pytest.approx([0.1, 0.1], rel=0.25)
        assert guide.posterior("0.bias").stddev[0].item() == pytest.approx(0.1, rel=1e-3)
        fixed = GUIDES[name](pd.BayesianNet(mlp(width)), init_scale=0.1)
        assert fixed.posterior("2.weight").stddev[0, 0].item() == pytest.approx(0.1, rel=1e-3)  # as it always was


def test_a_convolution_has_the_fan_in_of_its_kernel() -> None:
    guide = pd.AutoMeanField(pd.BayesianNet(nn.Sequential(nn.Conv2d(4, 6, 3), nn.Flatten(), nn.Linear(6, 2))))
    assert guide.posterior("0.weight").stddev[0, 0, 0, 0].item() == pytest.approx(0.1 / 36**0.5)


@pytest.mark.parametrize(
    ("kind", "wrong", "said"),
    [
        (pd.AutoDropout, {"p": 0.1}, r"AutoDropout has no option 'p'\. Write keep=0\.9, the probability that a row is"),
        (pd.AutoDropout, {"rate": "0.weight"}, r"no option 'rate'\. Write keep=1 - rate"),
        (pd.AutoDropout, {"scales": 0.1}, r"no option 'scales'\. Did you mean 'scale'\?"),
        (pd.AutoMeanField, {"p": 0.1}, r"AutoMeanField has no option 'p'\. The options are other, .*init_scale"),
    ],
)
def test_an_option_that_a_guide_does_not_have_is_named_with_what_to_write(kind: Any, wrong: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        kind(pd.BayesianNet(nn.Linear(1, 1)), **wrong)
