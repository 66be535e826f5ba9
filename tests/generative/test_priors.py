"""How wide the prior of each weight is, by the paper's rule: written out here once more, layer by layer."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pyro_dropout as pd
from pyro_dropout import BayesianNet, Prior
from tests.contracts.models import mlp, recurrent, tied, words


def widths(prior: Prior, net: nn.Module) -> dict[str, float]:
    return {name: scale.item() for name, scale in prior.scales(net.double()).items()}


# net, and 1/std of every weight by hand: the first is l = 2; later ones the root of how many products are summed
BY_HAND: dict[str, tuple[Callable[[], nn.Module], dict[str, float]]] = {
    "mlp": (mlp, {"0.weight": 2.0, "2.weight": math.sqrt(4)}),
    "a width of one": (
        lambda: nn.Sequential(nn.Linear(3, 1), nn.ReLU(), nn.Linear(1, 2)),
        {"0.weight": 2.0, "2.weight": 1.0},
    ),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 6, (3, 2)), nn.Flatten(), nn.Linear(6, 1)),
        {"0.weight": 2.0, "1.weight": math.sqrt(4 * 6), "3.weight": math.sqrt(6)},
    ),
    "groups": (
        lambda: nn.Sequential(nn.Conv1d(2, 4, 3), nn.Conv1d(4, 4, 3, groups=2), nn.ConvTranspose1d(4, 6, 3, groups=2)),
        {"0.weight": 2.0, "1.weight": math.sqrt(2 * 3), "2.weight": math.sqrt(2 * 3)},
    ),
    "transposed": (
        lambda: nn.Sequential(nn.ConvTranspose2d(2, 3, 2), nn.ConvTranspose2d(3, 5, 2)),
        {"0.weight": 2.0, "1.weight": math.sqrt(3 * 4)},
    ),
    "transposed with a stride": (
        lambda: nn.Sequential(nn.ConvTranspose1d(2, 3, 2), nn.ConvTranspose2d(3, 5, (4, 2), stride=(2, 3))),
        {"0.weight": 2.0, "1.weight": math.sqrt(3 * 2)},
    ),
    "words": (words, {"net.0.weight": 2.0, "net.1.weight": math.sqrt(3)}),
    "two vocabularies": (
        lambda: nn.ModuleList([nn.Linear(2, 3), nn.Embedding(5, 3)]),
        {"0.weight": 2.0, "1.weight": 2.0},
    ),
    "tied": (tied, {"net.0.weight": 2.0}),
    "recurrent": (
        lambda: recurrent(nn.LSTM(2, 3, num_layers=2, bidirectional=True)),
        {
            "net.0.weight_ih_l0": 2.0,
            "net.0.weight_hh_l0": math.sqrt(3),
            "net.0.weight_ih_l0_reverse": math.sqrt(2),
            "net.0.weight_hh_l0_reverse": math.sqrt(3),
            "net.0.weight_ih_l1": math.sqrt(6),
            "net.0.weight_hh_l1": math.sqrt(3),
            "net.0.weight_ih_l1_reverse": math.sqrt(6),
            "net.0.weight_hh_l1_reverse": math.sqrt(3),
            "net.1.weight": math.sqrt(3),
        },
    ),
}


@pytest.mark.parametrize("case", BY_HAND)
def test_later_layers_are_as_wide_as_their_inputs_allow(case: str) -> None:
    make, expected = BY_HAND[case]
    found = widths(Prior(length_scale=2.0, bias_length_scale=4.0), make())
    assert {name: 1 / scale for name, scale in found.items() if name in expected} == pytest.approx(expected, rel=1e-15)
    assert all(scale == 0.25 for name, scale in found.items() if name not in expected)


def test_length_scales_by_name() -> None:
    """A site that is named gets l⁻² at any depth; one that is not gets what it would have by default."""
    by_dict = widths(Prior({"2.weight": 5.0}, {"0.bias": 10.0}), mlp())
    assert by_dict == {"0.weight": 1.0, "0.bias": 0.1, "2.weight": 0.2, "2.bias": 1.0}
    by_function = widths(Prior(lambda name: 5.0 if name == "2.weight" else None), mlp())
    assert by_function == {"0.weight": 1.0, "0.bias": 1.0, "2.weight": 0.2, "2.bias": 1.0}
    assert widths(Prior(lambda name: 4.0), mlp())["2.weight"] == 0.25
    model = BayesianNet(mlp(), Prior({"2.weight": 5.0}))
    assert model.prior_of("2.weight").stddev.unique().item() == pytest.approx(0.2)


def test_a_length_scale_for_each_input() -> None:
    model = BayesianNet(mlp(), Prior(torch.tensor([1.0, 4.0])))
    assert torch.equal(model.prior_of("0.weight").stddev, torch.tensor([1.0, 0.25]).expand(4, 2))
    assert torch.equal(model.prior_of("2.weight").stddev, torch.full((1, 4), 0.5))


def test_widths_that_fit_two_dimensions_say_which() -> None:
    """Of three channels and three columns of a kernel, torch's broadcasting would take the columns."""
    net, lengths = nn.Conv2d(3, 4, 3, bias=False), torch.tensor([1.0, 2.0, 4.0])
    with pytest.raises(pd.errors.ShapeError, match=r"which dimension it is for; got \(3,\)\. Write \(3, 1, 1\)"):
        BayesianNet(net, Prior(lengths))
    found = BayesianNet(net, Prior(lengths.reshape(3, 1, 1))).prior_of("weight").stddev
    assert torch.equal(found, (1 / lengths).reshape(3, 1, 1).expand(4, 3, 3, 3))


# --- the default ------------------------------------------------------------------------------------------------------


@pytest.mark.thinned(3)
@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("inputs", [1, 13, 784])
@pytest.mark.parametrize("width", [50, *(pytest.param(width, marks=pytest.mark.deep) for width in (512, 4096))])
def test_functions_of_the_default_prior_have_a_size_near_one(
    width: int, inputs: int, depth: int, activation: Any
) -> None:
    """Of 60 functions at 20 standardised inputs; the bounds are many standard errors away."""
    sizes, layers = [inputs, *[width] * depth, 1], []
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Linear(before, after), activation()]
    model, x = pd.BayesianNet(nn.Sequential(*layers[:-1])), torch.randn(20, inputs)
    f = torch.stack([model(x) for _ in range(60)])
    assert 0.5 < f.std() < 2.8


def test_a_prior_that_is_written_out_is_the_papers() -> None:
    net = nn.Sequential(nn.Linear(784, 30), nn.ReLU(), nn.Linear(30, 1))
    assert not pd.Prior().tempered
    assert pd.Prior().scales(net)["0.weight"] == 1
    assert pd.Prior().point_temperatures(net) == {}
    default = pd.BayesianNet(net).prior
    assert (default.width_scaled, default.tempered) == ("all", True)
    with pytest.raises(pd.errors.PyroDropoutError, match=r"Prior\(learn=...\) is for linear models"):
        pd.BayesianNet(net, pd.Prior(learn=True))
    pd.BayesianNet(net, pd.Prior(learn=True, tempered=False))
    lengths = torch.rand(784) + 0.5  # one for each input is kept
    assert default.point_temperatures(net)["2.weight"] == pytest.approx(1 / 30)
    assert pd.Prior(lengths, width_scaled="all").scales(net)["0.weight"].shape == (784,)
