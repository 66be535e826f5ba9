"""Which parameters are random, and how they are read: rows and fan-in by layer; norms, positions and tokens are not."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import pyro_dropout as pd
from tests.networks.layers import Parts
from tests.networks.zoo import VisionTransformer, gpt2, quiet_import

# layer -> {parameter: (kind, dimension of the rows, fan-in)}
LAYOUTS: dict[str, tuple[Callable[[], nn.Module], dict[str, tuple[str, int, int]]]] = {
    "linear": (lambda: nn.Linear(3, 5), {"weight": ("weight", 1, 3), "bias": ("bias", 0, 1)}),
    "transformers' Conv1D": (
        lambda: quiet_import("transformers.pytorch_utils").Conv1D(5, 3),
        {"weight": ("weight", 0, 3), "bias": ("bias", 0, 1)},
    ),
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


def test_an_assumed_layout_is_said() -> None:
    parts = {"linear": nn.Linear(3, 4), "matrix": nn.Parameter(torch.randn(4, 2))}
    model = pd.BayesianNet(Parts(lambda net, x: net.linear(x) @ net.matrix, **parts))
    assert "assumed to be (out, in, ...): matrix" in repr(model)
    assert not model.sites["linear.weight"].assumed
    assert model.sites["matrix"].assumed


class LlamaRMSNorm(nn.Module):
    """transformers': a weight and nothing else."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class NormFreeNet(nn.Module):
    """Not a normalisation, whatever its name: it has matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.weight, self.pos_embed = (nn.Parameter(torch.zeros(*s)) for s in ((2, 3), (1, 3, 2), (4, 2)))
        self.position_head, self.embed_positions = nn.Linear(3, 2), nn.Embedding(4, 2)
        self.relative = nn.ModuleDict({"words": nn.Embedding(4, 2)})


def test_normalisation_is_known_by_its_name() -> None:
    net = nn.Sequential(nn.Linear(3, 4), LlamaRMSNorm(4), nn.LayerNorm(4), nn.PReLU(4))
    assert list(pd.BayesianNet(net).sites) == ["0.weight", "0.bias", "3.weight"]
    assert "ordinary, trained: 1.weight, 2.weight, 2.bias" in repr(pd.BayesianNet(net))


def test_positions_are_known_by_the_name_of_their_table() -> None:
    model = pd.BayesianNet(NormFreeNet())
    assert set(model.hidden_parameters()) == {"pos_embed", "embed_positions.weight"}


@pytest.mark.parametrize("make", [gpt2, VisionTransformer])
@pytest.mark.thinned(2)
def test_a_network_with_positions_has_draws(make: Callable[[], nn.Module]) -> None:
    """For each point, but of GPT-2, whose Conv1D lays the positions of all points out in one dimension."""
    model = pd.BayesianNet(make().eval())
    guide = pd.AutoDropout(model, keep=0.7)
    x = torch.randint(7, (3, 5)) if make is gpt2 else torch.randn(3, 1, 8, 8)
    assert pd.predict(model, guide, x, samples=20, seed=0, shared=make is gpt2).epistemic.min() > 0
    hidden = {"net.transformer.wpe.weight"} if make is gpt2 else {"cls_token", "pos_embed"}
    assert hidden <= set(model.hidden_parameters())
