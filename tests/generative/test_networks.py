"""Any module as a model: against the same module with the same weights loaded into it."""

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import pyro
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pyro import poutine
from pyro.infer import SVI, Predictive
from pyro.optim import Adam
from torch import Tensor, nn

from pyro_dropout import (
    ELBO,
    AutoDropout,
    AutoMeanField,
    BayesianNet,
    Categorical,
    Gaussian,
    Prior,
    PyroDropoutError,
    RangeError,
    ShapeError,
)
from tests.contracts.models import CLASSES, KINDS, Problem, Residual, Tied, mlp
from tests.oracles.both_types import digits, dtypes

F64 = torch.float64
seeds = st.integers(0, 2**31)
# The kinds of model that are modules with a likelihood on top.
NETS = [kind for kind in KINDS if kind not in ("gp", "deep-gp", "plain", "noisy")]


class Scaled(nn.Module):
    """A network with a parameter of no dimension, which sample dimensions in front make easy to get wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.size, self.cell = nn.Linear(2, 3), nn.Parameter(torch.tensor(2.0)), nn.GRUCell(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(self.first(x) * self.size)


def prior_draws(model: BayesianNet, *batch: int) -> dict[str, Tensor]:
    return {name: model.prior_of(name).sample(batch) for name in model.sites}


def loaded(net: nn.Module, weights: dict[str, Tensor]) -> nn.Module:
    """A copy of the plain network with the weights in it."""
    plain = copy.deepcopy(net).requires_grad_(False)  # attention takes another kernel where it needs a gradient
    _missing, unexpected = plain.load_state_dict(weights, strict=False)
    assert not unexpected
    return plain


# --- which sites there are ------------------------------------------------------------------------------------------


SITES = {
    "mlp": ["0.weight", "0.bias", "2.weight", "2.bias"],
    "residual": ["first.weight", "first.bias", "second.weight", "out.weight", "out.bias"],
    "gru": [
        *(f"layer.{part}_l0" for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")),
        "out.weight",
        "out.bias",
    ],
    "tied": ["embedding.weight", "decoder.bias"],
    "transformer": [
        *("encoder.self_attn.in_proj_weight", "encoder.self_attn.in_proj_bias"),
        *("encoder.self_attn.out_proj.weight", "encoder.self_attn.out_proj.bias"),
        *("encoder.linear1.weight", "encoder.linear1.bias", "encoder.linear2.weight", "encoder.linear2.bias"),
        *("out.weight", "out.bias"),
    ],
}


@pytest.mark.parametrize("kind", SITES)
def test_sites_are_the_parameters_that_are_not_hidden(kind: str) -> None:
    problem = KINDS[kind](torch.float32)
    trace = poutine.trace(problem.model).get_trace(problem.x, problem.y)
    assert [name for name in trace.stochastic_nodes if name != "data"] == SITES[kind]
    hidden = set(problem.model.hidden_parameters())
    assert hidden | set(SITES[kind]) == {name for name, _ in problem.model.net.named_parameters()}
    assert all("norm" in name for name in hidden)


@pytest.mark.parametrize("kind", NETS)
def test_sites_are_named_as_in_the_state_dict(kind: str) -> None:
    problem = KINDS[kind](torch.float32)
    shapes = {name: value.shape for name, value in problem.model.net.state_dict().items()}
    draws = prior_draws(problem.model)
    assert {name: value.shape for name, value in draws.items()}.items() <= shapes.items()


def test_a_tied_parameter_is_one_site_for_both_layers() -> None:
    model = BayesianNet(Tied(), likelihood=Categorical())
    assert model.sites["embedding.weight"].uses == 2
    weights = prior_draws(model)
    f = model.evaluate(weights, torch.tensor([[0, 0]]))
    matrix = weights["embedding.weight"]
    assert torch.allclose(f, torch.tanh(matrix[:1]) @ matrix.T + weights["decoder.bias"])


def test_hide_chooses_which_parameters_stay_ordinary() -> None:
    model = BayesianNet(mlp(), Prior(hide=lambda name, module: name.startswith("0.")))
    assert list(model.sites) == ["2.weight", "2.bias"]
    assert list(model.hidden_parameters()) == ["0.weight", "0.bias"]
    everything = BayesianNet(Residual(), Prior(hide=lambda name, module: False), Categorical())
    assert not everything.hidden_parameters()


# --- what it computes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", NETS)
def test_given_weights_it_is_the_plain_network(kind: str, training: bool, dtype: torch.dtype) -> None:
    problem = KINDS[kind](dtype)
    problem.model.train(training)
    weights = prior_draws(problem.model)
    plain = loaded(problem.model.net, weights)
    f = poutine.condition(problem.model, weights)(problem.x)
    assert torch.equal(f, plain(problem.x))


@pytest.mark.parametrize("batch", [(3,), (3, 1), (2, 3, 1), (1,), (1, 1)])
@pytest.mark.parametrize("kind", [*NETS, "scaled"])
def test_sample_dimensions_are_a_loop_over_samples(kind: str, batch: tuple[int, ...]) -> None:
    """Batches as Predictive makes them, (S,), and as a plate of particles does, with a place for the data."""
    if kind == "scaled":
        problem = Problem(BayesianNet(Scaled()).to(F64), torch.randn(4, 2, dtype=F64), torch.zeros(4, 3, dtype=F64), 6)
    else:
        problem = KINDS[kind](F64)
    problem.model.eval()
    weights = prior_draws(problem.model, *batch)
    if kind == "scaled" and batch[-1] != 1:
        weights["size"] = weights["size"].unsqueeze(-1)  # where Predictive puts a scalar
    f = problem.model.evaluate(weights, problem.x)
    samples = batch[:-1] if batch[-1] == 1 else batch
    assert f.shape[:-2] == samples
    flat = {n: v.reshape(-1, *problem.model.net.get_parameter(n).shape) for n, v in weights.items()}
    each = [loaded(problem.model.net, {n: v[s] for n, v in flat.items()})(problem.x) for s in range(math.prod(batch))]
    assert torch.allclose(f.reshape(len(each), *f.shape[-2:]), torch.stack(each), rtol=1e-12, atol=1e-14)


@given(seeds, st.integers(1, 5), st.integers(1, 5), st.lists(st.integers(1, 4), max_size=3), dtypes)
def test_any_number_of_draws_layers_and_points(
    seed: int, samples: int, points: int, widths: list[int], dtype: torch.dtype
) -> None:
    torch.manual_seed(seed)
    sizes = [2, *widths, 3]
    net = nn.Sequential(*(m for a, b in itertools.pairwise(sizes) for m in (nn.Linear(a, b), nn.Tanh())))
    model = BayesianNet(net).to(dtype)
    weights, x = prior_draws(model, samples), torch.randn(points, 2, dtype=dtype)
    each = [loaded(model.net, {n: v[s] for n, v in weights.items()})(x) for s in range(samples)]
    f = model.evaluate(weights, x).reshape(samples, points, 3)
    rtol, atol = digits(dtype, 1e-12), digits(dtype, 1e-14, 1e-6)
    assert torch.allclose(f, torch.stack(each), rtol=rtol, atol=atol)


@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize("kind", NETS)
def test_predictive_runs_posterior_samples_side_by_side(kind: str, samples: int) -> None:
    problem = KINDS[kind](F64)
    weights = prior_draws(problem.model.eval(), samples)
    predict = Predictive(problem.model, weights, parallel=True, return_sites=["_RETURN", "y"])
    found, each = predict(problem.x), []
    for s in range(samples):
        each.append(loaded(problem.model.net, {n: v[s] for n, v in weights.items()})(problem.x))
    assert torch.allclose(found["_RETURN"].reshape(samples, *each[0].shape), torch.stack(each), rtol=1e-12, atol=1e-14)
    assert found["y"].shape == (samples, *problem.y.shape)


def test_batch_normalisation_is_trained_and_keeps_statistics() -> None:
    problem = KINDS["residual"](torch.float32)
    model, norm = problem.model, problem.model.net.norm
    guide = AutoDropout(model, keep=0.9)
    for loss in (ELBO(), ELBO(per_example=False)):
        before, mean = norm.weight.detach().clone(), norm.running_mean.clone()
        SVI(model, guide, Adam({"lr": 0.1}), loss).step(problem.x, problem.y)
        assert not torch.equal(norm.weight, before)
        assert not torch.equal(norm.running_mean, mean)
    counted = int(norm.num_batches_tracked)
    Predictive(model, guide=guide, num_samples=4, parallel=True)(problem.x)
    assert int(norm.num_batches_tracked) > counted  # one forward pass for each draw
    model.eval()
    mean, counted = norm.running_mean.clone(), int(norm.num_batches_tracked)
    Predictive(model, guide=guide, num_samples=4, parallel=True)(problem.x)
    ELBO().loss(model, guide, problem.x, problem.y)
    assert torch.equal(norm.running_mean, mean)
    assert int(norm.num_batches_tracked) == counted


def test_a_copy_has_names_of_its_own() -> None:
    problem = KINDS["residual"](torch.float32)
    other = copy.deepcopy(problem.model)
    for model in (problem.model, other):
        ELBO().loss(model, AutoDropout(model), problem.x, problem.y)
    before = problem.model.net.norm.weight.detach().clone()
    SVI(other, AutoDropout(other), Adam({"lr": 0.1}), ELBO()).step(problem.x, problem.y)
    assert torch.equal(problem.model.net.norm.weight, before)
    assert not torch.equal(other.net.norm.weight, before)


@pytest.mark.parametrize("kind", NETS)
def test_a_trained_model_can_be_copied(kind: str) -> None:
    problem = KINDS[kind](torch.float32)
    guide = AutoMeanField(problem.model)
    SVI(problem.model, guide, Adam({"lr": 0.1}), ELBO(per_example=False)).step(problem.x, problem.y)
    weights = prior_draws(problem.model.eval())
    f = problem.model.evaluate(weights, problem.x)
    assert torch.equal(copy.deepcopy(problem.model).evaluate(weights, problem.x), f)


def test_the_type_of_a_model_is_that_of_its_network() -> None:
    """The prior's widths are rounded once, to the network's type, whatever torch's default is."""
    model = BayesianNet(mlp().to(F64), Prior(length_scale=0.3))
    assert model.prior_of("0.weight").base_dist.scale.max().item() == 1 / 0.3
    assert model.prior_of("2.weight").stddev[0, 0].item() == 0.5
    single = model.to(torch.float32)
    assert single.prior_of("0.weight").sample().dtype == torch.float32


# --- what is refused --------------------------------------------------------------------------------------------------


class Sequences(nn.Module):
    """Gives an output for each step of a sequence, which is one dimension too many."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.RNN(2, 3, batch_first=True)


BAD_MODELS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "not a module": (lambda: BayesianNet(lambda x: x), PyroDropoutError, "nn.Module"),  # type: ignore[arg-type]
    "nothing random": (lambda: BayesianNet(nn.ReLU()), PyroDropoutError, "no parameter that is random"),
    "all hidden": (lambda: BayesianNet(nn.BatchNorm1d(3)), PyroDropoutError, "everything hidden"),
    "a site that is not there": (
        lambda: BayesianNet(mlp(), Prior(length_scale={"1.weight": 2.0})),
        PyroDropoutError,
        "'1.weight', which is not a site; the sites are 0.weight, 2.weight",
    ),
    "a length-scale that does not fit": (
        lambda: BayesianNet(mlp(), Prior(length_scale=torch.ones(7))),
        ShapeError,
        r"0.weight must be a number, or broadcast to its shape \(4, 2\); got \(7,\)",
    ),
}


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("case", BAD_MODELS)
def test_bad_models_are_refused_at_the_door(case: str) -> None:
    make, error, message = BAD_MODELS[case]
    with pytest.raises(error, match=message):
        make()


X = torch.zeros(4, 2)
BAD_CALLS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no dimension of outputs": (
        lambda: BayesianNet(nn.Sequential(nn.Linear(2, 1), nn.Flatten(0)))(X),
        ShapeError,
        r"outputs \(N, D\); it gave \(4,\)",
    ),
    "a dimension too many": (
        lambda: BayesianNet(Sequences())(torch.zeros(4, 5, 2)),
        ShapeError,
        r"outputs \(N, D\); it gave \(4, 5, 3\)",
    ),
    "a tuple": (lambda: BayesianNet(nn.RNN(2, 3))(torch.zeros(4, 5, 2)), ShapeError, "net returns a tuple with 0, 1"),
    "targets without a column": (lambda: BayesianNet(mlp())(X, torch.zeros(4)), ShapeError, r"y.unsqueeze\(-1\)"),
    "too many targets": (lambda: BayesianNet(mlp())(X, torch.zeros(5, 1)), ShapeError, r"\(4, 1\).*got \(5, 1\)"),
    "targets with a column": (
        lambda: BayesianNet(nn.Linear(2, CLASSES), likelihood=Categorical())(X, torch.zeros(4, 1).long()),
        ShapeError,
        r"one class index a point, shape \(4,\); got \(4, 1\)",
    ),
    "classes that are not whole": (
        lambda: BayesianNet(nn.Linear(2, CLASSES), likelihood=Categorical())(X, torch.zeros(4)),
        RangeError,
        r"y.long\(\)",
    ),
    "no precision": (lambda: Gaussian(tau=0.0), RangeError, "tau must be positive"),
}


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_calls_are_refused(case: str) -> None:
    call, error, message = BAD_CALLS[case]
    with pytest.raises(error, match=message):
        call()


def test_outputs_are_checked_for_every_draw() -> None:
    model = BayesianNet(Sequences()).to(F64)
    with pytest.raises(ShapeError, match=r"it gave \(4, 5, 3\)"):
        model.evaluate(prior_draws(model, 2), torch.zeros(4, 5, 2, dtype=F64))
    pyro.clear_param_store()
