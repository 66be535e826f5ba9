"""The references that ship with the benchmark: good enough, of these data, and right where the answer is known."""

import importlib
import math
from importlib.metadata import EntryPoint
from pathlib import Path

import benchmark_references
import numpy as np
import pytest
import torch
from pyro import poutine
from pyro.poutine.subsample_messenger import _Subsample
from torch import Tensor

import pyro_dropout as pdrop
from pyro_dropout import registry
from pyro_dropout.benchmark import Problem, Reference, problems
from pyro_dropout.benchmark.reference import load_reference
from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.training.checkpoints.tensor_file import read_tensors, write_tensors

problems_by_name = importlib.import_module("pyro_dropout.benchmark.problems")
KNOWN = problems("full")
EXACT = [name for name, each in KNOWN.items() if each.exact]


@pytest.fixture(params=KNOWN)
def problem(request: pytest.FixtureRequest) -> Problem:
    return KNOWN[request.param]


def test_a_reference_meets_its_criteria_and_is_of_the_data_that_the_code_makes(problem: Problem) -> None:
    reference = load_reference(problem.path, problem.data)
    assert reference.rhat <= 1.01
    assert reference.ess >= 4_000
    assert set(reference.data) == set(problem.data)
    assert {"seed", "seconds", "torch", "pyro-dropout"} <= set(reference.made_with)
    assert bool(reference.moments) == problem.identified


def test_a_reference_has_draws_of_what_the_problem_asks(problem: Problem) -> None:
    reference, model = problem.reference, problem.make(0)
    for draws, mean, std in (
        (reference.draws, reference.mean, reference.std),
        (reference.half_draws, reference.half_mean, reference.half_std),
    ):
        assert 200 <= len(draws) <= 400
        # 200 draws of each of a hundred quantities, nearly independent: fails for one in 10,000 at 6 standard errors.
        assert ((draws.mean(0) - mean).abs() <= 6 * std / len(draws) ** 0.5 + 1e-6).all()
    sites = {name: mean.expand(3, *mean.shape) for name, (mean, _) in reference.moments.items()}
    if sites:
        assert problem.quantities(model, sites).shape[1:] == reference.mean.shape
    if problem.x_test is not None:
        assert len(problem.x_test) == len(reference.mean) == len(problem.held_out_rows)
    if problem.labels:
        assert len(problem.labels) == len(reference.mean)


@pytest.mark.parametrize("name", problems("full", unreferenced=True))
def test_quantities_of_draws_are_those_of_each_draw(name: str) -> None:
    """Before anybody samples for an hour: draws of the prior, all at once and one by one."""
    problem = problems("full", unreferenced=True)[name]
    model = problem.make(0)
    traces = [poutine.trace(model).get_trace(*problem.arguments) for _ in range(3)]
    sites = [site for site in traces[0].stochastic_nodes if type(traces[0].nodes[site]["fn"]) is not _Subsample]
    draws = [{site: trace.nodes[site]["value"].detach()[None] for site in sites} for trace in traces]
    found = problem.quantities(model, {site: torch.cat([draw[site] for draw in draws]) for site in sites})
    each = torch.cat([problem.quantities(model, draw) for draw in draws])
    assert torch.allclose(found, each, atol=1e-5)
    if problem.kind == "classes":
        assert torch.allclose(found.sum(-1), torch.ones(()))


def test_the_files_are_small() -> None:
    folder = Path(pdrop.benchmark.__file__).parent / "data"
    assert sum(path.stat().st_size for path in folder.iterdir()) < 400_000


@pytest.mark.parametrize("name", EXACT)
def test_an_exact_reference_is_that_of_the_normal_equations(name: str) -> None:
    """In numpy's way: mean and covariance of the weights from XᵀX, without the library's posterior."""
    problem = KNOWN[name]
    model, (x, y) = problem.make(0), problem.arguments
    zero = {site: torch.zeros(*model.prior_of(site).event_shape) for site in model.sites}

    def design(at: Tensor) -> Tensor:
        """The change of f with each weight, (N, d)."""
        columns = []
        for site, value in zero.items():
            for k in range(value.numel()):
                one = torch.zeros(value.numel())
                one[k] = 1.0
                columns.append(model.evaluate(zero | {site: one.reshape(value.shape)}, at).double())
        return torch.cat(columns, -1)

    widths = torch.cat([model.prior_of(site).stddev.flatten() for site in zero]).double()
    seen, asked, tau = design(x), design(problem.x_test), float(model.likelihood.tau)
    covariance = torch.linalg.inv(tau * seen.T @ seen + torch.diag(widths**-2))
    mean = asked @ (covariance @ (tau * seen.T @ y[:, 0].double()))
    std = (asked @ covariance @ asked.T).diagonal().sqrt()
    assert torch.allclose(problem.reference.mean.double(), mean, rtol=1e-3, atol=1e-4)
    assert torch.allclose(problem.reference.std.double(), std, rtol=1e-3, atol=1e-5)


# --- published posteriors ---------------------------------------------------------------------------------------------

# posteriordb, https://github.com/stan-dev/posteriordb: E[θ] and E[θ²] of eight_schools-eight_schools_noncentered (the
# second of ..._centered, the same posterior) and of mesquite-logmesquite_logvas, each with its Monte Carlo error.
PUBLISHED = {
    "eight-schools": (
        [6.1505, 4.9396, 3.9059, 4.7960, 3.6144, 4.0511, 6.3172, 4.8840, 4.4105, 3.6021],
        [0.0557, 0.0462, 0.0542, 0.0475, 0.0461, 0.0485, 0.0499, 0.0543, 0.0330, 0.0319],
        [69.363, 45.979, 43.139, 45.761, 34.358, 39.413, 64.933, 52.128, 30.403, 23.204],
        [1.1692, 0.6346, 0.6539, 0.6194, 0.4550, 0.5390, 0.9216, 0.9025, 0.3351, 0.4849],
    ),
    "mesquite": (
        [5.35152, 0.37589, 0.39744, -0.37489, 0.38936, 0.11004, -0.58471, 0.34076],
        [0.00178, 0.00291, 0.00303, 0.00244, 0.00329, 0.00126, 0.00134, 0.00041],
        [28.67027, 0.22537, 0.24967, 0.19833, 0.25989, 0.02803, 0.35963, 0.11774],
        [0.01916, 0.00254, 0.00276, 0.00206, 0.00302, 0.00036, 0.00159, 0.00029],
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_reference_has_the_published_moments(name: str) -> None:
    """At five standard errors of both runs: 36 numbers fail once in 50,000 on correct code."""
    reference = KNOWN[name].reference
    mean, mean_error, square, square_error = (torch.tensor(each) for each in PUBLISHED[name])
    own = reference.std / reference.ess**0.5
    assert ((reference.mean - mean).abs() <= 5 * (own**2 + mean_error**2).sqrt()).all()
    # Of x², whose standard deviation is about that of a Gaussian's; twice as large for a heavy tail.
    own = 2 * (2 * reference.std**4 + 4 * mean**2 * reference.std**2).sqrt() / reference.ess**0.5
    ours = reference.mean**2 + reference.std**2
    assert ((ours - square).abs() <= 5 * (own**2 + square_error**2).sqrt()).all()


# --- hierarchies by quadrature ----------------------------------------------------------------------------------------


def moments(log_density: Tensor, *values: Tensor) -> list[tuple[float, float]]:
    """Mean and standard deviation of values under an unnormalised density on a grid."""
    weight = (log_density - log_density.max()).exp()
    weight = weight / weight.sum()
    means = [(weight * value).sum() for value in values]
    pairs = zip(values, means, strict=True)
    return [(float(mean), float((weight * (value - mean) ** 2).sum().sqrt())) for value, mean in pairs]


def check_moments(name: str, found: dict[str, tuple[float, float]]) -> None:
    """At five standard errors: four numbers fail once in 400,000; twice the Gaussian's error for heavy tails."""
    problem = KNOWN[name]
    for label, (mean, std) in found.items():
        k, error = problem.labels.index(label), problem.reference.ess**-0.5
        assert abs(problem.reference.mean[k].item() - mean) <= 5 * error * std + 1e-3
        assert abs(problem.reference.std[k].item() / std - 1) <= 10 * error


def test_eight_schools_are_those_of_a_grid() -> None:
    """Given mu and tau the effects are Gaussian, so that y has variance sigma² + tau²."""
    y, sigma = (part.double() for part in KNOWN["eight-schools"].arguments)
    # tau = tan of a uniform angle, so that a half-Cauchy's tail is on the grid.
    mu = torch.linspace(-25.0, 30.0, 400, dtype=torch.float64)[:, None]
    tau = 5 * torch.tan(torch.linspace(0.0, 1.0, 2_002, dtype=torch.float64)[1:-1] * math.pi / 2)
    marginal = torch.distributions.Normal(mu[..., None], (sigma**2 + tau[:, None] ** 2).sqrt())
    log_density = marginal.log_prob(y).sum(-1) - 0.5 * (mu / 5) ** 2
    found = moments(log_density, mu.expand_as(log_density), tau.expand_as(log_density))
    check_moments("eight-schools", dict(zip(("mu", "tau"), found, strict=True)))


def test_counts_are_those_of_a_grid() -> None:
    """Given mu and the width, the rates are independent, and each is a Gauss-Hermite sum."""
    exposure, y = (part.double() for part in KNOWN["counts"].arguments)
    nodes, weights = (torch.from_numpy(each) for each in np.polynomial.hermite_e.hermegauss(60))
    mu = torch.linspace(-3.0, 3.0, 150, dtype=torch.float64)[:, None, None, None]
    spread = torch.linspace(0.0, 4.0, 150, dtype=torch.float64)[:, None, None]
    log_rate = mu + spread * nodes
    log_p = y[:, None] * (log_rate + exposure[:, None].log()) - exposure[:, None] * log_rate.exp()
    log_density = (log_p + weights.log()).logsumexp(-1).sum(-1) - 0.5 * ((mu / 2) ** 2 + spread**2)[..., 0, 0]
    found = moments(log_density, mu[..., 0, 0].expand_as(log_density), spread[..., 0, 0].expand_as(log_density))
    check_moments("counts", dict(zip(("mu", "spread"), found, strict=True)))


# --- what is refused --------------------------------------------------------------------------------------------------


def chains(shift: float = 0.0, draws: int = 2_000) -> Tensor:
    dice = torch.Generator().manual_seed(0)
    return torch.randn(4, draws, 2, generator=dice) + shift * torch.arange(4).reshape(4, 1, 1)


@pytest.mark.parametrize(("values", "words"), [(chains(0.3), "R-hat is"), (chains(draws=400), "sample size is")])
def test_a_reference_that_is_not_good_enough_is_neither_written_nor_read(
    values: Tensor, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, reference = tmp_path / "bad.safetensors", Reference.of(values, "4 chains")
    with pytest.raises(PyroDropoutError, match=words):
        reference.save(path)
    assert not path.exists()
    with monkeypatch.context() as patched:
        patched.setattr(Reference, "doubts", lambda self: [])
        reference.save(path)
    with pytest.raises(PyroDropoutError, match=f"bad.safetensors cannot be used: its .*{words}"):
        load_reference(path)


def test_a_reference_of_other_data_is_refused(tmp_path: Path) -> None:
    data = {"x": torch.ones(3)}
    Reference.of(chains(), "4 chains", data=data).save(tmp_path / "r.safetensors")
    assert load_reference(tmp_path / "r.safetensors", data).how == "4 chains"
    with pytest.raises(PyroDropoutError, match="it is of other data: x differs"):
        load_reference(tmp_path / "r.safetensors", {"x": torch.zeros(3)})


def test_a_problem_without_a_reference_is_left_out_and_listed() -> None:
    missing = pdrop.benchmark.missing_references()
    everything = problems("full", unreferenced=True)
    assert set(everything) == set(missing) | set(KNOWN)
    assert set(problems("small")) <= set(KNOWN)
    for name, command in missing.items():
        assert command == f"python models/benchmark_references.py {name} --device cuda"
        with pytest.raises(PyroDropoutError, match=f"{name!r} has no reference yet; make it with: python"):
            everything[name].reference  # noqa: B018


def test_draws_in_256_levels_are_those_of_the_chains(tmp_path: Path) -> None:
    reference = Reference.of(100.0 + 1e-3 * chains().double(), "4 chains")
    reference.save(tmp_path / "r.safetensors")
    read = load_reference(tmp_path / "r.safetensors")
    assert torch.allclose((read.draws - reference.draws) / reference.std, torch.zeros(()), atol=2e-2)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    write_tensors(tmp_path / "r.safetensors", {"mean": torch.zeros(3)}, {})
    with pytest.raises(PyroDropoutError, match=r"r\.safetensors is no reference that this version reads"):
        load_reference(tmp_path / "r.safetensors")


def test_the_last_class_is_one_minus_the_others(tmp_path: Path) -> None:
    logits = torch.stack([chains(), 0.5 * chains(), -chains()], -1)
    reference = Reference.of(logits.softmax(-1), "4 chains")
    reference.save(tmp_path / "r.safetensors")
    read = load_reference(tmp_path / "r.safetensors")
    assert read_tensors(tmp_path / "r.safetensors")[0]["draws"].shape == (*reference.draws.shape[:2], 2)
    torch.testing.assert_close(read.draws, reference.draws, atol=1 / 255, rtol=0)


SLOPE = """
from pathlib import Path

import torch
from torch import nn

import pyro_dropout as pdrop
from pyro_dropout.benchmark import problem


@problem("slope", title="A slope", about="One weight.", kind="parameters", exact=True, folder=Path(__file__).parent)
def slope():
    def asked(model, weights):
        return weights["weight"].flatten(1)

    data = torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0], [1.0]])
    make = lambda seed: pdrop.BayesianNet(nn.Linear(1, 1, bias=False), pdrop.Prior(), pdrop.Gaussian(2.0))
    return {"make": make, "arguments": data, "quantities": asked, "labels": ("slope",)}
"""


def test_another_package_registers_a_problem_whose_reference_the_script_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slope_of_another_package.py").write_text(SLOPE)
    monkeypatch.syspath_prepend(tmp_path)
    point = EntryPoint("slope", "slope_of_another_package", "pyro_dropout.problems")
    monkeypatch.setattr(registry, "_other_packages", lambda kind: (point,) if kind == "problems" else ())
    monkeypatch.setattr(problems_by_name, "_PROBLEMS", dict(problems_by_name._PROBLEMS))
    assert "slope" in pdrop.benchmark.missing_references()
    benchmark_references.main(["slope", "--samples", "4000", "--device", "cpu", "--out", str(tmp_path / "out")])
    reference = problems()["slope"].reference
    # Precision 1 + 2 (1 + 4) = 11, mean 2 (1 + 2) / 11.
    assert reference.mean.item() == pytest.approx(6 / 11, abs=1e-5)
    assert reference.std.item() == pytest.approx(11**-0.5, abs=1e-5)
    (tmp_path / "slope.safetensors").write_bytes(b"")
    with pytest.raises(PyroDropoutError, match=r"slope.safetensors cannot be used"):
        problems()["slope"].reference  # noqa: B018


def test_two_problems_of_one_name_are_refused() -> None:
    with pytest.raises(PyroDropoutError, match="a problem named 'gap' is registered already: gap"):
        pdrop.benchmark.problem("gap", title="", about="", kind="numbers")(dict)
    with pytest.raises(PyroDropoutError, match="kind must be"):
        pdrop.benchmark.problem("new", title="", about="", kind="colours")  # type: ignore[arg-type]
