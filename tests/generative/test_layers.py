"""Layers that are written out for a draw per data point: equal to torch's own when all draws are equal."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pyro import poutine
from torch import Tensor, nn

from pyro_dropout import AutoDropout, AutoMeanField, BayesianNet, per_example, predict
from pyro_dropout.errors import PyroDropoutError
from tests.networks.layers import Output

F64 = torch.float64
N, T = 3, 4

# Guides whose draws are all the network itself, up to 1e-9: a row is dropped once in 10⁹ rows, so that a test fails
# with probability below 1e-6.
DEGENERATE: dict[str, Callable[[BayesianNet], Any]] = {
    "masks": lambda model: AutoDropout(model, keep=1 - 1e-9),
    "masks and dropped biases": lambda model: AutoDropout(model, keep=1 - 1e-9, bias="dropout"),
    "noise": lambda model: AutoMeanField(model, init_scale=1e-9),
}


def per_point(model: BayesianNet, guide: Any, x: Tensor) -> Tensor:
    """The model's output with a draw of the guide for each data point."""
    with per_example():
        trace = poutine.trace(guide).get_trace(x)
        return poutine.replay(model, trace=trace)(x)


def check_against_torch(net: nn.Module, x: Tensor, guide: str) -> None:
    """The written-out layers give what torch's own give, in value and in the gradient for the input."""
    model = BayesianNet(net.to(F64))
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    f, expected = per_point(model, DEGENERATE[guide](model), mine), net(theirs)
    assert torch.allclose(f, expected, rtol=1e-6, atol=1e-6)
    (slope,) = torch.autograd.grad(f.square().sum(), mine)
    (expected_slope,) = torch.autograd.grad(expected.square().sum(), theirs)
    assert torch.allclose(slope, expected_slope, rtol=1e-6, atol=1e-6)


class Recurrence(nn.Module):
    """All outputs and last states of a recurrent layer, in one row for each data point."""

    def __init__(self, layer: Any, start: bool = False) -> None:
        super().__init__()
        self.layer, self.start = layer, start

    def forward(self, x: Tensor) -> Tensor:
        directions = self.layer.num_layers * (2 if self.layer.bidirectional else 1)
        zero = torch.linspace(-1, 1, directions * len(x) * 3, dtype=x.dtype).reshape(directions, len(x), 3)
        hx = ((zero, 2 * zero) if isinstance(self.layer, nn.LSTM) else zero) if self.start else None
        out, states = self.layer(x if self.layer.batch_first else x.transpose(0, 1), hx)
        out = out if self.layer.batch_first else out.transpose(0, 1)
        states = states if isinstance(states, tuple) else (states,)
        return torch.cat([out.flatten(1), *(s.transpose(0, 1).flatten(1) for s in states)], -1)


RECURRENT: dict[str, Callable[..., nn.Module]] = {
    "tanh": nn.RNN,
    "relu": lambda *sizes, **options: nn.RNN(*sizes, nonlinearity="relu", **options),
    "lstm": nn.LSTM,
    "gru": nn.GRU,
}


@pytest.mark.parametrize("guide", DEGENERATE)
@pytest.mark.parametrize(("layers", "both", "first"), [(1, False, True), (1, False, False), (2, True, True)])
@pytest.mark.parametrize("cell", RECURRENT)
@pytest.mark.thinned(2)
def test_recurrent_layers(cell: str, layers: int, both: bool, first: bool, guide: str) -> None:
    options = {"num_layers": layers, "bidirectional": both, "batch_first": first}
    net = Recurrence(RECURRENT[cell](2, 3, **options), start=both)
    check_against_torch(net, torch.randn(N, T, 2, dtype=F64), guide)


# --- attention --------------------------------------------------------------------------------------------------------


PADDING = torch.tensor([[False] * 4, [False, False, False, True], [False, True, True, False]])
CAUSAL = torch.ones(T, T).triu(1).bool()
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "padding": {"key_padding_mask": PADDING},
    "causal": {"attn_mask": CAUSAL},
    "added": {"attn_mask": torch.linspace(-1, 1, T * T, dtype=F64).reshape(T, T)},
    "one for each head": {"attn_mask": torch.linspace(-1, 1, 2 * N * T * T, dtype=F64).reshape(2 * N, T, T)},
    "both": {"attn_mask": CAUSAL, "key_padding_mask": PADDING},
}


def cycled(mask: Any, count: int) -> Any:
    """A mask with one row for each data point or head, for any number of data points; any other as it is."""
    if not isinstance(mask, Tensor) or len(mask) not in (N, 2 * N):
        return mask
    return mask[torch.arange(count * len(mask) // N) % len(mask)]


class Attend(nn.Module):
    """Multi-head attention with all it returns; with ``cross``, keys and values are other things than queries."""

    def __init__(self, masks: dict[str, Any], cross: bool = False, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True, **options)
        self.masks, self.cross = masks, cross

    def forward(self, x: Tensor) -> Tensor:
        key, value = (x.flip(1), 2 * x) if self.cross else (x, x)
        masks = {name: cycled(mask, len(x)) for name, mask in self.masks.items()}
        out, weights = self.attention(x, key, value, **masks)
        return out.flatten(1) if weights is None else torch.cat([out.flatten(1), weights.flatten(1)], -1)


@pytest.mark.parametrize("guide", ["masks", "noise"])
@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.thinned(2)
def test_attention(masks: str, cross: bool, guide: str) -> None:
    check_against_torch(Attend(MASKS[masks], cross), torch.randn(N, T, 4, dtype=F64), guide)


def encoder_layer(**options: Any) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, batch_first=True, **options)


def encode(encoder: nn.Module) -> nn.Module:
    """A stack of encoder layers, with padding."""
    return Output(encoder, lambda net, x: net(x, src_key_padding_mask=cycled(PADDING, len(x))).flatten(1))


TRANSFORMERS: dict[str, Callable[[], nn.Module]] = {
    "encoder layer": lambda: encode(encoder_layer()),
    "norm first": lambda: encode(encoder_layer(norm_first=True, activation="gelu")),
    "two layers": lambda: encode(nn.TransformerEncoder(encoder_layer(), 2, enable_nested_tensor=False)),
}


@pytest.mark.parametrize("guide", DEGENERATE)
@pytest.mark.parametrize("kind", TRANSFORMERS)
def test_transformers(kind: str, guide: str) -> None:
    check_against_torch(TRANSFORMERS[kind](), torch.randn(N, T, 4, dtype=F64), guide)


# --- one mask for a whole sequence ----------------------------------------------------------------------------------


def recurrence_with(w_ih: Tensor, w_hh: Tensor, start: bool = False) -> BayesianNet:
    net = Recurrence(nn.RNN(3, 3, nonlinearity="relu", bias=False, batch_first=True), start).to(F64)
    with torch.no_grad():
        net.layer.weight_ih_l0.copy_(w_ih)
        net.layer.weight_hh_l0.copy_(w_hh)
    return BayesianNet(net)


EYE, ZERO = torch.eye(3, dtype=F64), torch.zeros(3, 3, dtype=F64)


def test_one_mask_of_inputs_for_all_steps() -> None:
    """h_t = z∘x_t, so that constant input gives constant output; all masks alike have probability 2⁻⁶."""
    model = recurrence_with(EYE, ZERO)
    guide = AutoDropout(model, keep=0.5, init="module")
    outputs = per_point(model, guide, torch.ones(N, T, 3, dtype=F64))[:, : T * 3].reshape(N, T, 3)
    assert torch.equal(outputs, outputs[:, :1].expand_as(outputs))
    assert set(outputs.unique().tolist()) == {0.0, 2.0}
    assert len(outputs[:, 0].unique(dim=0)) > 1


# --- masks of convolutions and lookups, by enumeration ----------------------------------------------------------------


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
    each = []
    for kept in itertools.product((0.0, 1.0), repeat=rows):
        weight = q.loc * q.per_row(torch.tensor(kept, dtype=F64))
        each.append(model.evaluate({"net.weight": weight, "net.bias": bias}, x))
    hits = torch.stack([torch.isclose(f, masked, atol=1e-10).all(-1) for masked in each])
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


def pack(x: Tensor) -> Any:
    return nn.utils.rnn.pack_padded_sequence(x, torch.full((len(x),), T), batch_first=True)


REFUSED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "packed": (
        lambda: Output(nn.RNN(2, 3, batch_first=True), lambda net, x: net(pack(x))[1][0]),
        (N, T, 2),
        "not packed",
    ),
    "projected": (lambda: Recurrence(nn.LSTM(2, 3, proj_size=2, batch_first=True)), (N, T, 2), "proj_size"),
    "a cell": (lambda: Output(nn.GRUCell(2, 3), lambda net, x: net(x)), (N, 2), "gru_cell"),
    "attention with a zero": (lambda: Attend({}, add_zero_attn=True), (N, T, 4), "add_zero_attn"),
    "max_norm": (
        lambda: Output(nn.Embedding(3, 2, max_norm=1.0), lambda net, x: net(x.long()).flatten(1)),
        (N, T),
        "max_norm",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_written_out_is_refused(case: str) -> None:
    make, shape, message = REFUSED[case]
    model = BayesianNet(make())
    with pytest.raises(PyroDropoutError, match=message):
        per_point(model, AutoDropout(model), torch.zeros(shape))


class Doubled(nn.LSTM):
    def forward(self, x: Tensor, hx: Any = None) -> Any:
        h, state = super().forward(2 * x, hx)
        return 2 * h, state


class Shifted(nn.MultiheadAttention):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        h, weights = super().forward(*args, **kwargs)
        return h + 7, weights


@pytest.mark.parametrize(
    "layer", [Doubled(4, 4, batch_first=True), Shifted(4, 2, batch_first=True)], ids=["lstm", "mha"]
)
def test_a_forward_pass_of_its_own_is_not_replaced(layer: nn.Module) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.out = layer, nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.out((self.layer(x) if isinstance(layer, nn.LSTM) else self.layer(x, x, x))[0][:, -1])

    net, x = Net(), torch.randn(5, 3, 4)
    model = BayesianNet(net)
    guide = AutoMeanField(model, init_scale=1e-6)
    with pytest.raises(PyroDropoutError, match=r"which is not a layer that it can rewrite.*shared=True"):
        predict(model, guide, x, samples=2)
    found = predict(model, guide, x, samples=2, shared=True).mean
    torch.testing.assert_close(found, net(x).detach(), rtol=1e-3, atol=1e-3)
