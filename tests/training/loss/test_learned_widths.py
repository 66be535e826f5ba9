"""Learned prior widths: the best ones for the guide at every step, and the same numbers wherever they are read."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyro
import pytest
import torch
from torch import Tensor, nn

import pyro_dropout as pd
from pyro_dropout import errors, paper
from pyro_dropout.training.checkpoints.posterior_file import settings_of
from pyro_dropout.training.optimisers import cosine_decay

F64 = torch.float64
QUIET: Any = {"compile": False, "progress": False}


def data() -> tuple[Tensor, Tensor]:
    x = torch.linspace(-1, 1, 24, dtype=F64).unsqueeze(-1)
    return x, torch.sin(3 * x)


def made(seed: int = 0, learn: Any = True, guide: Callable[[Any], Any] = pd.AutoMeanField) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    model = pd.BayesianNet(net, pd.Prior(0.3, learn=learn, tempered=False), pd.Gaussian(tau=20.0))
    return model, guide(model)


def widths(model: Any) -> dict[str, float]:
    return {name: model.prior_of(name).stddev.flatten()[0].item() for name in model.sites}


def best(guide: Any) -> dict[str, float]:
    """The widths by their definition, from the marginals."""
    found = {name: guide.posterior(name) for name in guide._sites}
    return {name: math.sqrt((q.mean**2 + q.variance).mean().item()) for name, q in found.items()}


GUIDES: dict[str, Callable[[Any], Any]] = {
    "mean field": pd.AutoMeanField,
    "low rank": lambda model: pd.AutoLowRank(model, rank=2),
    "low rank, net": lambda model: pd.AutoLowRank(model, rank=2, per="net"),
    "row mixture": lambda model: pd.AutoRowMixture(model, components=2, bias="gaussian"),
    "dropout": lambda model: pd.AutoDropout(model, keep=0.9, scale=0.1, bias="gaussian"),
}


@pytest.mark.parametrize("name", GUIDES)
def test_the_kl_is_the_least_over_all_widths(name: str) -> None:
    model, guide = made(guide=GUIDES[name])
    x, y = data()
    with torch.no_grad():
        learned = pd.ELBO().parts(model, guide, x, y)["kl"]
    assert widths(model)["0.weight"] == pytest.approx(1 / 0.3)
    pd.ELBO().differentiable_loss(model, guide, x, y)  # which trains, and so writes the widths
    assert widths(model) == pytest.approx(best(guide))
    fixed, _ = made(learn=False)
    for factor in (0.9, 1.0, 1.1):
        fixed.set_prior_scales({site: factor * width for site, width in best(guide).items()})
        kl = pd.ELBO().parts(fixed, guide, x, y)["kl"]
        assert torch.isclose(kl, learned, rtol=1e-10) if factor == 1.0 else bool(kl > learned)
    # and its gradient is that of the minimised KL, through the widths
    parameters = list(guide.parameters())
    slopes = torch.autograd.grad(pd.ELBO().parts(model, guide, x, y)["kl"], parameters, allow_unused=True)
    total = torch.zeros((), dtype=F64)
    for site in guide._sites:
        if name == "low rank, net":  # the sites share one determinant
            break
        q = guide.posterior(site)
        width = (q.mean.square() + q.variance).mean().sqrt()
        p = pyro.distributions.Normal(0.0, width).expand(q.mean.shape).to_event(q.mean.dim())
        total = total + paper.kl(q, p)
    else:
        again = torch.autograd.grad(total, parameters, allow_unused=True)
        pairs = [pair for pair in zip(slopes, again, strict=True) if pair[0] is not None]
        assert len(pairs) > 5
        assert all(torch.allclose(*pair, rtol=1e-8, atol=1e-10) for pair in pairs)


def by_fit(model: Any, guide: Any, x: Tensor, y: Tensor, compile: bool) -> None:
    pd.fit(model, guide, x, y, steps=20, lr=0.05, compile=compile, progress=False, seed=3)


def by_svi(model: Any, guide: Any, x: Tensor, y: Tensor, compile: bool) -> None:
    svi = pd.SVI(model, guide, pyro.optim.Adam({"lr": 1e-9}), pd.ELBO(), compile=compile)
    for _ in range(3):
        svi.step(x, y)


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("way", [by_fit, by_svi])
@pytest.mark.thinned(3)
def test_after_training_everyone_reads_the_widths_of_the_guide(way: Any, compile: bool) -> None:
    model, guide = made()
    x, y = data()
    way(model, guide, x, y, compile)
    assert widths(model) == pytest.approx(best(guide), rel=1e-6)  # SVI: those before its last, tiny step
    torch.manual_seed(0)
    theirs = pyro.infer.TraceMeanField_ELBO(num_particles=1).loss(model, guide, x, y)
    torch.manual_seed(0)
    ours = pd.ELBO(per_example=False).parts(model, guide, x, y)
    assert theirs == pytest.approx(sum(ours.values()).item(), rel=1e-6)


def test_files_bring_widths_that_were_found_and_refuse_others(tmp_path: Path) -> None:
    x, y = data()
    model, guide = made()
    pd.fit(model, guide, x, y, steps=5, lr=0.05, **QUIET)
    pd.save(tmp_path / "learned", model, guide)
    fresh = made(1)
    pd.load(tmp_path / "learned", *fresh)
    assert widths(fresh[0]) == widths(model)
    with pytest.raises(errors.DifferentModelError, match="learned"):
        pd.load(tmp_path / "learned", *made(1, learn=False))
    set_by_hand, guide = made(learn=False)  # as a search for the evidence does
    set_by_hand.set_prior_scales({"0.weight": 0.25, "2.bias": torch.tensor(3.0)})
    pd.save(tmp_path / "set", set_by_hand, guide)
    again = made(1, learn=False)
    pd.load(tmp_path / "set", *again)
    assert [widths(again[0])[name] for name in ("0.weight", "2.bias")] == [0.25, 3.0]
    assert settings_of(*again) == settings_of(set_by_hand, guide)
    pd.save(tmp_path / "plain", *made(learn=False))
    pd.load(tmp_path / "set", *made(2, learn=False))
    net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    wide = pd.BayesianNet(net, pd.Prior(0.9), pd.Gaussian(tau=20.0))
    with pytest.raises(errors.DifferentModelError, match="prior_scale"):
        pd.load(tmp_path / "plain", wide, pd.AutoMeanField(wide))


@pytest.mark.deep
def test_each_replica_of_a_fleet_has_its_own() -> None:
    x, y = data()
    fleet = pd.Fleet(made, {"seed": [0, 1]})
    fleet.fit(x, y, steps=15, lr=0.05, seed=2, **QUIET)
    found = [widths(model) for model, _ in fleet]
    for (_, guide), mine in zip(fleet, found, strict=True):
        assert mine == pytest.approx(best(guide))
    assert found[0] != found[1]


def test_a_standardised_model_learns_them_too() -> None:
    x, y = data()
    model = pd.Standardised(made()[0], 1900 + 50 * x, 300 + 10 * y)
    guide = pd.AutoMeanField(model)
    pd.fit(model, guide, 1900 + 50 * x, 300 + 10 * y, steps=3, lr=0.05, **QUIET)
    assert widths(model) == pytest.approx(best(guide))
    model.set_prior_scales({"0.weight": 0.7})
    assert widths(model)["0.weight"] == pytest.approx(0.7)


@pytest.mark.parametrize("guide", [pd.AutoMeanField, lambda model: pd.AutoLowRank(model, rank=2)])
@pytest.mark.thinned(2)
def test_each_input_has_a_width_of_its_own(guide: Any, tmp_path: Path) -> None:
    """An input that says nothing gets a narrow prior; widths are the means over columns, in files as well."""
    x = torch.randn(60, 2, dtype=F64, generator=torch.Generator().manual_seed(0))
    y = torch.sin(2 * x[:, :1])

    def build() -> tuple[Any, Any]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        model = pd.BayesianNet(net, pd.Prior(torch.ones(2), learn="*.weight", tempered=False), pd.Gaussian(tau=50.0))
        return model, guide(model)

    model, q = build()
    pd.fit(model, q, x, y, steps=150, lr=0.05, seed=0, compile="traced", progress=False)
    found, first = model.prior_scale("0.weight"), q.posterior("0.weight")
    torch.testing.assert_close(found, (first.mean**2 + first.variance).mean(0).sqrt())
    assert model.prior_scale("2.weight").shape == ()
    assert found[1] < 0.5 * found[0]
    pd.save(tmp_path / "file.safetensors", model, q)
    again = build()
    pd.load(tmp_path / "file.safetensors", *again)
    assert torch.equal(again[0].prior_scale("0.weight"), found)


@pytest.mark.parametrize(
    ("guide", "site"),
    [
        (lambda model: pd.AutoMeanField(model, bias="map"), "0.bias"),
        (lambda model: pd.AutoDropout(model, keep=0.9), "0.weight"),
        (lambda model: pyro.infer.autoguide.AutoNormal(model), "0.weight"),
    ],
)
def test_a_point_has_no_best_prior(guide: Any, site: str) -> None:
    x, y = data()
    for run in (
        lambda model, q: pd.fit(model, q, x, y, steps=1, **QUIET),
        lambda model, q: pd.ELBO(per_example=False).loss(model, q, x, y),
    ):
        with pytest.raises(errors.PyroDropoutError, match=f"width of '{site}' cannot be learned"):
            run(*made(guide=guide))
    model, q = made(learn="*.weight", guide=lambda model: pd.AutoMeanField(model, bias="map"))
    pd.fit(model, q, x, y, steps=2, **QUIET)
    found = [widths(model)[name] for name in ("0.bias", "0.weight")]
    assert found == pytest.approx([1.0, best(q)["0.weight"]])


def test_what_cannot_be_learned_is_refused() -> None:
    x, y = data()
    model, guide = made()
    ensemble = pd.Ensemble(model, pd.AutoMeanField, members=2)
    with pytest.raises(errors.PyroDropoutError, match="share one prior"):
        pd.fit(model, ensemble, x, y, steps=1, **QUIET)
    with pytest.raises(errors.PyroDropoutError, match=r"needs the loss pyro_dropout\.ELBO"):
        pd.fit(model, guide, x, y, steps=1, loss=pyro.infer.Trace_ELBO(), **QUIET)
    net = nn.Linear(2, 1)
    with pytest.raises(errors.PyroDropoutError, match=r"'\*\.kernel', which matches none of the 2 parameters"):
        pd.BayesianNet(net, pd.Prior(learn="*.kernel"))
    plain = pd.BayesianNet(net, pd.Prior())
    wrong = {errors.RangeError: -1.0, errors.ShapeError: torch.ones(2)}
    for error, scale in wrong.items():
        with pytest.raises(error):
            plain.set_prior_scales({"bias": 0.5, "weight": scale})
    for scales, error in (({"w": 1.0}, errors.PyroDropoutError), ({"weight": float("nan")}, errors.RangeError)):
        with pytest.raises(error):
            plain.set_prior_scales({"bias": 0.5, **scales})
    assert widths(plain) == {"weight": 1.0, "bias": 1.0}  # nothing was set


@pytest.mark.parametrize(
    "count", [pytest.param(200, marks=pytest.mark.deep), 45]
)  # also with fewer data than two for each weight
def test_the_width_of_a_linear_model_has_the_largest_evidence(count: int) -> None:
    """With XᵀX = N·I the least squares ŵ are N(0, s² + 1/Nτ) each, so the best s² is their mean square less 1/Nτ."""
    x = torch.linalg.qr(torch.randn(count, 40, dtype=F64)).Q * count**0.5
    y = x @ (0.3 * torch.randn(40, 1, dtype=F64)) + torch.randn(count, 1, dtype=F64)
    model = pd.BayesianNet(nn.Linear(40, 1, bias=False).double(), pd.Prior(learn=True))
    guide = pd.AutoMeanField(model)
    how: Any = {"schedule": cosine_decay(600), "compile": "traced", "progress": False}
    pd.fit(model, guide, x, y, steps=600, lr=0.05, seed=0, **how)
    best = (x.T @ y / count).square().mean() - 1 / count
    assert float(model.prior_scale("weight")) == pytest.approx(float(best.sqrt()), rel=0.03)
