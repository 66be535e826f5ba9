"""What every guide promises, for every kind of model: one contract for all of them.

The full product of guides, kinds of model, losses and ways to draw runs in
float32; float64 runs on the first kind, and on all of them with ``-m deep``.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import jaxtyping
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Predictive, Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.importance import psis_diagnostic
from pyro.optim import Adam, PyroOptim
from torch import Tensor
from torch.distributions import kl_divergence

import pyro_dropout.guides
from pyro_dropout import ELBO, per_example
from pyro_dropout.errors import NotFollowedError, PyroDropoutError, SingularError
from pyro_dropout.paper import RowMixture, kl
from tests.contracts.guides import GUIDES, guide_classes
from tests.contracts.models import KINDS, Problem

LOSSES: dict[str, Callable[[], Any]] = {"mean-field": TraceMeanField_ELBO, "trace": Trace_ELBO, "elbo": ELBO}


@dataclass(frozen=True)
class Refusal:
    """A combination that cannot mean anything, and what is said of it."""

    loss: set[str]
    draws: set[str]
    applies: Callable[[str, str], bool]
    error: type[Exception]
    message: str


@cache
def drawn_per_data_point(guide: str, *, some: bool = False) -> bool:
    """Whether a guide's weights and biases can be drawn for each data point, all of them or some."""
    with pyro.get_param_store().scope(), torch.random.fork_rng():
        problem = KINDS["mlp"](torch.float32)
        q = build(guide, problem)
        q(problem.x, problem.y)
        mixtures = [site for site in q._sites.values() if site.plain and isinstance(q.posterior(site.name), RowMixture)]
        return not q.whole_functions or (some and bool(mixtures))


# torch runs such layers in one kernel, which takes a single set of weights.
WHOLE = ("lstm", "gru", "attention", "transformer")
ANY = {"shared", "per-example"}
# The first that applies.
REFUSED = (
    Refusal(
        # one noise for the whole network, and a scalar that is drawn once for all data points
        loss={"mean-field", "trace", "elbo"},
        draws={"per-example"},
        applies=lambda guide, kind: (guide, kind) == ("low-rank-net", "noisy"),
        error=PyroDropoutError,
        message="drawn once for all of them",
    ),
    Refusal(
        loss={"mean-field", "trace", "elbo"},
        draws={"per-example"},
        applies=lambda guide, kind: kind in WHOLE and drawn_per_data_point(guide, some=True),
        error=NotFollowedError,
        message="is not a layer",
    ),
    Refusal(
        loss={"trace"},
        draws={"per-example"},
        applies=lambda guide, kind: drawn_per_data_point(guide, some=True),
        error=SingularError,
        message="no joint density",
    ),
    Refusal({"trace"}, {"shared"}, lambda guide, kind: not GUIDES[guide].density, SingularError, "scale=0"),
)


def refusal(guide: str, kind: str, loss: str, draws: str) -> Refusal | None:
    return next((r for r in REFUSED if loss in r.loss and draws in r.draws and r.applies(guide, kind)), None)


# A model written for one draw at a time; the rest compute with weights that have sample dimensions in front.
ONE_BY_ONE = ("plain",)


def many_draws(guide: str, kind: str, draws: str = "shared") -> bool:
    """Whether a guide's draws can be vectorised in a model, by a loss that takes the guide."""
    if draws == "per-example" and not drawn_per_data_point(guide):
        return False
    taken = any(refusal(guide, kind, loss, draws) is None for loss in ("mean-field", "trace"))
    return kind not in ONE_BY_ONE and taken and not (kind == "noisy" and draws == "per-example")


def cases(*, kinds: list[str] | None = None, where: Callable[[str, str], bool] = lambda guide, kind: True) -> list[Any]:
    """Every guide with every kind of model, and the types of number.

    The short tests have all guides on one kind of model, every fourth in both types, and the other kinds with one guide
    in sixteen.
    """
    found = []
    for row, kind in enumerate(kinds or KINDS):
        for column, guide in enumerate(GUIDES):
            if not where(guide, kind):
                continue
            for dtype in (torch.float32, torch.float64):
                double = dtype == torch.float64
                long = (double and column % 4 > 0) if kind == "mlp" else (double or (row + column) % 16 > 0)
                name = f"{guide}-{kind}-{str(dtype).removeprefix('torch.')}"
                found.append(pytest.param(guide, kind, dtype, id=name, marks=[pytest.mark.deep] if long else []))
    return found


def build(guide: str, problem: Problem) -> Any:
    return GUIDES[guide](problem.model, **problem.options)


def setting(loss: str, draws: str, **options: Any) -> tuple[Any, Callable[[], AbstractContextManager[Any]]]:
    """The loss, and the context in which stock losses draw for each data point."""
    if loss == "elbo":
        return ELBO(per_example=draws == "per-example", **options), nullcontext
    return LOSSES[loss](**options), per_example if draws == "per-example" else nullcontext


def parameters(guide: Any, problem: Problem) -> dict[str, Tensor]:
    """Everything that training moves: the guide's parameters and the hidden ones of the network."""
    hidden = problem.model.hidden_parameters() if hasattr(problem.model, "hidden_parameters") else {}
    return {**dict(guide.named_parameters()), **{f"model.{name}": value for name, value in hidden.items()}}


class Watched(PyroOptim):
    """Adam that notes the gradients it is given."""

    def __init__(self) -> None:
        super().__init__(torch.optim.Adam, {"lr": 0.01})
        self.grads: dict[int, Tensor] = {}

    def __call__(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.grads.update({id(value): value.grad.clone() for value in params if value.grad is not None})
        super().__call__(params, *args, **kwargs)


def same_seed(evaluate: Callable[[], float]) -> tuple[float, float]:
    torch.manual_seed(7)
    first = evaluate()
    torch.manual_seed(7)
    return first, evaluate()


@pytest.fixture(autouse=True)
def quick(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check annotated shapes on the first kind, with shared draws: elsewhere the checks would take most of the time."""
    known = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    elsewhere = known.get("kind", "mlp") != "mlp" or known.get("draws") == "per-example"
    jaxtyping.config.update("jaxtyping_disable", elsewhere)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("draws", ["shared", "per-example"])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("guide", "kind", "dtype"), cases())
def test_it_trains(guide: str, kind: str, dtype: torch.dtype, loss: str, draws: str) -> None:
    """In stock SVI, four steps move every parameter; losses and gradients are finite, and a seed repeats them.

    Masks that all points share may shut a layer in one step or two.
    """
    problem = KINDS[kind](dtype)
    q, (estimate, context) = build(guide, problem), setting(loss, draws)
    optim = Watched()
    svi = SVI(problem.model, q, optim, estimate)
    refused = refusal(guide, kind, loss, draws)
    if refused is not None:
        with pytest.raises(refused.error, match=refused.message), context():
            svi.step(problem.x, problem.y)
        return
    q(problem.x, problem.y)
    moving = parameters(q, problem)
    before = {name: value.detach().clone() for name, value in moving.items()}
    with context():
        losses = [svi.step(problem.x, problem.y) for _ in range(4)]
        first, second = same_seed(lambda: svi.evaluate_loss(problem.x, problem.y))
    assert all(map(math.isfinite, losses))
    assert first == second
    for name, value in moving.items():
        assert value.dtype == dtype, name
        assert torch.isfinite(optim.grads[id(value)]).all(), name
        assert not torch.equal(value, before[name]), name


@pytest.mark.parametrize(("guide", "kind", "dtype"), cases())
def test_its_answers_have_the_shapes_of_the_sites(guide: str, kind: str, dtype: torch.dtype) -> None:
    problem = KINDS[kind](dtype)
    q = build(guide, problem)
    q(problem.x, problem.y)
    model_trace = poutine.trace(problem.model).get_trace(problem.x)
    sites = {n: model_trace.nodes[n]["value"] for n in model_trace.stochastic_nodes if n not in ("y", "data")}
    assert len(sites) == problem.latents
    mean, median, draws, quantiles = q.mean(), q.median(), q.sample_weights(5), q.quantiles([0.9])
    for answer in (mean, median, draws, quantiles):
        assert list(answer) == list(sites)
    for name, value in sites.items():
        posterior = q.posterior(name)
        found = {"mean": mean[name], "median": median[name], "draw": posterior.sample()}
        assert {what: answer.shape for what, answer in found.items()} == dict.fromkeys(found, value.shape)
        assert draws[name].shape == (5, *value.shape)
        assert quantiles[name].shape == (1, *value.shape)
        assert (median[name] <= quantiles[name][0]).all()
        for answer in (*found.values(), draws[name], quantiles[name]):
            assert answer.dtype == dtype
            assert torch.isfinite(answer).all()
        assert model_trace.nodes[name]["fn"].support.check(draws[name]).all()


def _frozen_loss(guide: Any, problem: Problem) -> tuple[float, float]:
    """-log p(y|w) of one draw, plus the KL of every site by a formula; of a point, log q - log p at it.

    The second number is what priors of point estimates add to it and nothing moves: log σ√2π for each number.
    """
    guide_trace = poutine.trace(guide).get_trace(problem.x, problem.y)
    model_trace = poutine.trace(poutine.replay(problem.model, trace=guide_trace)).get_trace(problem.x, problem.y)
    total = -model_trace.nodes["y"]["fn"].log_prob(problem.y).sum()
    constant = torch.zeros_like(total)
    for name, node in guide_trace.nodes.items():
        if node["type"] != "sample":
            continue
        q, value = node["fn"], node["value"]
        if name not in model_trace.nodes:  # a draw in unconstrained space
            total = total + (0.0 if isinstance(q, dist.Delta) else q.log_prob(value).sum())
            continue
        prior = model_trace.nodes[name]["fn"]
        if isinstance(q, RowMixture):
            total = total + kl(q, prior)
        elif not isinstance(q, dist.Delta):
            total = total + kl_divergence(q, prior).sum()
        else:
            total = total + (q.log_density - prior.log_prob(value)).sum()
            if type(q) is dist.Delta:
                constant = constant - prior.log_prob(prior.mean).sum()
    return total.item(), constant.item()


@pytest.mark.parametrize(
    ("guide", "kind", "dtype"), cases(where=lambda guide, kind: refusal(guide, kind, "mean-field", "shared") is None)
)
def test_its_kl_is_computed_and_not_sampled(guide: str, kind: str, dtype: torch.dtype) -> None:
    """For one draw, Pyro's mean-field loss and ours are both -log p(y|w) + KL(q, p), to rounding.

    Of a point estimate's Gaussian prior, ours leaves out the normaliser, as dropout's KL does at σ = 0.
    """
    problem = KINDS[kind](dtype)
    q = build(guide, problem)
    q(problem.x, problem.y)
    found = []
    for loss in (TraceMeanField_ELBO(), ELBO(per_example=False, temperature=1.0)):
        torch.manual_seed(3)
        found.append(loss.loss(problem.model, q, problem.x, problem.y))
    torch.manual_seed(3)
    expected, constant = _frozen_loss(q, problem)
    slack = 100 * torch.finfo(dtype).eps  # both are sums whose terms may cancel
    assert found == pytest.approx([expected, expected - constant], rel=slack, abs=slack)


@pytest.mark.parametrize(("guide", "kind", "dtype"), cases(kinds=["mlp", "residual", "plain"]))
@pytest.mark.thinned(2)
def test_two_pairs_share_nothing(guide: str, kind: str, dtype: torch.dtype) -> None:
    """Training one guide on one model moves no parameter of another pair of the same classes."""
    pairs = []
    for _ in range(2):
        problem = KINDS[kind](dtype)
        q = build(guide, problem)
        ELBO().loss(problem.model, q, problem.x, problem.y)  # both are known to Pyro before either is trained
        pairs.append((problem, q))
    (problem, q), (other_problem, other) = pairs
    before = {name: value.detach().clone() for name, value in parameters(other, other_problem).items()}
    svi = SVI(problem.model, q, Adam({"lr": 0.1}), ELBO())
    for _ in range(2):
        svi.step(problem.x, problem.y)
    assert all(torch.equal(value, before[name]) for name, value in parameters(other, other_problem).items())
    held = {id(value) for value in pyro.get_param_store()._params.values()}
    assert held == {id(value) for pair in pairs for value in parameters(pair[1], pair[0]).values()}


@pytest.mark.parametrize(("guide", "kind", "dtype"), cases(where=lambda guide, kind: kind not in ONE_BY_ONE))
def test_it_predicts_in_parallel(guide: str, kind: str, dtype: torch.dtype) -> None:
    problem = KINDS[kind](dtype)
    q = build(guide, problem)
    q(problem.x, problem.y)  # a guide that first sees its model without y takes y for a latent variable
    found = Predictive(problem.model, guide=q, num_samples=3, parallel=True)(problem.x)
    assert found["y"].reshape(3, -1).shape == (3, problem.y.numel())
    assert torch.isfinite(found["y"].to(dtype)).all()


@pytest.mark.parametrize("draws", ["shared", "per-example"])
@pytest.mark.parametrize(("guide", "kind", "dtype"), cases())
@pytest.mark.thinned(2)
def test_particles_can_be_vectorised(guide: str, kind: str, dtype: torch.dtype, draws: str) -> None:
    if not many_draws(guide, kind, draws):
        return
    problem = KINDS[kind](dtype)
    loss = "mean-field" if refusal(guide, kind, "mean-field", draws) is None else "trace"
    estimate, context = setting(loss, draws, num_particles=3, vectorize_particles=True, max_plate_nesting=1)
    q = build(guide, problem)
    with context():
        value = estimate.loss_and_grads(problem.model, q, problem.x, problem.y)
    assert math.isfinite(value)
    grads = {name: each.grad for name, each in parameters(q, problem).items()}
    assert all(grad is not None and torch.isfinite(grad).all() for grad in grads.values())


@pytest.mark.parametrize(("guide", "kind", "dtype"), cases(where=lambda guide, kind: kind not in ONE_BY_ONE))
@pytest.mark.thinned(2)
def test_importance_weights_exist_where_a_density_does(guide: str, kind: str, dtype: torch.dtype) -> None:
    problem = KINDS[kind](dtype)
    q = build(guide, problem)

    def diagnose() -> float:
        return psis_diagnostic(problem.model, q, problem.x, problem.y, num_particles=100, max_plate_nesting=1)

    if GUIDES[guide].density:
        assert math.isfinite(diagnose())
    else:
        with pytest.raises(ValueError, match="scale=0"):  # Pyro names the site, and raises an error of its own
            diagnose()


def heavy_tailed(x: Tensor, y: Tensor | None = None) -> None:
    weight = pyro.sample("weight", dist.Cauchy(0.0, 1.0).expand([2, 1]).to_event(2))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ weight, 1.0).to_event(1), obs=y)


@pytest.mark.parametrize("guide", GUIDES)
def test_a_prior_without_a_formula_is_sampled(guide: str) -> None:
    """Pyro's mean-field loss falls back on log q - log p of the draw, and ours does the same."""
    problem = Problem(heavy_tailed, torch.randn(3, 2), torch.zeros(3, 1), 1)
    q, found = build(guide, problem), []
    if not GUIDES[guide].density:
        with pytest.raises(SingularError, match="scale=0"):
            TraceMeanField_ELBO().loss(heavy_tailed, q, problem.x, problem.y)
        return
    q(problem.x, problem.y)
    for loss in (Trace_ELBO(), ELBO(per_example=False)):
        torch.manual_seed(3)
        found.append(loss.loss(heavy_tailed, q, problem.x, problem.y))
    if refusal(guide, "plain", "mean-field", "shared") is None:
        torch.manual_seed(3)
        found.append(TraceMeanField_ELBO().loss(heavy_tailed, q, problem.x, problem.y))
    assert found == pytest.approx([found[0]] * len(found), rel=1e-5)
    if drawn_per_data_point(guide):  # then the KL would need whole weights
        with pytest.raises(PyroDropoutError, match="not Gaussian"):
            ELBO().loss(heavy_tailed, q, problem.x, problem.y)
    else:
        assert math.isfinite(ELBO().loss(heavy_tailed, q, problem.x, problem.y))


def labelled(x: Tensor, y: Tensor | None = None) -> None:
    weight = pyro.sample("weight", dist.Normal(0.0, 1.0).expand([2, 1]).to_event(2), infer={"row_dim": None})
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ weight, 1.0).to_event(1), obs=y)


@pytest.mark.parametrize("guide", ["dropout", "dropout-scale"])
def test_a_label_for_each_weight_needs_shared_draws(guide: str) -> None:
    problem = Problem(labelled, torch.ones(3, 2), torch.zeros(3, 1), 1)
    q = build(guide, problem)
    assert math.isfinite(ELBO(per_example=False).loss(labelled, q, problem.x, problem.y))
    with pytest.raises(PyroDropoutError, match="label for each weight"):
        ELBO().loss(labelled, q, problem.x, problem.y)


def test_every_guide_is_under_contract() -> None:
    assert guide_classes() == set(pyro_dropout.guides.GUIDES)
