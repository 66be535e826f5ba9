"""Steps change parameters and moments where they are; none is taken that is not finite."""

from typing import Any

import pyro
import pytest
import torch
from torch import Tensor, nn

import pyro_dropout as pd
from pyro_dropout.engines import engine
from pyro_dropout.training.optimisers import adam
from tests.benchmarks import memory

X = torch.linspace(-1, 1, 30).unsqueeze(-1)
QUIET: dict[str, Any] = {"progress": False, "seed": 0, "lr": 0.01}
RECORDED_OR_COMPILED = ["traced", pytest.param(True, marks=pytest.mark.deep)]


def pair(hidden: int = 8) -> tuple[pd.BayesianNet, pd.AutoDropout]:
    pyro.clear_param_store()
    torch.manual_seed(0)
    model = pd.BayesianNet(nn.Sequential(nn.Linear(1, hidden), nn.ReLU(), nn.Linear(hidden, 1)))
    return model, pd.AutoDropout(model, keep=0.8)


@pytest.mark.parametrize("turned", ["gradient", "parameter"])
def test_numbers_may_lie_in_memory_in_another_order(turned: str) -> None:
    """torch's fused kernel would pair them with those of other weights."""
    slope, value = torch.arange(12.0).sub(5.5).reshape(3, 4), torch.zeros(3, 4)
    slope, value = (slope.reshape(4, 3).mT, value) if turned == "gradient" else (slope, torch.zeros(4, 3).mT)
    update = adam(0.1)
    update.in_place([value], [slope], update.start([value]), torch.tensor(1.0), torch.tensor(0.1))
    torch.testing.assert_close(value, -0.1 * slope.sign())


def test_an_update_of_the_user_runs_in_place_too() -> None:
    model, guide = pair()
    start = [parameter.detach().clone() for parameter in guide.parameters()]
    halve = pd.training.Update("halve", lr=1.0, slots=0, apply=lambda p, g, s, lr, t: (p / 2, s))
    pd.fit(model, guide, X, X, steps=2, optim=halve, compile=False, **{**QUIET, "lr": None})
    torch.testing.assert_close(list(guide.parameters()), [each / 4 for each in start])


@pytest.mark.parametrize("compile", [False, *RECORDED_OR_COMPILED])
@pytest.mark.parametrize("wrong", ["targets", "gradient"])
def test_a_large_network_does_not_take_a_step_that_is_not_finite(
    wrong: str, compile: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "LARGE", 0)
    monkeypatch.setattr(engine, "SMALL", 0)  # no large network is a small one, which C takes
    model, guide = pair()
    pd.fit(model, guide, X, X, steps=3, compile=compile, **QUIET)
    before = [parameter.detach().clone() for parameter in guide.parameters()]
    if wrong == "targets":
        said, y = (
            r"the loss is inf at step 1; that step was not taken\. The term of site 'y' is not finite",
            X * 1e30,
        )
    else:
        said, y = r"the loss is [\d.e+-]+ and its gradient not finite at step 1; that step was not taken", X
        guided = guide.forward

        def forward(*args: object, **kwargs: object) -> Any:
            found = guided(*args, **kwargs)
            for value in found.values():
                if value.requires_grad:
                    value.register_hook(lambda slope: slope * torch.inf)
            return found

        monkeypatch.setattr(guide, "forward", forward)
    with pytest.raises(pd.errors.DivergedError, match=said + r".*The parameters are those after step 0\. Lower the"):
        pd.fit(model, guide, X, y, steps=5, loss=pd.ELBO(per_example=False), compile=compile, **QUIET)
    assert all(torch.equal(a, b) for a, b in zip(before, guide.parameters(), strict=True))


@pytest.mark.deep
@pytest.mark.parametrize("kind", [kind for kind in memory.KINDS if kind != memory.PLAIN])
def test_a_training_holds_at_most_a_quarter_more_than_plain_dropout(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # parameters, gradients and two moments in torch; here the network's own values as well
    monkeypatch.setattr(engine, "LARGE", 0)
    theirs, own = (memory.training_peak(each, 400, "cpu", "allocated") for each in (memory.PLAIN, kind))
    print(f"plain dropout {theirs / 2**20:.1f} MiB, {kind} {own / 2**20:.1f} MiB, {own / theirs:.2f} times as much")
    assert theirs > 16 * memory.LAYERS * 400**2  # four copies of the weights at least, or the measurement is not one
    assert own <= 1.25 * theirs


@pytest.mark.parametrize("optim", ["adam", "sgd"])
@pytest.mark.parametrize("compile", [False, *RECORDED_OR_COMPILED])
def test_the_gradient_of_one_parameter_may_be_another(compile: Any, optim: str) -> None:
    """The loss is Σ ab, so that the gradients are b and a; neither may be written over before both are read."""

    def model(x: Tensor) -> None:
        a, b = (pyro.param(name, lambda k=k: torch.tensor([1.0 + k, 2.0 - 3 * k])) for k, name in enumerate("ab"))
        pyro.factor("f", -(a * b).sum())

    def guide(x: Tensor) -> None:
        pass

    pyro.clear_param_store()
    a, b = (nn.Parameter(torch.tensor(value)) for value in ([1.0, 2.0], [2.0, -1.0]))
    theirs = torch.optim.Adam([a, b], lr=0.01) if optim == "adam" else torch.optim.SGD([a, b], lr=0.01, momentum=0.9)
    for _ in range(25):
        theirs.zero_grad()
        (a * b).sum().backward()
        theirs.step()
    pd.fit(model, guide, X, steps=25, compile=compile, optim=optim, **QUIET)
    for name, expected in (("a", a), ("b", b)):
        torch.testing.assert_close(pyro.param(name), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("batch_size", [None, 64])
@pytest.mark.parametrize("compile", RECORDED_OR_COMPILED)
def test_a_huge_network_on_a_gpu_has_its_own_tensors_changed(
    compile: Any, batch_size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a guide that draws nothing: several chains, and single steps after them."""
    monkeypatch.setattr(engine, "HUGE", 0)
    found, x = [], torch.randn(256, 40, generator=torch.Generator().manual_seed(0)).cuda()
    for kind in (False, compile):
        pyro.clear_param_store()
        torch.manual_seed(0)
        hidden = [layer for _ in range(4) for layer in (nn.Linear(300, 300), nn.ReLU())]
        model = pd.BayesianNet(nn.Sequential(nn.Linear(40, 300), nn.ReLU(), *hidden, nn.Linear(300, 1)).cuda())
        guide = pd.AutoDropout(model, keep=1.0)
        places = [parameter.data_ptr() for parameter in guide.parameters()]
        how = QUIET | {"steps": 45, "batch_size": batch_size, "lr": 1e-4}
        history = pd.fit(model, guide, x, x[:, :1].sin(), compile=kind, **how)
        assert [parameter.data_ptr() for parameter in guide.parameters()] == places
        found.append((history.losses, [parameter.detach() for parameter in guide.parameters()]))
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-4)
