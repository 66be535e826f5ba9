"""Every kind of site that Pyro has: in expectation the loss and its gradient are those of Pyro's own, or it says no.

Estimates of two losses are compared by 4.5 standard errors of their difference, a bound that correct code exceeds in 1
of 150,000 comparisons; there are some 400 numbers in this file, and the seeds are fixed.
"""

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.distributions import constraints
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoIAFNormal, AutoNormalMessenger
from torch import Tensor

import pyro_dropout as pd

pytestmark = pytest.mark.usefixtures("in_float64", "unchecked_shapes")
REPEATS = 200
DATA = torch.tensor([0.3, -1.1, 0.8, 2.0], dtype=torch.float64)
Program = Callable[..., Any]


def estimates(loss: Any, model: Any, guide: Any, args: Any, repeats: int) -> Tensor:
    """Losses and their gradients in all parameters of the store, one row for each estimate."""
    found = []
    for _ in range(repeats):
        for value in pyro.get_param_store()._params.values():
            value.grad = None
        value = loss.loss_and_grads(model, guide, *args)
        grads = [
            torch.zeros(p.numel()) if p.grad is None else p.grad.flatten()
            for _, p in sorted(pyro.get_param_store()._params.items())
        ]
        found.append(torch.cat([torch.tensor([value]), *grads]))
    return torch.stack(found)


def alike(model: Any, guide: Any, *args: Any, repeats: int = REPEATS, ours: Any = None, theirs: Any = None) -> None:
    """Both losses have one mean, and so have their gradients."""
    poutine.trace(guide).get_trace(*args)  # parameters that are made on the first call
    mine = estimates(ours or pd.ELBO(per_example=False), model, guide, args, repeats)
    other = estimates(theirs or Trace_ELBO(), model, guide, args, repeats)
    error = ((mine.var(0) + other.var(0)) / repeats).sqrt()
    gap = (mine.mean(0) - other.mean(0)).abs()
    assert mine.shape[1] > 1
    assert bool((gap <= 4.5 * error + 1e-9).all()), (gap / error, mine.mean(0), other.mean(0))


def normal(name: str, size: int, event: int = 0) -> Any:
    """A trained Gaussian."""
    loc = pyro.param(f"{name}_loc", torch.linspace(-0.5, 0.7, size))
    scale = pyro.param(f"{name}_scale", torch.full((size,), 0.6), constraint=constraints.positive)
    return dist.Normal(loc, scale).to_event(event)


# --- plates, scales and masks -----------------------------------------------------------------------------------------


def plated(mask: Any = True) -> None:
    m = pyro.sample("m", dist.Normal(torch.zeros(1), 2.0).to_event(1))
    with pyro.plate("groups", 4), poutine.mask(mask=mask):
        z = pyro.sample("z", dist.Normal(m, 0.5))
        pyro.sample("y", dist.Normal(z, 1.0), obs=DATA)


def plated_guide(mask: Any = True) -> None:
    pyro.sample("m", normal("m", 1, event=1))
    with pyro.plate("groups", 4), poutine.mask(mask=mask):
        pyro.sample("z", normal("z", 4))


KEPT = torch.tensor([True, False, True, True])
HANDLERS: dict[str, Callable[[Program], Program]] = {
    "as it is": lambda program: program,
    "scaled": lambda program: poutine.scale(program, scale=0.3),
    "scaled by a tensor": lambda program: poutine.scale(program, scale=torch.tensor(0.3)),
    "masked": lambda program: lambda: program(KEPT),
    "masked out": lambda program: poutine.mask(program, mask=False),
}


@pytest.mark.parametrize("of_guide", HANDLERS)
@pytest.mark.parametrize("of_model", HANDLERS)
@pytest.mark.thinned(16)
def test_scales_and_masks_count_where_they_stand(of_model: str, of_guide: str) -> None:
    alike(HANDLERS[of_model](plated), HANDLERS[of_guide](plated_guide), repeats=100)


def subsampled() -> None:
    m = pyro.sample("m", dist.Normal(torch.zeros(1), 2.0).to_event(1))
    with pyro.plate("data", 4, subsample_size=2) as index:
        z = pyro.sample("z", dist.Normal(m, 0.5))
        pyro.sample("y", dist.Normal(z, 1.0), obs=DATA[index])


def subsampled_guide() -> None:
    pyro.sample("m", normal("m", 1, event=1))
    with pyro.plate("data", 4, subsample_size=2) as index:
        q = normal("z", 4)
        pyro.sample("z", dist.Normal(q.loc[index], q.scale[index]))


@pytest.mark.deep
def test_a_part_of_a_plate_counts_for_the_whole() -> None:
    alike(subsampled, subsampled_guide, repeats=600)


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore:AutoDropout finds no weight")
@pytest.mark.parametrize("make", [pd.AutoMeanField, lambda m: pd.AutoDropout(m, keep=0.8, scale=0.1, bias="gaussian")])
def test_guides_of_this_package_in_plates(make: Any) -> None:
    """Real-valued and constrained sites in plates, and a matrix for each group."""

    def model() -> None:
        s = pyro.sample("s", dist.HalfNormal(1.0))
        with pyro.plate("groups", 4):
            z = pyro.sample("z", dist.Normal(0.0, s + 0.5))
            t = pyro.sample("t", dist.Gamma(3.0, 2.0))
            w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([2, 2]).to_event(2))
            pyro.sample("y", dist.Normal(z + w.sum((-2, -1)), t), obs=DATA)

    alike(model, make(model), ours=pd.ELBO("exact", per_example=False))


# --- sites beside latent and observed ones ----------------------------------------------------------------------------


def mixed() -> None:
    m = pyro.sample("m", dist.Normal(0.0, 2.0))
    s = pyro.sample("s", dist.Gamma(2.0, 1.0))
    pyro.deterministic("twice", 2 * m)
    pyro.factor("prior", -(m**2) * s)
    with pyro.plate("data", 4):
        pyro.factor("each", -(m - DATA).abs())
        pyro.sample("y", dist.Normal(m, s), obs=DATA)


GUIDES: dict[str, Callable[[Any], Any]] = {
    "AutoNormal": pyro.infer.autoguide.AutoNormal,
    "AutoMultivariateNormal": pyro.infer.autoguide.AutoMultivariateNormal,
    "AutoStructured": pyro.infer.autoguide.AutoStructured,
    "AutoMeanField": pd.AutoMeanField,
    "AutoLowRank": lambda model: pd.AutoLowRank(model, rank=2),
    "AutoLowRank-net": lambda model: pd.AutoLowRank(model, rank=2, per="net"),
}


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore:AutoLowRank finds no weight")
@pytest.mark.parametrize("name", GUIDES)
def test_factors_deterministic_and_auxiliary_sites(name: str) -> None:
    alike(mixed, GUIDES[name](mixed), repeats=300)


def test_a_point_has_no_normaliser_of_its_prior() -> None:
    """KL(q‖p) of a point is infinite, so that only the slope of the objective says something, and it is Pyro's."""
    guide = pyro.infer.autoguide.AutoDelta(mixed)
    guide()
    mine, other = (estimates(loss, mixed, guide, (), 1)[0] for loss in (pd.ELBO(per_example=False), Trace_ELBO()))
    torch.testing.assert_close(mine[1:], other[1:])
    assert (other - mine)[0].item() == pytest.approx(-dist.Normal(0.0, 2.0).log_prob(torch.tensor(0.0)).item())


@pytest.mark.deep
def test_a_factor_of_the_guide() -> None:
    def guide() -> None:
        q = normal("m", 1)
        m = q.rsample()
        pyro.sample("m", dist.Delta(m[0]))
        pyro.factor("log_q", q.log_prob(m).sum(), has_rsample=True)
        pyro.sample("s", dist.LogNormal(pyro.param("a", torch.tensor(0.2)), 0.3))

    alike(mixed, guide, repeats=200)


# --- draws without a path ---------------------------------------------------------------------------------------------


def coin() -> None:
    a = pyro.sample("a", dist.Bernoulli(0.3))
    pyro.sample("y", dist.Normal(2 * a, 1.0), obs=DATA[0])


def test_draws_without_a_gradient_cannot_be_trained() -> None:
    def guide() -> None:
        pyro.sample("a", dist.Bernoulli(pyro.param("p", torch.tensor(0.6), constraint=constraints.unit_interval)))

    assert pd.ELBO().loss(coin, guide) > 0
    with pytest.raises(pd.errors.PyroDropoutError, match=r"guide draws 'a' from Bernoulli.*TraceGraph_ELBO"):
        pd.ELBO().differentiable_loss(coin, guide)


@pytest.mark.parametrize("per_example", [True, False])
def test_labels_of_ones_own_mixture_cannot_be_trained(per_example: bool) -> None:
    logits = torch.zeros(2, 2, requires_grad=True)

    def model(x: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([1, 2]).to_event(2))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x @ w.T, 1.0).to_event(1), obs=torch.zeros(len(x), 1))

    def guide(x: Tensor) -> None:
        pyro.sample("w", pd.paper.RowMixture(torch.randn(2, 1, 2), 0.4, logits.softmax(-1)))

    with pytest.raises(pd.errors.PyroDropoutError, match="components cannot be trained"):
        pd.ELBO(per_example=per_example).differentiable_loss(model, guide, torch.randn(5, 2))


# --- where a formula does not hold ------------------------------------------------------------------------------------


@pytest.mark.parametrize("gradients", [False, pytest.param(True, marks=pytest.mark.deep)])
def test_a_guide_that_draws_in_another_order(gradients: bool) -> None:
    """The prior of b is made from c, and c from b: KL(q(b)‖p(b|c)) at the c that was drawn is not what is expected."""

    def model() -> None:
        c = pyro.sample("c", dist.Normal(0.0, 1.0))
        b = pyro.sample("b", dist.Normal(c, 0.5))
        pyro.sample("y", dist.Normal(b, 1.0), obs=torch.tensor(0.7))

    def guide() -> None:
        b = pyro.sample("b", dist.Normal(pyro.param("b_loc", torch.tensor(0.4)), 0.8))
        pyro.sample("c", dist.Normal(pyro.param("slope", torch.tensor(0.9)) * b, 0.3))

    if gradients:
        alike(model, guide, repeats=600)
        return
    mine, other = (torch.tensor([e.loss(model, guide) for _ in range(REPEATS)]) for e in (pd.ELBO(), Trace_ELBO()))
    assert (mine.mean() - other.mean()).abs() <= 4.5 * ((mine.var() + other.var()) / REPEATS).sqrt()


@pytest.mark.deep
@pytest.mark.parametrize("plates", [False, True])
def test_sites_that_share_noise_and_depend_on_each_other(plates: bool) -> None:
    def model() -> None:
        m = pyro.sample("m", dist.Normal(0.0, 1.0))
        s = pyro.sample("s", dist.LogNormal(0.0, 0.5))
        if plates:
            with pyro.plate("groups", 4):
                z = pyro.sample("z", dist.Normal(m, s))
        else:
            z = pyro.sample("z", dist.Normal(m, s).expand([4]).to_event(1))
        pyro.sample("y", dist.Normal(z, 1.0).to_event(1), obs=DATA)

    guide = pd.AutoLowRank(model, rank=3, per="net", init_scale=0.4)
    guide()
    with torch.no_grad():
        for name, value in guide.named_parameters():
            if name.endswith("factor"):
                value.copy_(torch.randn_like(value))
    alike(model, guide, repeats=500)


def test_a_share_of_a_joint_density_expects_what_its_closed_form_is() -> None:
    """Or a loss in which some sites have a closed form and others a draw would be off by a constant."""

    def model() -> None:
        for name, size in (("a", 2), ("b", 5)):
            pyro.sample(name, dist.Normal(0.0, 1.0).expand([size]).to_event(1))

    guide = pd.AutoLowRank(model, rank=3, per="net", init_scale=0.4)
    guide()
    drawn, closed, prior = {"a": [], "b": []}, {}, dist.Normal(0.0, 1.0)  # type: ignore[var-annotated]
    for _ in range(REPEATS):
        for name, site in poutine.trace(guide).get_trace().iter_stochastic_nodes():
            q, w = site["fn"], site["value"]
            drawn[name].append((q.log_prob(w) - prior.log_prob(w).sum()).item())
            closed[name] = pd.paper.kl(q, prior.expand(w.shape).to_event(1)).item()
    for name, found in drawn.items():
        each = torch.tensor(found)
        assert abs(each.mean() - closed[name]) <= 4.5 * each.std() / REPEATS**0.5


@pytest.mark.parametrize("make", [pd.AutoDropout, lambda m: pd.AutoDropout(m, keep=1.0), pd.AutoMeanField])
def test_the_loss_is_the_same_without_gradients(make: Any) -> None:
    """Of a prior that is made from draws and parameters the normaliser moves, whether or not gradients are on."""

    def model(x: Tensor) -> None:
        s = pyro.sample("s", dist.LogNormal(0.0, 0.5))
        t = pyro.param("t", torch.tensor(0.5), constraint=constraints.positive)
        w = pyro.sample("w", dist.Normal(0.0, s).expand([2, 2]).to_event(2))
        b = pyro.sample("b", dist.Normal(0.0, t).expand([2]).to_event(1))
        c = pyro.sample("c", dist.Normal(torch.zeros_like(t), 0.3).expand([2]).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x @ w + b + c, 1.0).to_event(1), obs=torch.zeros(len(x), 2))

    x = torch.randn(5, 2)
    guide = make(model)
    guide(x)
    for per_example in (True, False):
        found = []
        for ask in ("loss", "differentiable_loss"):
            pyro.set_rng_seed(2)
            value = getattr(pd.ELBO(per_example=per_example), ask)(model, guide, x)
            found.append(float(torch.as_tensor(value).detach()))
        assert found[0] == pytest.approx(found[1], rel=1e-12)


# --- what is refused --------------------------------------------------------------------------------------------------


def _enumerated_model() -> None:
    k = pyro.sample("k", dist.Categorical(torch.ones(3)), infer={"enumerate": "parallel"})
    pyro.sample("y", dist.Normal(k.to(DATA), 1.0), obs=torch.tensor(0.3))


def _known_k() -> None:
    pyro.sample("k", dist.Categorical(torch.ones(3)))


REFUSED: dict[str, tuple[Program, Program, str]] = {
    "enumerated in the model": (_enumerated_model, lambda: None, r"'k' is marked for enumeration.*TraceEnum_ELBO"),
    "enumerated in the guide": (
        lambda: poutine.block(_enumerated_model)(),
        pyro.infer.config_enumerate(_known_k),
        r"'k' is marked for enumeration.*TraceEnum_ELBO",
    ),
    "only in the model": (plated, lambda: pyro.sample("m", normal("m", 1, event=1)), "guide has no site 'z'"),
    "only in the guide": (
        plated,
        lambda: (plated_guide(), pyro.sample("w", dist.Normal(0.0, 1.0))),
        "model has no site 'w', which the guide samples.*is_auxiliary",
    ),
    "observed in the model": (
        plated,
        lambda: (plated_guide(), pyro.sample("y", dist.Normal(DATA, 1.0).to_event(1))),
        "guide samples 'y', which the model observes",
    ),
    "run by the guide": (
        plated,
        AutoNormalMessenger(plated, amortized_plates=("groups",)),
        "guide observes 'y'.*Train it with pyro.infer.SVI",
    ),
}


@pytest.mark.parametrize("per_example", [True, False, "auto"])
@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_meaning_is_refused(case: str, per_example: Any) -> None:
    model, guide, words = REFUSED[case]
    with pytest.raises(pd.errors.PyroDropoutError, match=words):
        pd.ELBO(per_example=per_example).loss(model, guide)


# --- shapes that do not fit -------------------------------------------------------------------------------------------


def in_a_plate() -> None:
    with pyro.plate("plate", 3):
        pyro.sample("z", dist.Normal(0.0, 1.0))


def no_plate() -> None:
    pyro.sample("z", dist.Normal(pyro.param("m", torch.zeros(())), 1.0))


def too_few() -> None:
    pyro.sample("z", dist.Normal(pyro.param("m", torch.zeros(1)), 1.0).to_event(1))


@pytest.mark.parametrize("per_example", [False, "auto"])
@pytest.mark.parametrize(
    ("guide", "words"),
    [(no_plate, r"\(\) in the guide"), (too_few, r"\(1,\) in the guide")],
)
def test_a_guide_of_another_shape_is_refused(guide: Any, words: str, per_example: Any) -> None:
    with pytest.raises(pd.errors.PyroDropoutError, match=rf"site 'z' has.*{words}"):
        pd.ELBO(per_example=per_example).loss(in_a_plate, guide)


@pytest.mark.deep
def test_a_guide_whose_tensors_have_two_names_is_trained() -> None:
    """A normalising flow of Pyro registers its tensors as the module's, and each time that it draws."""
    model = pd.BayesianNet(torch.nn.Linear(2, 1), pd.Prior(), pd.Gaussian(tau=25.0))
    x = torch.randn(30, 2)
    y = x @ torch.tensor([[1.0], [-2.0]])
    guide = AutoIAFNormal(model)
    history = pd.fit(model, guide, x, y, steps=300, lr=0.03, compile=False, progress=False, seed=0)
    assert history.losses[-20:].mean() < 0.2 * history.losses[:20].mean()
    drawn = torch.stack([guide(x, y)["weight"] for _ in range(50)]).mean(0)
    assert torch.allclose(drawn, torch.tensor([[1.0, -2.0]]), atol=0.3)


@pytest.mark.deep
@pytest.mark.parametrize("of_guide", ["as it is", "scaled"])
@pytest.mark.parametrize("of_model", ["as it is", "scaled", "scaled by a tensor"])
@pytest.mark.parametrize("make", [pd.AutoMeanField, lambda m: pd.AutoDropout(m, keep=0.8, scale=0.3, bias="gaussian")])
def test_scales_of_weights(make: Any, of_model: str, of_guide: str) -> None:
    x = torch.randn(6, 2)

    def model(x: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(0.1, 0.7).expand([2, 2]).to_event(2))
        pyro.sample("y", dist.Normal(x @ w, 1.0).to_event(2), obs=torch.zeros(len(x), 2))

    guide = make(model)
    guide(x)
    # one component has one divergence; of two, the sampled one of Trace_ELBO is the exact one
    alike(
        HANDLERS[of_model](model), HANDLERS[of_guide](guide), x, ours=pd.ELBO("exact", per_example=False), repeats=200
    )
