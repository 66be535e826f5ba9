"""Which dimension of a weight is its rows, and how many products are summed: by layer, and said where it is assumed."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import pyro_dropout as pd
from tests.networks.language import Conv1D

# layer -> {parameter: (kind, dimension of the rows, fan-in)}
LAYOUTS: dict[str, tuple[Callable[[], nn.Module], dict[str, tuple[str, int, int]]]] = {
    "linear": (lambda: nn.Linear(3, 5), {"weight": ("weight", 1, 3), "bias": ("bias", 0, 1)}),
    "transformers' Conv1D": (lambda: Conv1D(5, 3), {"weight": ("weight", 0, 3), "bias": ("bias", 0, 1)}),
    "grouped convolution": (lambda: nn.Conv2d(4, 6, 3, groups=2, bias=False), {"weight": ("weight", 1, 18)}),
    "transposed convolution": (
        lambda: nn.ConvTranspose1d(4, 6, 3, groups=2, bias=False), {"weight": ("weight", 0, 6)},
    ),
    "embedding": (lambda: nn.Embedding(4, 6), {"weight": ("weight", 0, 1)}),
    "bag": (lambda: nn.EmbeddingBag(4, 6), {"weight": ("weight", 0, 1)}),
    "bilinear": (lambda: nn.Bilinear(2, 3, 5, bias=False), {"weight": ("weight", 1, 6)}),
    "attention": (
        lambda: nn.MultiheadAttention(4, 2, bias=False, add_bias_kv=True),
        {"in_proj_weight": ("weight", 1, 4), "bias_k": ("bias", 0, 1), "bias_v": ("bias", 0, 1),
         "out_proj.weight": ("weight", 1, 4)},
    ),
    "attention with maps of its own": (
        lambda: nn.MultiheadAttention(4, 2, bias=False, kdim=3, vdim=2),
        {"q_proj_weight": ("weight", 1, 4), "k_proj_weight": ("weight", 1, 3), "v_proj_weight": ("weight", 1, 2),
         "out_proj.weight": ("weight", 1, 4)},
    ),
    "lstm": (
        lambda: nn.LSTM(2, 3, bias=False, proj_size=1),
        {"weight_ih_l0": ("weight", 1, 2), "weight_hh_l0": ("weight", 1, 1), "weight_hr_l0": ("weight", 1, 3)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_layout_of_known_layers(name: str) -> None:
    make, expected = LAYOUTS[name]
    model = pd.BayesianNet(make())
    assert {site.name: (site.kind, site.row_dim, site.fan_in) for site in model.sites.values()} == expected
    assert "assumed" not in repr(model)
    guide = pd.AutoDropout(model, keep=0.5, bias="dropout")
    assert {name: value.shape for name, value in guide.sample_weights(2).items()} == {
        name: (2, *model.net.get_parameter(name).shape) for name in expected
    }


def test_conv1d_has_a_draw_for_each_data_point() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(Conv1D(6, 4), nn.Flatten())
    model = pd.BayesianNet(net)
    guide = pd.AutoDropout(model, keep=0.5)
    x = torch.randn(1, 3, 4).expand(4000, 3, 4)
    own = pd.predict(model, guide, x, samples=1).samples[0]
    with torch.no_grad():
        mask = torch.bernoulli(torch.full((4000, 1, 4), 0.5)) / 0.5  # one for all positions of a data point
        expected = net(x * mask)
    assert torch.allclose(own.mean(0), expected.mean(0), atol=0.15)
    assert torch.allclose(torch.cov(own.T), torch.cov(expected.T), atol=0.35)


class OwnMatrix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.matrix = nn.Linear(3, 4), nn.Parameter(torch.randn(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) @ self.matrix


def test_an_assumed_layout_is_said() -> None:
    model = pd.BayesianNet(OwnMatrix())
    assert "assumed to be (out, in, ...): matrix" in repr(model)
    assert not model.sites["linear.weight"].assumed
    assert model.sites["matrix"].assumed
