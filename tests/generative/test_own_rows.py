"""Operations that mix data points are refused whatever they are called, and those that do not are followed."""

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyro_dropout import ELBO, AutoDropout, BayesianNet
from pyro_dropout.errors import NotFollowedError
from tests.networks.layers import Parts

D = 4
Use = Callable[[Tensor], Tensor]


def network(use: Use) -> BayesianNet:
    """A layer, and what is made of its output h, (N, 4)."""
    return BayesianNet(Parts(lambda net, x: net.use(net.layer(x)), layer=nn.Linear(2, D), use=use))


def program(use: Use) -> Callable[..., None]:
    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("layer.weight", dist.Normal(0.0, 1.0).expand([2, D]).to_event(2))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(use(x @ w), 1.0).to_event(1), obs=y)

    return model


DOORS: dict[str, Callable[[Use], Any]] = {"network": network, "Pyro model": program}


def loss(model: Any, count: int) -> float:
    x = torch.randn(count, 2)
    return ELBO().loss(model, AutoDropout(model, keep=0.5), x, torch.zeros(count, D))


class Centred(torch.autograd.Function):
    """Subtracts the mean over points, forward and backward."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h - h.mean(0)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        return slope - slope.mean(0)


class CentredGradient(Centred):
    """Changes nothing but the gradient."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h.clone()


def over_points(layer: nn.Module) -> Use:
    return lambda h: layer(h.T.unsqueeze(0)).squeeze(0).T


MIXING: dict[str, Use] = {
    "renorm": lambda h: torch.renorm(h, 2, 1, 1.0),
    "pseudo-inverse": lambda h: torch.linalg.pinv(h).T,
    "qr": lambda h: h.new_zeros(len(h), D) + torch.linalg.qr(h)[0].sum(1, keepdim=True),
    "singular values": lambda h: h / torch.linalg.svdvals(h).amax(),
    "layer_norm over points": lambda h: F.layer_norm(h.T, (len(h),)).T,
    "group_norm over points": over_points(nn.GroupNorm(1, D)),
    "convolution over points": over_points(nn.Conv1d(D, D, 3, padding=1)),
    "pooling over points": over_points(nn.AvgPool1d(3, 1, 1)),
    "attention": lambda h: F.scaled_dot_product_attention(h, h, h),
    "einsum": lambda h: torch.einsum("nd,md,mk->nk", h, h, h),
    "einsum without a sum over points": lambda h: h + torch.einsum("nd,md->nm", h, h).diagonal().sum(),
    "fft": lambda h: torch.fft.fft(h, dim=0).real,
    "index_add": lambda h: torch.zeros_like(h).index_add(0, torch.arange(len(h)) // 2, h),
    "scatter": lambda h: h.scatter(0, torch.zeros(1, D, dtype=torch.long), h[-1:]),
    "distances": lambda h: torch.cdist(h, h) @ h,
    "strides": lambda h: h + h.as_strided((1, D), (D, 1)),
    "renamed sum": lambda h: h + torch._foreach_norm([h])[0],
    "by the largest": lambda h: h * F.one_hot(h.argmax(0), len(h)).T,
    "signs": lambda h: h + torch.sign(h).detach().cumsum(0),
    "nan-safe mean": lambda h: h - torch.nanmean(h, 0),
    "one by one": lambda h: torch.stack([row - h[i - 1] for i, row in enumerate(h)]),
    "detached": lambda h: h + h.detach().norm(dim=0),
    "an own function": Centred.apply,
    "an own gradient": CentredGradient.apply,
    "batch statistics by hand": lambda h: (h - h.mean(0)) / h.std(0),
    "turned, if it can be": lambda h: h.T if h.shape[0] == h.shape[1] else h,
    "neighbours": lambda h: 0.5 * (h + h.roll(1, 0)),
    "moved": lambda h: h.roll(1, 0),
    "turned over": lambda h: torch.rot90(h, 2),
    "in a block of two": lambda h: torch.cat([part - part.amax(0) for part in h.split(2)]),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("use", MIXING)
@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.thinned(3)
def test_points_that_mix_are_refused(use: str, door: str) -> None:
    """Whatever the operation is called, and where only gradients mix; 4 points of 4 numbers, and more points."""
    for count in (D, 9):
        if (use, count) != ("turned, if it can be", 9):
            with pytest.raises(NotFollowedError, match=r"'layer\.(weight|bias)' .*per_example=False"):
                loss(DOORS[door](MIXING[use]), count)


OWN: dict[str, Use] = {
    "normalised": lambda h: F.layer_norm(h, (D,)),
    "a group each": lambda h: F.group_norm(h, 2),
    "in training": nn.BatchNorm1d(D, affine=False),
    "of this batch": nn.BatchNorm1d(D, track_running_stats=False),
    "called by torch's name": lambda h: torch.batch_norm(h, None, None, None, None, True, 0.1, 1e-5, False),
    "in evaluation": nn.BatchNorm1d(D).eval(),
    "with noise": lambda h: F.dropout(h, 0.5) + torch.rand_like(h),
    "rounded": lambda h: h.bfloat16().float(),
    "far away": lambda h: 1e6 + h,
    "not a number": lambda h: torch.where(h > 0, h, float("nan")).nan_to_num(),
    "sorted": lambda h: h.sort(-1)[0],
    "outer products": lambda h: torch.einsum("nd,ne->nde", h, h).sum(-1),
    "inverses": lambda h: torch.linalg.inv(torch.eye(D) * 100 + h[:, :, None] * h[:, None]) @ torch.ones(D),
    "there and back": lambda h: h.T.contiguous().T.flatten().reshape(-1, 2, 2).transpose(1, 2).flatten(1),
    "an own function": lambda h: torch.utils.checkpoint.checkpoint(torch.tanh, h, use_reentrant=False),
    "of data": lambda h: h - torch.arange(len(h) + 0.0).mean(),
    "only read": lambda h: h + 0 * float(h.shape[0]),
    "rolled": lambda h: h.roll(1, -1),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("use", OWN)
@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.thinned(2)
def test_points_on_their_own_are_followed(use: str, door: str) -> None:
    for count in (D, 9):
        assert loss(DOORS[door](OWN[use]), count) > 0


def test_a_mixture_behind_a_zero_is_seen() -> None:
    """A trained factor that begins at zero hides what it multiplies, for one step."""
    norm = nn.LayerNorm(D)
    nn.init.zeros_(norm.weight)
    gated = lambda net, x: x.sum(1, keepdim=True) + net.norm(torch.renorm(net.layer(x), 2, 1, 1.0))  # noqa: E731
    with pytest.raises(NotFollowedError, match=r"'layer\.weight'"):
        loss(BayesianNet(Parts(gated, layer=nn.Linear(2, D), norm=norm)), 9)


class OwnLinear(torch.autograd.Function):
    """A linear layer whose gradient is written by hand: for weights, not for draws inside of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return slope @ weight, slope.T @ x


def test_a_layer_that_would_not_be_trained_is_refused() -> None:
    by_hand = lambda net, x: net.use(OwnLinear.apply(x, net.layer.weight))  # noqa: E731
    model = BayesianNet(Parts(by_hand, layer=nn.Linear(2, D), use=nn.Linear(D, D)))
    with pytest.raises(NotFollowedError, match=r"'layer\.weight' .* cuts its gradient.*per_example=False"):
        loss(model, 9)


def test_the_module_is_named() -> None:
    class OverPoints(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            return F.layer_norm(h.T, (len(h),)).T

    net = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.ReLU(), OverPoints()), nn.Linear(3, D))
    with pytest.raises(
        NotFollowedError, match=r"'0\.weight' .* are mixed or moved in its module '1\.1' \(OverPoints\)"
    ):
        loss(BayesianNet(net), 9)


def test_a_model_with_its_data_elsewhere_is_seen_too() -> None:
    x = torch.randn(50, 2)

    def model() -> None:
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([2, D]).to_event(2))
        pyro.sample("y", dist.Normal(torch.renorm(x @ w, 2, 1, 1.0), 1.0).to_event(2), obs=torch.zeros(50, D))

    with pytest.raises(NotFollowedError, match=r"'w' .* are mixed or moved in the density of 'y'"):
        ELBO().loss(model, AutoDropout(model))
