"""What is not random by default: normalisation under any name, tables of positions, tokens for all points."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import pyro_dropout as pd
from tests.networks.language import GPT2
from tests.networks.zoo import VisionTransformer


class LlamaRMSNorm(nn.Module):
    """transformers': a weight and nothing else."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class Own(LlamaRMSNorm):
    """Known by its base."""


class LayerScale(nn.Module):
    """timm's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width,), 1e-2))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class NormFreeNet(nn.Module):
    """Not a normalisation, whatever its name: it has matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.weight, self.pos_embed = (nn.Parameter(torch.zeros(*s)) for s in ((2, 3), (1, 3, 2), (4, 2)))
        self.position_head, self.embed_positions = nn.Linear(3, 2), nn.Embedding(4, 2)
        self.relative = nn.ModuleDict({"words": nn.Embedding(4, 2)})


def test_normalisation_is_known_by_its_name() -> None:
    net = nn.Sequential(nn.Linear(3, 4), LlamaRMSNorm(4), Own(4), LayerScale(4), nn.LayerNorm(4), nn.PReLU(4))
    assert list(pd.BayesianNet(net).sites) == ["0.weight", "0.bias", "5.weight"]
    assert "ordinary, trained: 1.weight, 2.weight, 3.gamma, 4.weight, 4.bias" in repr(pd.BayesianNet(net))


def test_positions_are_known_by_the_name_of_their_table() -> None:
    model = pd.BayesianNet(NormFreeNet())
    assert set(model.hidden_parameters()) == {"pos_embed", "embed_positions.weight"}


@pytest.mark.parametrize("make", [GPT2, VisionTransformer])
@pytest.mark.thinned(2)
def test_a_network_with_positions_has_draws_for_each_point(make: Callable[[], nn.Module]) -> None:
    model = pd.BayesianNet(make().eval())
    guide = pd.AutoDropout(model, keep=0.7)
    x = torch.randint(7, (3, 5)) if make is GPT2 else torch.randn(3, 1, 8, 8)
    assert pd.predict(model, guide, x, samples=20, seed=0).epistemic.min() > 0
    hidden = {"wpe.weight"} if make is GPT2 else {"cls_token", "pos_embed"}
    assert hidden <= set(model.hidden_parameters())
