"""precision="bf16": products of a network in half precision, everything else in float32."""

import itertools
from collections.abc import Callable
from typing import Any

import pyro
import pytest
import torch
from torch import Tensor, nn

import pyro_dropout as pd
from pyro_dropout.generative.precision import products_in

QUIET: dict[str, Any] = {"progress": False, "seed": 0}


def network(*sizes: int, likelihood: Any = None) -> pd.BayesianNet:
    torch.manual_seed(0)
    pairs = itertools.pairwise(sizes)
    layers = [layer for a, b in pairs for layer in (nn.Linear(a, b), nn.Tanh())]
    return pd.BayesianNet(nn.Sequential(*layers[:-1]), likelihood=likelihood or pd.Gaussian(tau=10.0))


def data(count: int = 64, inputs: int = 20) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, inputs, generator=torch.Generator().manual_seed(1))
    return x, x.sum(1, keepdim=True).sin()


def rounded(value: Tensor) -> Tensor:
    return value.bfloat16().float()


def test_products_are_those_of_rounded_numbers() -> None:
    model = pd.BayesianNet(nn.Linear(20, 16, bias=False))
    x, w = torch.randn(7, 20), torch.randn(16, 20)
    with products_in("bf16"):
        low = model.evaluate({"weight": w}, x)
    assert low.dtype == torch.float32
    assert torch.allclose(low, rounded(rounded(x) @ rounded(w).mT), rtol=2**-7, atol=2**-7)
    assert not torch.equal(low, model.evaluate({"weight": w}, x))


class _Seen(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the types that products are made of."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.products: set[torch.dtype] = set()
        self.thin: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("mm", "addmm", "bmm", "baddbmm"):
            factors = [arg for arg in args if isinstance(arg, Tensor)][-2:]
            thin = min(size for factor in factors for size in factor.shape[-2:]) < 8
            self.products |= set() if thin else {factor.dtype for factor in factors}
            self.thin |= {factor.dtype for factor in factors} if thin else set()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_forward_and_backward_products_have_it(precision: Any) -> None:
    model, seen = network(20, 16, 16, 1), _Seen()
    guide = pd.AutoDropout(model)
    with seen:
        pd.fit(model, guide, *data(), steps=2, compile=False, precision=precision, **QUIET)
    assert seen.products == {torch.bfloat16 if precision == "bf16" else torch.float32}
    assert seen.thin == {torch.float32}  # those of the last layer


@pytest.mark.parametrize("compile", [False, *(pytest.param(each, marks=pytest.mark.deep) for each in ("traced", True))])
def test_all_ways_to_run_steps_round_alike(compile: Any) -> None:
    x, y = data()
    parameters = []
    for how, precision in ((False, "bf16"), (compile, "bf16"), (False, "float32")):
        model = network(20, 32, 32, 1)
        guide = pd.AutoDropout(model, keep=1.0)
        pd.fit(model, guide, x, y, steps=20, lr=0.01, compile=how, precision=precision, **QUIET)
        assert all(value.dtype == torch.float32 for value in guide.parameters())
        parameters.append(torch.cat([value.detach().flatten() for value in guide.parameters()]))
    eager, other, whole = parameters
    rounding = (eager - whole).norm()
    assert 0 < rounding < 0.05 * whole.norm()
    if compile is True:  # fused operations round less often, how often depends on the processor
        assert 0 < (other - whole).norm() < 1.5 * rounding
    else:
        assert torch.equal(other, eager)


@pytest.mark.deep
def test_fleets_ensembles_and_svi_take_it() -> None:
    x, y = data()

    def build(seed: int) -> tuple[Any, Any]:
        model = network(20, 32, 32, 1)
        return model, pd.AutoDropout(model, keep=0.9)

    seen, fleet = _Seen(), pd.Fleet(build, {"seed": [0, 1]})
    run = fleet.prepare(x, y, steps=2, compile=False, precision="bf16")
    with seen:
        run.advance(2)
    assert seen.products == {torch.bfloat16}
    low, whole = (pd.prediction.predict_fleet(fleet, x, samples=5, seed=0, precision=p) for p in ("bf16", "float32"))
    assert 0 < (low.mean - whole.mean).abs().max() < 0.05
    model = network(20, 32, 32, 1)
    ensemble = pd.Ensemble(model, pd.AutoDropout, members=2)
    seen = _Seen()
    with seen:
        pd.fit(model, ensemble, x, y, steps=2, compile=False, precision="bf16", **QUIET)
    assert torch.bfloat16 in seen.products
    assert torch.float32 not in seen.products
    svi = pd.SVI(model, pd.AutoDropout(model), pyro.optim.Adam({"lr": 0.01}), compile=False, precision="bf16")
    seen = _Seen()
    with seen:
        svi.step(x, y)
        svi.evaluate_loss(x, y)
    assert seen.products == {torch.bfloat16}


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda m, g, x, y: pd.fit(m, g, x, y, steps=1, precision="half"), "precision must be"),
        (lambda m, g, x, y: pd.fit(m.double(), g.double(), x.double(), y.double(), steps=1, precision="bf16"),
         "in float32; got BayesianNet with float64"),
        (lambda m, g, x, y: pd.predict(m, g, x, precision="bf16", method="linearised"),
         "linearised' with precision='bf16'"),
        (lambda m, g, x, y: pd.fit(lambda x, y: None, lambda x, y: None, x, y, steps=1, precision="bf16"),
         "is for BayesianNet"),
        (lambda m, g, x, y: pd.fit(pd.paper.DeepGP(20, [4], 1), g, x, y, steps=1, precision="bf16"),
         "got DeepGP with none"),
    ],
)  # fmt: skip
def test_what_cannot_be_lowered_is_refused_by_name(act: Callable[..., object], said: str) -> None:
    model = network(20, 32, 32, 1)
    with pytest.raises(pd.errors.PyroDropoutError, match=said):
        act(model, pd.AutoDropout(model), *data())
