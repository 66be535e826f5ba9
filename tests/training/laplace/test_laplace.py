"""Laplace approximations against exact posteriors and dense Gaussians; what is refused, and what is warned of."""

import copy
import warnings
from pathlib import Path
from typing import Any

import pyro
import pytest
import torch
from pyro import poutine
from torch import Tensor, nn
from torch.distributions import MultivariateNormal, kl_divergence
from torch.utils.data import DataLoader, TensorDataset

import pyro_dropout as pd
from pyro_dropout.training.laplace import laplace as module
from tests.networks.layers import Output, Parts

F64 = torch.float64
STRUCTURES = ("full", "layer", "kron", "diagonal", "last")


def linear_problem(outputs: int = 2) -> tuple[pd.BayesianNet, Tensor, Tensor]:
    prior = pd.Prior(length_scale=0.7, bias_length_scale=2.0)
    tau = torch.linspace(3.0, 5.0, outputs, dtype=F64)
    model = pd.BayesianNet(nn.Linear(3, outputs).to(F64), prior, pd.Gaussian(tau=tau))
    x = torch.randn(12, 3, dtype=F64)
    return model, x, x[:, :outputs] + 0.3 * torch.randn(12, outputs, dtype=F64)


def network_problem(dtype: torch.dtype = F64) -> tuple[pd.BayesianNet, Tensor, Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).to(dtype)
    x = torch.randn(30, 2, dtype=dtype)
    return pd.BayesianNet(net, likelihood=pd.Categorical()), x, (x[:, 0] > 0).long()


def flat(posterior: Any) -> Tensor:
    return torch.cat([value.flatten() for value in posterior.mean().values()])


def untrained(*args: Any, **kwargs: Any) -> pd.guides.AutoLaplace:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(the point of )?this Laplace|held-out data find")
        return pd.laplace(*args, **kwargs)


def dense(guide: pd.guides.AutoLaplace) -> tuple[Tensor, Tensor]:
    """Return the mean and the covariance of all random sites, in the guide's order, from the curvature alone."""
    names = [name for block in guide.curvature for name in block.shapes]
    names = [name for name in guide.mean() if name in names]
    at = dict(zip(names, torch.eye(sum(guide.mean()[n].numel() for n in names), dtype=F64).split(
        [guide.mean()[n].numel() for n in names]
    ), strict=True))  # fmt: skip
    whole = torch.zeros(len(next(iter(at.values())).mT), len(next(iter(at.values())).mT), dtype=F64)
    for block in guide.curvature:
        rows = {name: at[name].mT.reshape(-1, *shape) for name, shape in block.shapes.items()}
        flat = block.flat(rows)
        if hasattr(block, "hessian"):
            own = block.hessian + torch.diag(block.prior)
        elif hasattr(block, "diagonal"):
            own = torch.diag(block.diagonal + block.prior)
        else:
            eye = torch.eye(len(block.outputs), dtype=F64)
            own = torch.kron(block.outputs, block.inputs) + torch.kron(eye, torch.diag(block.prior))
        whole += flat @ own @ flat.mT
    mean = torch.cat([guide.mean()[name].flatten().to(F64) for name in names])
    return mean, torch.linalg.inv(whole)


def test_it_is_the_exact_posterior_of_a_linear_model() -> None:
    model, x, y = linear_problem()
    exact = pd.references.conjugate(model, x, y)
    for structure in ("full", "layer", "last"):
        guide = pd.laplace(model, exact, x, y, structure=structure)
        mean, covariance = dense(guide)
        torch.testing.assert_close(mean, flat(exact), rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(covariance, exact.covariance, rtol=1e-10, atol=1e-12)
        assert guide.log_evidence().item() == pytest.approx(exact.log_evidence, rel=1e-10)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_finished_guide_is_the_gaussian_that_its_curvature_says(structure: Any) -> None:
    """Densities of whole draws, the KL, marginals and roots are those of one dense Gaussian."""
    model, x, y = network_problem()
    guide = untrained(model, model, x, y, structure=structure)
    mean, covariance = dense(guide)
    oracle = MultivariateNormal(mean, covariance)
    random = [name for block in guide.curvature for name in block.shapes]
    random = [name for name in guide.mean() if name in random]
    trace = poutine.trace(guide).get_trace(x, y)
    trace.compute_log_prob()
    draw = torch.cat([trace.nodes[name]["value"].flatten() for name in random])
    total = sum(trace.nodes[name]["log_prob_sum"] for name in random)
    torch.testing.assert_close(total, oracle.log_prob(draw), rtol=1e-9, atol=1e-9)
    scale = torch.cat([model.prior_of(name).stddev.flatten() for name in random])
    expected = kl_divergence(oracle, MultivariateNormal(torch.zeros_like(mean), torch.diag(scale.square())))
    points = [name for name in guide.mean() if name not in random]
    for name in points:
        expected = expected + 0.5 * (guide.mean()[name] / model.prior_of(name).stddev).square().sum()
    parts = pd.ELBO(per_example=False).parts(model, guide, x, y)
    assert parts["kl"].item() == pytest.approx(expected.item(), rel=1e-9)
    rows = {name: torch.randn(4, *guide.mean()[name].shape, dtype=F64) for name in guide.mean()}
    root = guide.covariance_root(rows)
    whole = torch.cat([rows[name].flatten(1) for name in random], -1)
    torch.testing.assert_close(root @ root.mT, whole @ covariance @ whole.mT, rtol=1e-9, atol=1e-12)
    start = 0
    for name in random:
        q, size = guide.posterior(name), guide.mean()[name].numel()
        part = slice(start, start + size)
        own = MultivariateNormal(mean[part], covariance[part, part])
        w = own.sample()
        torch.testing.assert_close(q.variance.flatten(), own.variance, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(q.log_prob(w.reshape(q.event_shape)), own.log_prob(w), rtol=1e-9, atol=1e-9)
        start += size
    drawn = torch.cat([value.flatten(1) for name, value in guide.sample_weights(20_000).items() if name in random], -1)
    # 20,000 draws: an entry is within 6 standard errors of at most √2 σσ'/√n, but once in a million runs.
    sizes = covariance.diagonal().sqrt()
    assert ((drawn.mT.cov() - covariance).abs() / (sizes[:, None] * sizes)).max() < 6 * (2 / 20_000) ** 0.5
    prediction = pd.predict(model, guide, x, samples=16, seed=0)
    assert bool(torch.isfinite(prediction.log_prob(y)).all())


@pytest.mark.parametrize("structure", STRUCTURES)
def test_it_is_saved_and_copied_with_its_curvature(structure: Any, tmp_path: Path) -> None:
    model, x, y = network_problem(torch.float32)
    guide = untrained(model, model, x, y, structure=structure)
    pd.save(tmp_path / "posterior.safetensors", model, guide)
    fresh = pd.guides.AutoLaplace(model, structure)
    pd.load(tmp_path / "posterior.safetensors", model, fresh)
    for other in (fresh, copy.deepcopy(guide)):
        found = []
        for each in (guide, other):
            pyro.set_rng_seed(0)
            found.append(each.sample_weights(3))
        assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
        assert torch.equal(other.curvature.log_likelihood, guide.curvature.log_likelihood)
    points = pd.guides.AutoLaplace(model, structure)
    pd.save(tmp_path / "points.safetensors", model, points)
    pd.load(tmp_path / "points.safetensors", model, fresh)
    assert not fresh.finished
    other = "diagonal" if structure != "diagonal" else "full"
    wrong = untrained(model, model, x, y, structure=other)
    before, curvature = wrong.sample_weights, wrong.curvature
    with pytest.raises(pd.errors.DifferentModelError):
        pd.load(tmp_path / "posterior.safetensors", model, wrong)
    with pytest.raises(RuntimeError, match="measured"):
        wrong.load_state_dict(guide.state_dict())
    assert wrong.curvature is curvature, "what does not fit changes nothing"
    assert before(2).keys() == found[0].keys()


def test_raw_data_and_standardised_data_have_the_same_posterior() -> None:
    """The log-likelihood is that of the raw targets: it differs by N Σ log σ_y."""
    x, y = 1960 + 30 * torch.rand(20, 1, dtype=F64), 300 + 9 * torch.randn(20, 2, dtype=F64)
    for likelihood, outputs in ((pd.Gaussian(tau=4.0), 2), (pd.HeteroscedasticGaussian(), 4)):
        net = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, outputs)).to(F64)
        inner = pd.BayesianNet(net, likelihood=likelihood)
        model = pd.Standardised(inner, x, y)
        for structure in ("full", "last", "kron"):
            raw = untrained(model, model, x, y, structure=structure)
            own = untrained(inner, net, model.standard_x(x), model.standard_y(y), structure=structure)
            torch.testing.assert_close(dense(raw)[1], dense(own)[1], rtol=1e-8, atol=1e-12)
            shift = 20 * model.y_std.log().sum()
            torch.testing.assert_close(raw.curvature.log_likelihood + shift, own.curvature.log_likelihood)


def test_batches_of_a_loader_and_a_number_of_data() -> None:
    model, x, y = network_problem()
    whole = untrained(model, model, x, y, structure="full")
    loader = DataLoader(TensorDataset(x, y), batch_size=7)
    for structure in STRUCTURES:
        one = untrained(model, model, x, y, structure=structure)
        many = untrained(model, model, loader, structure=structure, batch_size=3)
        for a, b in zip(one.curvature.buffers(), many.curvature.buffers(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    part = DataLoader(TensorDataset(x, y), batch_size=20, drop_last=True)  # an epoch has 20 of 30 points
    most = untrained(model, model, x[:20], y[:20], structure="full", num_data=30)
    left = untrained(model, model, part, structure="full")
    torch.testing.assert_close(next(iter(left.curvature)).hessian, next(iter(most.curvature)).hessian)
    scaled = untrained(model, model, x, y, structure="full", num_data=300)
    torch.testing.assert_close(next(iter(scaled.curvature)).hessian, 10 * next(iter(whole.curvature)).hessian)
    torch.testing.assert_close(scaled.curvature.log_likelihood, 10 * whole.curvature.log_likelihood)
    assert scaled.curvature.num_data == 300


def test_a_point_that_is_not_trained_is_warned_of_with_a_number() -> None:
    model, x, y = linear_problem()
    exact = pd.references.conjugate(model, x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for structure in ("full", "kron", "last", "layer"):
            pd.laplace(model, exact, x, y, structure=structure)
    # One posterior standard deviation in one direction is half a nat; three of them are 4.5.
    off = flat(exact) + 3 * exact.covariance[:, 0] / exact.covariance[0, 0].sqrt()
    shapes = {"weight": (2, 3), "bias": (2,)}
    parts = {name: part.reshape(shapes[name]) for name, part in zip(exact.mean(), off.split([6, 2]), strict=True)}
    with pytest.warns(UserWarning, match=r"1.1 posterior standard deviations .* by about 4.5"):
        pd.laplace(model, parts, x, y, structure="full")


def test_fitting_trains_the_point_and_adds_the_curvature() -> None:
    model, x, y = linear_problem()
    exact = pd.references.conjugate(model, x, y)
    guide = pd.guides.AutoLaplace(model)
    quiet: dict[str, Any] = {"compile": False, "progress": False, "seed": 0, "lr": 0.1, "steps": 200}
    pd.fit(model, guide, x, y, schedule=pd.training.inverse_decay(), **quiet)
    torch.testing.assert_close(dense(guide)[0], flat(exact), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(dense(guide)[1], exact.covariance, rtol=1e-10, atol=1e-12)
    before = guide.curvature.log_likelihood.item()
    pd.fit(
        model, guide, x, 2 * y, schedule=pd.training.inverse_decay(), **quiet
    )  # from points again, and with new curvature
    assert guide.curvature.log_likelihood.item() != before
    torch.testing.assert_close(dense(guide)[0], 2 * flat(exact), rtol=1e-2, atol=1e-2)
    loader = DataLoader(TensorDataset(x, y), batch_size=6, shuffle=True)
    pd.fit(model, guide, loader, **quiet)
    assert guide.curvature.num_data == 12


def layers(read: Any, tied: bool = False) -> nn.Module:
    """Two layers, and what is made of them."""
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    if tied:
        second.weight = first.weight
    return Parts(read, layer=first, out=second)


def tied() -> nn.Module:
    return layers(lambda net, x: net.out(torch.tanh(net.layer(x))), tied=True)


def together() -> nn.Module:
    """The output at a point depends on the others."""
    return layers(lambda net, x: net.out(net.layer(x - x.mean(0))))


def attended() -> nn.Module:
    """Attention, whose projections are no modules that run."""
    attention = nn.MultiheadAttention(2, 1, batch_first=True)
    return Output(attention, lambda net, x: net(x[:, None], x[:, None], x[:, None])[0].squeeze(1))


def classifier(net: nn.Module, **options: Any) -> pd.BayesianNet:
    return pd.BayesianNet(net, likelihood=pd.Categorical(), **options)


X, Y = torch.randn(6, 2), torch.arange(6) % 2


@pytest.mark.parametrize(
    ("net", "match"),
    [
        (layers(lambda net, x: net.out(net.layer(torch.tanh(net.layer(x))))), "'layer' runs 2 times"),
        (layers(lambda net, x: net.out(net.layer(x)) + x @ net.layer.weight), "'layer' is not one"),
        (tied(), "weight is shared"),
        (nn.Sequential(nn.Unflatten(1, (2, 1)), nn.Conv1d(2, 2, 1, groups=2), nn.Flatten()), "groups=2"),
        (attended(), "MultiheadAttention"),
        (nn.Embedding(2, 2), "Embedding"),
    ],
)  # fmt: skip
def test_kron_refuses_layers_that_it_does_not_describe(net: nn.Module, match: str) -> None:
    x = torch.arange(6).remainder(2) if isinstance(net, nn.Embedding) else X
    with pytest.raises(pd.errors.PyroDropoutError, match=match):
        pd.laplace(classifier(net), net, x, Y, structure="kron")


def shaken() -> nn.Module:
    """Random, and nobody can know."""
    return layers(lambda net, x: net.out(net.layer(input=nn.functional.dropout(x, 0.5, training=True))))


@pytest.mark.parametrize(
    ("net", "match"), [(together, "changes with the point beside it"), (shaken, "draws random numbers")]
)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_network_whose_outputs_are_not_its_own_is_refused(structure: Any, net: Any, match: str) -> None:
    with pytest.raises(pd.errors.PyroDropoutError, match=match):
        pd.laplace(classifier(net()), net(), X, Y, structure=structure)


def test_a_network_that_takes_all_points_at_once() -> None:
    """The Jacobian of all outputs in the weights, row by row, is that of an equal network of centred inputs."""
    net, plain = together().to(F64), layers(lambda net, x: net.out(net.layer(x))).to(F64)
    plain.load_state_dict(net.state_dict())
    x = X.to(F64)
    whole = untrained(classifier(net, whole_batch=True), net, x, Y, structure="full")
    apart = untrained(classifier(plain), plain, x - x.mean(0), Y, structure="full")
    torch.testing.assert_close(dense(whole)[1], dense(apart)[1], rtol=1e-9, atol=1e-12)
    with pytest.raises(pd.errors.PyroDropoutError, match="takes all points at once"):
        pd.laplace(classifier(net, whole_batch=True), net, x, Y, structure="kron")


def test_shared_weights_have_the_slopes_of_all_their_uses() -> None:
    """A tied weight is one site: the oracle is the Jacobian by autograd of the whole network."""
    net = tied().to(F64)
    x = X.to(F64)
    guide = untrained(classifier(net), net, x, Y, structure="full")
    parameters = [net.get_parameter(name) for name in guide.mean()]
    f = net(x)
    slopes = (torch.autograd.grad(each, parameters, retain_graph=True) for each in f.flatten())
    rows = torch.stack([torch.cat([g.flatten() for g in row]) for row in slopes]).reshape(6, 2, -1)
    p = f.softmax(-1).detach()
    bend = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    expected = torch.einsum("ndp,nde,neq->pq", rows, bend, rows)
    torch.testing.assert_close(next(iter(guide.curvature)).hessian, expected, rtol=1e-9, atol=1e-12)
    (last,) = untrained(classifier(net), net, x, Y, structure="last").curvature  # not W φ + b: W is in φ too
    assert list(last.shapes) == ["layer.weight", "out.bias"]
    own = [0, 1, 2, 3, 6, 7]
    torch.testing.assert_close(last.hessian, expected[own][:, own], rtol=1e-9, atol=1e-12)


def test_running_statistics_and_dropout_are_those_of_evaluation() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Tanh(), nn.Linear(3, 2)).to(F64)
    x = X.to(F64)
    net(x)
    model = classifier(net)
    found = {}
    for mode in (True, False):
        net.train(mode)
        statistics = {name: value.clone() for name, value in net.named_buffers()}
        for structure in STRUCTURES:
            found[mode, structure] = untrained(model, net, x, Y, structure=structure)
        assert net.training is mode
        assert all(torch.equal(value, statistics[name]) for name, value in net.named_buffers())
    for structure in STRUCTURES:
        ours, theirs = (dense(found[mode, structure])[1] for mode in (True, False))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_an_ill_conditioned_precision_is_factorised_in_float64() -> None:
    """Two inputs that are almost the same, in float32: the difference is known by the prior alone."""
    x = torch.randn(50, 1).expand(50, 2) + 1e-6 * torch.randn(50, 2)
    net = nn.Linear(2, 1, bias=False)
    model = pd.BayesianNet(net, pd.Prior(), pd.Gaussian(tau=1e6))
    guide = untrained(model, net, x, x[:, :1], structure="full")
    assert guide.posterior("weight").loc.dtype == torch.float32
    apart = torch.tensor([[[1.0, -1.0]]]) / 2**0.5
    assert guide.covariance_root({"weight": apart}).square().sum().item() == pytest.approx(1.0, rel=0.02)


def test_large_layers_need_another_structure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LARGEST", 5)
    with pytest.raises(pd.errors.PyroDropoutError, match="matrix over 6 weights"):
        pd.laplace(classifier(nn.Linear(2, 2)), nn.Linear(2, 2), X, Y, structure="full")
    monkeypatch.setattr("pyro_dropout.guides.laplace.MOST", 5)
    (block,) = untrained(classifier(net := nn.Linear(2, 2)), net, X, Y, structure="last").curvature
    assert hasattr(block, "outputs"), "a large last layer has Kronecker factors"
