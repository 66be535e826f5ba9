"""A training uses as many threads as its steps have work for, and leaves torch's number as it was."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pyro_dropout as pd
from pyro_dropout.engines.threads import Work

X = torch.linspace(-1, 1, 30).unsqueeze(-1)


@pytest.fixture
def two() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


class Watching(nn.Module):
    """A layer that notes how many threads there are when it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(1, 1), []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(torch.get_num_threads())
        if len(self.seen) > 20:
            raise RuntimeError("enough")
        out: Tensor = self.layer(x)
        return out


def fitted(**options: Any) -> list[int]:
    net = Watching()
    model = pd.BayesianNet(net)
    net.seen.clear()
    pd.fit(model, pd.AutoDropout(model), X, X, compile=False, progress=False, **options)
    return net.seen


def test_a_small_network_has_one_thread_and_torch_its_own_again(two: None) -> None:
    assert set(fitted(steps=5)[-5:]) == {1}
    assert torch.get_num_threads() == 2


def test_an_error_leaves_torchs_number(two: None) -> None:
    with pytest.raises(RuntimeError, match="enough"):
        fitted(steps=40)
    assert torch.get_num_threads() == 2


def test_the_same_seed_gives_the_same_losses_with_one_thread_and_with_two(two: None) -> None:
    found = []
    for number in (1, 2):
        torch.set_num_threads(number)
        torch.manual_seed(0)
        model = pd.BayesianNet(nn.Sequential(nn.Linear(1, 20), nn.ReLU(), nn.Linear(20, 1)))
        guide = pd.AutoDropout(model)
        found.append(pd.fit(model, guide, X, X, steps=10, compile=False, progress=False, seed=0).losses)
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("net", "shape", "products"),
    [
        (nn.Linear(20, 30), (10, 20), 10 * 20 * 30),
        (nn.Conv2d(3, 4, 5, padding=2), (2, 3, 16, 16), 2 * 16 * 16 * 3 * 4 * 25),
        (nn.LSTM(6, 7, batch_first=True), (2, 5, 6), 2 * 5 * 4 * 7 * (6 + 7)),
    ],
)
def test_work_is_counted_from_shapes(net: nn.Module, shape: tuple[int, ...], products: int) -> None:
    with torch.no_grad(), Work() as work:
        net(torch.zeros(shape))
    assert work.products == pytest.approx(products, rel=0.2)
