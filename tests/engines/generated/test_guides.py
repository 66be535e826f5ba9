"""Trainings of all kinds of guides and likelihoods take the same steps in plain C as recorded ones do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyro
import pytest
import torch
from torch import Tensor, nn

import pyro_dropout as pd
from pyro_dropout.engines import program
from pyro_dropout.engines.generated.library import compiler

pytestmark = pytest.mark.skipif(not compiler(), reason="there is no C compiler")

Guide = Callable[[Any], Any]
dropout: Guide = lambda model: pd.AutoDropout(model, keep=0.8)  # noqa: E731

CASES: dict[str, dict[str, Any]] = {
    "dropout": {},
    "tanh, sgd": {"act": nn.Tanh, "optim": "sgd"},
    "sigmoid": {"act": nn.Sigmoid},
    "double precision": {"dtype": torch.float64},
    "scale": {"guide": lambda model: pd.AutoDropout(model, keep=0.8, scale=0.1)},
    "mean field": {"guide": pd.AutoMeanField},
    "multiplicative": {"guide": lambda model: pd.AutoMultiplicative(model, alpha=0.2)},
    "concrete": {"guide": pd.AutoConcreteDropout},
    "low rank": {"guide": lambda model: pd.AutoLowRank(model, rank=2)},
    "mixture": {"guide": lambda model: pd.AutoRowMixture(model, components=2)},
    "noise is learned": {"likelihood": lambda: pd.Gaussian(tau=2.0, learn=True)},
    "noise of its own": {"likelihood": pd.HeteroscedasticGaussian, "out": 2},
    "yes or no": {"likelihood": pd.Bernoulli, "target": lambda x: (x > 0).to(x)},
    "counts": {"likelihood": pd.Poisson, "target": lambda x: (3 * x).round().abs()},
}


def trained(
    compile: object,
    guide: Guide = dropout,
    likelihood: Callable[[], Any] = lambda: pd.Gaussian(tau=2.0),
    act: type[nn.Module] = nn.ReLU,
    out: int = 1,
    target: Callable[[Tensor], Tensor] = torch.sin,
    dtype: torch.dtype = torch.float32,
    **how: Any,
) -> list[Tensor]:
    pyro.clear_param_store()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 7), act(), nn.Linear(7, out)).to(dtype)
    model = pd.BayesianNet(net, likelihood=likelihood().to(dtype))
    made = guide(model)
    x = torch.linspace(-1, 1, 40, dtype=dtype).view(20, 2)
    history = pd.fit(model, made, x, target(x[:, :1]), steps=5, compile=compile, progress=False, seed=0, **how)  # type: ignore[arg-type]
    return [history.losses, *(value.detach().clone() for value in made.parameters())]


@pytest.mark.deep
@pytest.mark.parametrize("batch_size", [None, 8])
@pytest.mark.parametrize("case", CASES)
def test_steps_are_those_that_were_recorded(
    case: str, batch_size: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    expected = trained("traced", **CASES[case], batch_size=batch_size)
    monkeypatch.setattr(program, "_compile", lambda *_: pytest.fail("torch's compiler was asked"))
    found = trained(True, **CASES[case], batch_size=batch_size)
    slack = 1e-4 if found[0].dtype == torch.float32 else 1e-10  # five steps, each with rounding of its own
    torch.testing.assert_close(found, expected, rtol=slack, atol=slack)
