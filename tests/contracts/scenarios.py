"""What Pyro's users do with a guide: each scenario is a script in small, with an assertion on what must come out.

``test_scenarios.py`` runs them with every guide of this package where Pyro's AutoNormal was.
"""

import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer import SVI, JitTrace_ELBO, RenyiELBO, Trace_ELBO, TraceEnum_ELBO, TraceGraph_ELBO
from pyro.infer.autoguide import (
    AutoGuideList,
    init_to_feasible,
    init_to_mean,
    init_to_median,
    init_to_sample,
    init_to_uniform,
    init_to_value,
)
from pyro.nn import PyroModule, PyroParam, PyroSample
from pyro.optim import Adam
from torch import Tensor, nn
from torch.distributions import constraints

from pyro_dropout import ELBO

Make = Callable[..., Any]
LOSSES = {
    name: partial(loss, strict_enumeration_warning=False)
    for name, loss in {"trace": Trace_ELBO, "graph": TraceGraph_ELBO, "enum": TraceEnum_ELBO}.items()
}
INITS = {
    "feasible": init_to_feasible,
    "mean": init_to_mean,
    "median": init_to_median,
    "sample": init_to_sample,
    "uniform": init_to_uniform,
}


SCENARIOS: dict[str, Callable[[Make], None]] = {}


def scenario(**cases: dict[str, Any]) -> Any:
    """Register a scenario, once for each combination of the cases of its further arguments."""

    def register(run: Any) -> Any:
        for chosen in product(*(values.items() for values in cases.values())):
            options = dict(zip(cases, (value for _, value in chosen), strict=True))
            SCENARIOS["-".join([run.__name__, *(key for key, _ in chosen)])] = partial(run, **options)
        return run

    return register


def trained(model: Any, guide: Any, loss: Any, *args: Any, steps: int = 100, lr: float = 0.05, **kwargs: Any) -> Any:
    svi = SVI(model, guide, Adam({"lr": lr, "betas": (0.8, 0.99)}), loss)
    losses = [svi.step(*args, **kwargs) for _ in range(steps)]
    assert all(value == value and abs(value) < 1e9 for value in losses)
    return guide


# --- losses, shapes and starts ----------------------------------------------------------------------------------------


@scenario()
def scores_are_counted_once(make: Make) -> None:
    def model() -> None:
        pyro.sample("z", dist.Normal(0.0, 1.0))

    guide = make(model)
    trace = poutine.trace(guide).get_trace()
    trace.compute_log_prob()
    ends = guide.quantiles([0.5, 0.8413447])["z"]
    z = trace.nodes["z"]["value"]
    expected = dist.Normal(ends[0], ends[1] - ends[0]).log_prob(z)
    total = sum(site["log_prob_sum"] for site in trace.nodes.values() if site["type"] == "sample")
    assert torch.allclose(total, expected, atol=1e-3)


@scenario(loss=LOSSES)
def a_factor_moves_the_loss_by_its_value(make: Make, loss: Any) -> None:
    def model(log_factor: Tensor) -> None:
        pyro.sample("z1", dist.Normal(0.0, 1.0))
        pyro.factor("f1", log_factor)
        pyro.sample("z2", dist.Normal(torch.zeros(2), torch.ones(2)).to_event(1))
        with pyro.plate("plate", 3):
            pyro.factor("f2", log_factor)
            pyro.sample("z3", dist.Normal(torch.zeros(3), torch.ones(3)))

    guide, elbo, found = make(model), loss(), []
    elbo.loss(model, guide, torch.tensor(0.0))
    for value in (5.0, 4.0):
        pyro.set_rng_seed(123)
        found.append(elbo.loss(model, guide, torch.tensor(value)))
    assert abs(found[0] - found[1] + 4) < 1e-4


def every_shape() -> None:
    pyro.sample("scalar", dist.Normal(0.0, 1.0))
    pyro.sample("vector", dist.Normal(torch.zeros(2), torch.ones(2)).to_event(1))
    with pyro.plate("plate", 3):
        pyro.sample("plated", dist.Normal(torch.zeros(3), torch.ones(3)))
        pyro.sample("plated_rates", dist.Gamma(torch.ones(3, 2), 1.0).to_event(1))
        pyro.sample("plated_correlations", dist.LKJCholesky(3, torch.tensor(1.0)))
    pyro.sample("joint", dist.MultivariateNormal(torch.zeros(2), torch.eye(2)))
    pyro.sample("simplex", dist.Dirichlet(torch.ones(3)))
    pyro.sample("masked", dist.Normal(0, 1).expand((2,)).mask(torch.arange(2) > 0).to_event(1))
    pyro.sample("correlations", dist.LKJCholesky(4, torch.tensor(1.0)))
    pyro.sample("matrix", dist.HalfNormal(1.0).expand([2, 3]).to_event(2))
    increasing = [dist.transforms.OrderedTransform()]
    pyro.sample("ordered", dist.TransformedDistribution(dist.Normal(torch.zeros(3), 1.0), increasing))


@scenario(loss=LOSSES, init=INITS)
def every_shape_of_site(make: Make, loss: Any, init: Any) -> None:
    guide = make(every_shape, init_loc_fn=init)
    estimate = loss()
    assert abs(estimate.loss(every_shape, guide)) < 1e6
    draws, median, quantiles = guide(), guide.median(), guide.quantiles([0.1, 0.5, 0.9])
    trace = poutine.trace(every_shape).get_trace()
    for name in draws:
        site = trace.nodes[name]
        assert draws[name].shape == median[name].shape == site["value"].shape
        assert site["fn"].support.check(draws[name]).all()
        assert quantiles[name].shape == (3, *site["value"].shape)


@scenario(loss=LOSSES)
def many_draws_at_once(make: Make, loss: Any) -> None:
    guide = make(every_shape)
    guide()
    estimate = loss(num_particles=7, vectorize_particles=True, max_plate_nesting=1)
    assert abs(estimate.loss(every_shape, guide)) < 1e6


def centre(guide: Any) -> dict[str, Tensor]:
    """The means of a guide that can say them; dropping moves a median off its mean, and Pyro's guides say medians."""
    found: dict[str, Tensor] = guide.mean() if hasattr(guide, "mean") else guide.median()
    return found


@scenario()
def it_starts_where_it_is_told(make: Make) -> None:
    def model() -> None:
        pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.MultivariateNormal(torch.zeros(5), torch.eye(5, 5)))
        pyro.sample("rate", dist.LogNormal(0.0, 1.0))

    starts = {"x": torch.randn(()), "y": torch.randn(5), "rate": torch.tensor(3.0)}
    for start in (init_to_value(values=starts), lambda site: starts[site["name"]]):
        guide = make(model, init_loc_fn=start)
        guide()
        assert all(torch.allclose(centre(guide)[name], value, atol=1e-5) for name, value in starts.items())
        pyro.clear_param_store()


@scenario(scale={"0.1": 0.1, "1e-4": 1e-4})
def widths_start_as_told(make: Make, scale: float) -> None:
    def model() -> None:
        pyro.sample("x", dist.Normal(0.0, 1.0))
        with pyro.plate("plate", 100):
            pyro.sample("z", dist.Normal(0.0, 1.0))

    guide = make(model, init_scale=scale)
    guide()
    ends = guide.quantiles([0.1587, 0.8413])
    for name in ("x", "z"):
        width = (ends[name][1] - ends[name][0]) / 2
        assert torch.allclose(width, torch.full_like(width, scale), rtol=0.02)


# --- models of other make ---------------------------------------------------------------------------------------------


class WithParameters(PyroModule):
    def __init__(self) -> None:
        super().__init__()
        self.x_loc = nn.Parameter(torch.tensor(1.0))
        self.x_scale = PyroParam(torch.tensor(0.1), constraints.positive)

    def forward(self) -> None:
        pyro.sample("x", dist.Normal(self.x_loc, self.x_scale))
        with pyro.plate("plate", 2):
            pyro.sample("y", dist.Normal(2.0, 0.1))


@scenario(loss=LOSSES)
def a_module_with_parameters_of_its_own(make: Make, loss: Any) -> None:
    model = WithParameters()
    guide = make(model, init_loc_fn=init_to_mean)
    guide = trained(model, guide, loss(), steps=20, lr=0.005)
    median = guide.median()
    assert abs(median["x"].item() - 1) < 0.1
    assert (median["y"] - 2).abs().max() < 0.1


class RandomLinear(nn.Linear, PyroModule):
    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)
        self.weight = PyroSample(dist.Normal(0.0, 1.0).expand([out_features, in_features]).to_event(2))
        self.bias = PyroSample(dist.Normal(0.0, 10.0).expand([out_features]).to_event(1))


class Regression(PyroModule):
    def __init__(self) -> None:
        super().__init__()
        self.linear = RandomLinear(3, 1)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        mean = self.linear(x).squeeze(-1)
        sigma = pyro.sample("sigma", dist.LogNormal(0.0, 1.0))
        with pyro.plate("plate", len(x)):
            return pyro.sample("obs", dist.Normal(mean, sigma), obs=y)


OTHERS = {"renyi": partial(RenyiELBO, num_particles=3), "jit": partial(JitTrace_ELBO, ignore_jit_warnings=True)}


@scenario(loss=LOSSES | OTHERS)
def regression_by_modules(make: Make, loss: Any) -> None:
    x, model = torch.randn(10, 3), Regression()
    guide = make(model)
    guide(x, x.sum(1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.jit
        trained(model, guide, loss(), x, x.sum(1), steps=3)


# --- plates that show some of their elements --------------------------------------------------------------------------


@scenario()
def local_numbers_of_a_subsampled_plate(make: Make) -> None:
    """Every element has its own number, however few are shown at a time."""

    def model(y: Tensor) -> None:
        with pyro.plate("N", 20, subsample_size=5) as index:
            z = pyro.sample("z", dist.Normal(0.0, 10.0))
            pyro.sample("y", dist.Normal(z, 0.5), obs=y[index])

    y = torch.arange(20.0)
    guide = trained(model, make(model), Trace_ELBO(), y, steps=600, lr=0.3)
    assert guide.median(y)["z"].shape == (20,)
    assert (guide.median(y)["z"] - y).abs().max() < 1.5


def states(batch: Any, subsample: Tensor, full_size: int) -> Tensor:
    drift = pyro.sample("drift", dist.LogNormal(-1, 0.5))
    with pyro.plate("data", full_size, subsample=subsample):
        z, result = torch.tensor(0.0), []
        for t in range(len(batch)):
            z = pyro.sample(f"state_{t}", dist.Normal(z, drift))
            result.append(pyro.sample(f"obs_{t}", dist.Bernoulli(logits=z), obs=batch[t]))
    return torch.stack(result)


@scenario(init={"default": None, "mean": init_to_mean, "median": init_to_median})
def a_guide_that_subsamples(make: Make, init: Any) -> None:
    """Batches of 20, 20 and 10 of 50 elements."""

    def plates(batch: Any, subsample: Tensor, full_size: int) -> Any:
        return pyro.plate("data", full_size, subsample=subsample)

    with torch.no_grad():
        data = states([None] * 4, torch.arange(50), 50)
    guide = make(states, create_plates=plates, **({} if init is None else {"init_loc_fn": init}))
    svi = SVI(states, guide, Adam({"lr": 0.02}), Trace_ELBO())
    for start in (0, 20, 40, 0):
        index = torch.arange(start, min(50, start + 20))
        assert abs(svi.step(data[:, index], index, full_size=50)) < 1e6


# --- guides in lists --------------------------------------------------------------------------------------------------


def two_sites() -> None:
    pyro.sample("x", dist.Normal(0.0, 1.0))
    pyro.sample("y", dist.MultivariateNormal(torch.zeros(5), torch.eye(5, 5)))


@scenario()
def a_list_of_guides(make: Make) -> None:
    guide = AutoGuideList(two_sites)
    guide.append(make(poutine.block(two_sites, expose=["x"])))
    guide.append(make(poutine.block(two_sites, expose=["y"])))
    assert set(guide()) == {"x", "y"}
    trained(two_sites, guide, Trace_ELBO(), steps=2)
    assert set(guide.median()) == {"x", "y"}


# --- keeping what was learned -----------------------------------------------------------------------------------------


@scenario()
def the_parameter_store_saved_and_loaded(make: Make) -> None:
    """What one script saves, the next one finds, goes on from, and trains."""
    x, model = torch.randn(10, 3), Regression()
    guide = trained(model, make(model), ELBO(per_example=False), x, x.sum(1), steps=5)
    expected = {name: value.clone() for name, value in guide.median().items()}
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "store.pt")
        pyro.get_param_store().save(file)
        pyro.clear_param_store()
        other = make(model)
        pyro.get_param_store().load(file)
    other(x, x.sum(1))
    assert all(torch.equal(other.median()[name], value) for name, value in expected.items())
    trained(model, other, ELBO(per_example=False), x, x.sum(1), steps=2)
    assert not any(torch.equal(other.median()[name], value) for name, value in expected.items())
    held = {id(value) for value in pyro.get_param_store()._params.values()}
    assert {id(value) for value in other.parameters()} <= held


@scenario()
def the_posterior_of_a_conjugate_model(make: Make) -> None:
    """Two unknown means with known noise: the posterior factorises, and is N(mean·n/(n+1), 1/(n+1))."""

    def model(y: Tensor) -> None:
        with pyro.plate("groups", 2, dim=-1):
            mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
            with pyro.plate("data", y.shape[0], dim=-2):
                pyro.sample("y", dist.Normal(mu, 1.0), obs=y)

    y = torch.randn(8, 2) + torch.tensor([1.0, -1.0])
    guide = trained(model, make(model), Trace_ELBO(num_particles=10, vectorize_particles=True), y, steps=300, lr=0.03)
    low, middle, high = guide.quantiles([0.1587, 0.5, 0.8413])["mu"]
    assert torch.allclose(middle, y.sum(0) / 9, atol=0.1)
    assert torch.allclose((high - low) / 2, torch.full((2,), 1 / 3), atol=0.06)
