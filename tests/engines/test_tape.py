"""A tape gives what the operations on it give, whatever it shares, hoists and writes over."""

from collections.abc import Callable
from typing import Any

import pyro
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pyro_dropout as pd
from pyro_dropout.engines import tape as module
from pyro_dropout.engines.recorder import record
from pyro_dropout.engines.tape import NoTapeError, Tape

Function = Callable[..., list[Tensor]]


def _reused(x: Tensor, y: Tensor) -> list[Tensor]:
    """Many results of one shape that are needed for a short time, and one for a long one."""
    early = x.sin()
    late = x
    for k in range(20):
        late = (late + k).cos() * late
    return [early + late, early.t() @ late]


def _views(x: Tensor, y: Tensor) -> list[Tensor]:
    a, b = (x * 2).split(2, 0)
    return [a.reshape(2, 4).sum(0, keepdim=True).expand(3, 4) + 1, b[:, 1], b.t()]


def _written(x: Tensor, y: Tensor) -> list[Tensor]:
    whole = torch.zeros(4, 4)
    whole[1:3] = x[:2]
    whole.diagonal().add_(1.0)
    y.mul_(0.5).add_(x.mean())
    return [whole.exp(), y.sum(), whole[0]]


def _several(x: Tensor, y: Tensor) -> list[Tensor]:
    high, where = x.max(1)
    ordered = x.sort(0)
    return [high, where.float(), ordered.values @ ordered.indices.to(x), y.argmax(0)]


def _drawn(x: Tensor, y: Tensor) -> list[Tensor]:
    noise = torch.randn_like(x) + torch.rand(4, 4) + torch.randn(4, 1)
    return [x * noise, F.dropout(x, 0.5), torch.bernoulli(y.sigmoid()), torch.randint(9, (3,)) * x[0, 0]]


def _constants(x: Tensor, y: Tensor) -> list[Tensor]:
    ones = torch.ones(4, 4)
    return [x * ones.log1p() - ones.tril(), torch.tensor([2.0]) * y, ones * x.sum(), torch.full_like(x, 3.0)]


def _empty(x: Tensor, y: Tensor) -> list[Tensor]:
    return [x[:0].sum() + x, torch.cat([x[:0] * 2, y]), (y[:0] + 1).exp()]


def _given_back(x: Tensor, y: Tensor) -> list[Tensor]:
    return [x, x.t(), y, y + 0.0, x / 3, 3 / x, 1 - x, x.to(torch.float64), x > 0]


FUNCTIONS = [_reused, _views, _written, _several, _drawn, _constants, _empty, _given_back]


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("changing", [(0,), (0, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_gives_what_the_function_gives(function: Function, changing: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        x, y = torch.randn(4, 4), torch.randn(4, 4)
        graph = record(function, [x.clone(), y.clone()])
        assert graph is not None
        mine, others = (x.clone(), y.clone()), (x.clone(), y.clone())
        tape = Tape(graph, mine, changing)
        torch.testing.assert_close(mine, (x, y), rtol=0, atol=0)  # to make it has changed nothing
        for turn in range(4):
            for tensors in (mine, others):
                torch.manual_seed(turn)
                tensors[0].normal_()
                if turn == 2:  # between two rounds anything may change
                    tensors[1].normal_()
            if turn in (0, 2):
                tape.begin()
            found = []
            for run in (tape, lambda: function(*others)):
                torch.manual_seed(turn)
                found.append([value.clone() for value in run()])
            torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
            torch.testing.assert_close(mine, others, rtol=0, atol=0)
    finally:
        torch.set_default_dtype(before)


def test_what_is_not_for_a_tape_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4, 4)
    functions: list[Callable[[Tensor], list[Tensor]]] = [
        lambda x: [torch.ops.aten._native_batch_norm_legit(x, None, None, x[0], x[1], True, 0.1, 1e-5)[0]],
        lambda x: [(x.sum(0, keepdim=True) @ x).squeeze_(0)],
    ]
    for function in functions:
        graph = record(function, [x])
        assert graph is not None
        with pytest.raises(NoTapeError):
            Tape(graph, [x], [0])
    graph = record(lambda x: [x.exp()], [x])
    assert graph is not None
    monkeypatch.setattr(module, "_MOST", 63)
    with pytest.raises(NoTapeError, match="too large"):
        Tape(graph, [x], [0])


# --- trainings --------------------------------------------------------------------------------------------------------

X = torch.linspace(-1, 1, 30).unsqueeze(-1)


class _Counted(nn.Module):
    """A network that counts its calls in a buffer, and learns more slowly by it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return self.layer(x).tanh().sum(-1, keepdim=True) / self.calls


def trained(compile: Any) -> tuple[Tensor, list[Tensor]]:
    pyro.clear_param_store()
    torch.manual_seed(0)
    model = pd.BayesianNet(_Counted())
    guide = pd.AutoDropout(model, keep=0.8)
    history = pd.fit(model, guide, X, X**2, steps=45, lr=0.01, compile=compile, progress=False, seed=0)
    assert history.traced == (compile == "traced")
    return history.losses, [value.detach() for value in (*guide.parameters(), *model.buffers())]


def test_buffers_that_a_network_changes_are_changed_once_a_step() -> None:
    eager, taped = (trained(compile) for compile in (False, "traced"))
    torch.testing.assert_close(eager, taped, rtol=1e-4, atol=1e-5)
