"""What is recorded as it runs is what ``make_fx`` records."""

import contextlib
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pyro
import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import pyro_dropout as pd
from pyro_dropout.engines.recorder import record
from pyro_dropout.engines.tracing import traced
from pyro_dropout.training.fit import fit

Function = Callable[..., list[Tensor]]


class Masked(torch.nn.Module):
    """Skips a mask of ones, as transformers does, unless torch compiles."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = torch.nn.Embedding(9, 6), torch.nn.Linear(6, 1)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        h = self.words(ids)
        if not torch.compiler.is_compiling() and mask.all():
            return self.out(h.mean(1))  # type: ignore[no-any-return]
        return self.out((h * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True))  # type: ignore[no-any-return]


def test_a_network_that_asks_whether_torch_compiles_is_recorded_without_values() -> None:
    x = {"ids": torch.arange(24).view(8, 3) % 9, "mask": (torch.arange(24).view(8, 3) % 4 > 0).float()}
    y, losses = torch.linspace(-1, 1, 8).unsqueeze(-1), []
    for compile in (False, "traced"):
        torch.manual_seed(0)
        model = pd.BayesianNet(Masked())
        history = fit(model, pd.AutoDropout(model, keep=1.0), x, y, steps=5, compile=compile, progress=False)  # type: ignore[arg-type]
        losses.append(history.losses)
    assert history.traced
    assert not torch.compiler.is_compiling()
    torch.testing.assert_close(*losses)


def _gradient(x: Tensor) -> list[Tensor]:
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        return list(torch.autograd.grad((leaf.exp().softmax(-1) * leaf.sigmoid()).sum().tanh(), [leaf]))


def _written(x: Tensor) -> list[Tensor]:
    y = x.clone()
    y[0].mul_(2)
    literal = torch.tensor([1.0, 2.0, 3.0])
    literal.add_(x[0])
    return [y, literal]


FUNCTIONS: dict[str, Function] = {
    "products": lambda x: [x @ x, torch.addmm(x, x, x), torch.nn.functional.linear(x, x, x[0])],
    "several results": lambda x: [*x.unbind(), *torch.linalg.qr(x), x.max(0).values],
    "gradient": _gradient,
    "written into": _written,
    "rows by number": lambda x: [x[torch.tensor([2, 0, -1])], x[:, x.argsort(1)[0]]],
    "random": lambda x: [torch.randn_like(x), torch.rand(3), torch.nn.functional.dropout(x, 0.5)],
    "mapped": lambda x: [torch.func.vmap(lambda row: (row * x).sum())(x)],
    "differentiated": lambda x: [torch.func.grad(lambda row: (row**3).sum())(x)],
}


def _plain(code: str) -> str:
    """Return a program with constants named by their order."""
    names = dict.fromkeys(re.findall(r"self\.(_(?:tensor|param)_constant\d+)", code))
    for k, name in enumerate(names):
        code = re.sub(rf"{name}(?=\D)", f"held{k}", code)
    return code


def _made(function: Function, *inputs: Tensor) -> Any:
    with torch.no_grad():
        return make_fx(lambda *leaves: function(*leaves))(*inputs)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_record_is_that_of_make_fx(name: str, dtype: torch.dtype) -> None:
    x, other = torch.randn(3, 3, dtype=dtype), torch.randn(3, 3, dtype=dtype)
    with torch.no_grad():
        mine = record(FUNCTIONS[name], [x.clone()])
    assert mine is not None
    mine.graph.eliminate_dead_code()
    mine.recompile()
    theirs = _made(FUNCTIONS[name], x.clone())
    theirs.graph.eliminate_dead_code()
    theirs.recompile()
    assert _plain(mine.code) == _plain(theirs.code)
    for _ in range(2):  # a literal that is written into is new at every call
        torch.manual_seed(0)
        expected = FUNCTIONS[name](other.clone())
        torch.manual_seed(0)
        found = mine(other.clone())
        for one, two in zip(found, expected, strict=True):
            torch.testing.assert_close(one, two.detach(), rtol=0, atol=0)


def _catching(x: Tensor) -> list[Tensor]:
    try:
        return [x * x.sum().item()]
    except RuntimeError:
        return [x]


UNRECORDED: dict[str, Function] = {
    "a value": lambda x: [x * x.sum().item()],
    "a decision": lambda x: [x if bool(x.sum() > 0) else -x],
    "a shape of values": lambda x: [x[x > 0]],
    "an error that is caught": _catching,
    "a class of its own": lambda x: [torch.nn.Buffer(x).as_subclass(type("Own", (Tensor,), {})) + 1],
    "a sparse tensor": lambda x: [x.to_sparse().to_dense()],
    "a generator": lambda x: [torch.rand(3, generator=torch.Generator())],
}


@pytest.mark.parametrize("name", UNRECORDED)
def test_what_a_record_cannot_hold_is_left_to_make_fx(name: str) -> None:
    with torch.no_grad():
        assert record(UNRECORDED[name], [torch.randn(3)]) is None


READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.max().item(),
    "numpy": lambda x: float(x.detach().numpy().max()),
    "asarray": lambda x: float(np.asarray(x.detach()).max()),
    "a list": lambda x: max(row[0] for row in x.tolist()),
    "dlpack": lambda x: float(np.from_dlpack(x.detach()).max()),  # type: ignore[arg-type]
}


class Scaled(torch.nn.Module):
    """A network that divides a batch by a number that it reads from it."""

    def __init__(self, read: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.read = torch.nn.Linear(1, 1), read

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x / self.read(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", READS)
def test_a_step_does_not_hold_what_was_read_from_its_first_batch(name: str) -> None:
    x, found = torch.linspace(1, 2, 64).unsqueeze(-1), []
    for compile in (False, "traced"):
        torch.manual_seed(0)
        model = pd.BayesianNet(Scaled(READS[name]))
        how: Any = {"steps": 20, "batch_size": 8, "compile": compile, "progress": False, "seed": 0}
        with pytest.warns(match="it reads the value of a tensor") if compile else contextlib.nullcontext():
            found.append(fit(model, pd.AutoMeanField(model), x, x, **how).losses)
    torch.testing.assert_close(*found)


SCHEDULES: dict[str, Callable[[Tensor], Any]] = {
    "numpy": lambda done: float(np.exp(-0.2 * done.numpy())),
    "a decision": lambda done: 1.0 if done < 10 else 0.1,
    "a table": lambda done: np.linspace(1, 0.1, 20)[int(done)],
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_learning_rate_that_python_computes_falls_in_steps_of_any_kind(name: str) -> None:
    x, found = torch.linspace(-1, 1, 30).unsqueeze(-1), []
    for compile in (False, "auto"):
        torch.manual_seed(0)
        model = pd.BayesianNet(torch.nn.Linear(1, 1))
        how: Any = {"compile": compile, "lr": 0.1, "schedule": SCHEDULES[name], "progress": False, "seed": 0}
        with mock.patch("pyro_dropout.training.fit.decided", lambda compile, *_: compile and "plain"):
            history = fit(model, pd.AutoMeanField(model), x, x, steps=20, **how)
        found.append(history.losses)
    assert history.traced
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


class Counted(torch.nn.Module):
    """A network that counts its calls in a buffer, and learns more slowly by it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return self.layer(x).tanh().sum(-1, keepdim=True) / self.calls


def test_buffers_that_a_network_changes_are_changed_once_a_step() -> None:
    x, found = torch.linspace(-1, 1, 30).unsqueeze(-1), []
    for compile in (False, "traced"):
        pyro.clear_param_store()
        torch.manual_seed(0)
        model = pd.BayesianNet(Counted())
        guide = pd.AutoDropout(model, keep=0.8)
        history = fit(model, guide, x, x**2, steps=45, lr=0.01, compile=compile, progress=False, seed=0)  # type: ignore[arg-type]
        assert history.traced == (compile == "traced")
        found.append((history.losses, [value.detach() for value in (*guide.parameters(), *model.buffers())]))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (torch.mm, [(5, 1), (1, 7)]),
        (torch.bmm, [(3, 5, 1), (3, 1, 7)]),
        (torch.addmm, [(7,), (5, 1), (1, 7)]),
        (lambda x, w, b: torch.nn.functional.linear(x, w, b), [(5, 1), (7, 1), (7,)]),
    ],
)
def test_products_with_one_term_are_multiplications(function: Any, shapes: list[tuple[int, ...]]) -> None:
    inputs = [torch.randn(shape) for shape in shapes]
    graph = traced(lambda *given: [function(*given)], inputs)
    assert "mm" not in graph.code
    torch.testing.assert_close(graph(*inputs)[0], function(*inputs))
