"""Layers with a draw for each data point: masks by enumeration, and layers for which there are none."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from pyro_dropout import AutoDropout, BayesianNet, predict
from pyro_dropout.errors import PyroDropoutError
from tests.networks.agreement import masked, per_point
from tests.networks.layers import Output

F64 = torch.float64


WITH_ROWS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "linear": (lambda: nn.Linear(3, 2), (3,), 3),
    "convolution": (lambda: nn.Conv2d(3, 2, 2), (3, 3, 3), 3),
    "convolution in groups": (lambda: nn.Conv2d(6, 4, 2, groups=2, padding=1, stride=2), (6, 3, 3), 3),
    "convolution by channel": (lambda: nn.Conv1d(3, 6, 3, groups=3, padding="same"), (3, 5), 1),
    "transposed": (lambda: nn.ConvTranspose2d(3, 2, 2, stride=2), (3, 2, 2), 3),
    "transposed in groups": (lambda: nn.ConvTranspose1d(4, 6, 2, groups=2, dilation=2), (4, 3), 4),
    "three dimensions": (lambda: nn.Conv3d(2, 2, 2), (2, 2, 2, 2), 2),
}


@pytest.mark.parametrize("case", WITH_ROWS)
def test_each_point_has_a_mask_over_rows(case: str) -> None:
    """Every output is that of one of the 2^rows masked weights; of 40 points, not all have the same (p < 1e-11)."""
    make, shape, rows = WITH_ROWS[case]
    model = BayesianNet(Output(make(), lambda net, x: net(x).flatten(1)).to(F64))
    guide = AutoDropout(model, keep=0.5)
    q = guide.posterior("net.weight")
    assert q.rows == rows
    x = torch.randn(40, *shape, dtype=F64)
    f = per_point(model, guide, x)
    bias = model.net.net.bias.detach()
    each = [model.evaluate({"net.weight": weight, "net.bias": bias}, x) for weight in masked(q)]
    hits = torch.stack([torch.isclose(f, one, atol=1e-10).all(-1) for one in each])
    assert hits.any(0).all()
    assert (hits.sum(1) > 0).sum() > 1


def test_a_dropped_word_is_dropped_everywhere_in_a_sentence() -> None:
    model = BayesianNet(Output(nn.Embedding(3, 2, padding_idx=0), lambda net, x: net(x).flatten(1)))
    f = per_point(model, AutoDropout(model, keep=0.5), torch.tensor([[1, 2, 1, 0]] * 40)).reshape(40, 4, 2)
    assert torch.equal(f[:, 0], f[:, 2])
    kept = f.abs().amax(-1) > 0
    assert not kept[:, 3].any()  # the padding's vector is zero
    assert 0 < kept[:, 0].float().mean() < 1
    assert not torch.equal(kept[:, 0], kept[:, 1])


# --- what is refused --------------------------------------------------------------------------------------------------


def of_sequences(layer: nn.Module) -> Callable[[], nn.Module]:
    return lambda: Output(layer, lambda net, x: (net(x) if isinstance(net, nn.RNNBase) else net(x, x, x))[0][:, -1])


REFUSED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "recurrent": (of_sequences(nn.LSTM(4, 3, batch_first=True)), (3, 4, 4), "lstm"),
    "attention": (of_sequences(nn.MultiheadAttention(4, 2, batch_first=True)), (3, 4, 4), "multi_head_attention"),
    "a cell": (lambda: Output(nn.GRUCell(2, 3), lambda net, x: net(x)), (3, 2), "gru_cell"),
    "max_norm": (
        lambda: Output(nn.Embedding(3, 2, max_norm=1.0), lambda net, x: net(x.long()).flatten(1)),
        (3, 4),
        "max_norm",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_layers_that_are_no_products_share_their_draws(case: str) -> None:
    make, shape, message = REFUSED[case]
    model = BayesianNet(make())
    guide, x = AutoDropout(model), torch.zeros(shape)
    with pytest.raises(PyroDropoutError, match=message):
        per_point(model, guide, x)
    with pytest.raises(PyroDropoutError, match="shared=True"):
        predict(model, guide, x, samples=2)
    assert predict(model, guide, x, samples=2, shared=True).mean.shape[0] == 3
