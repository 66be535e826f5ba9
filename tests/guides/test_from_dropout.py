"""A network with dropout, read as a model and a guide: the pair predicts what its stochastic passes predict."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import pyro_dropout as pd
from tests.networks.agreement import largest_z, per_point, predicted, stochastic_passes
from tests.networks.layers import Parts

pytestmark = pytest.mark.usefixtures("in_float64")


class LeNet(nn.Module):
    """Convolutions behind Dropout2d, dense layers behind Dropout, in a forward pass of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.drop_in, self.conv1 = nn.Dropout2d(0.2), nn.Conv2d(2, 5, 3)
        self.drop_between, self.conv2 = nn.Dropout2d(0.4), nn.Conv2d(5, 6, 3)
        self.drop = nn.Dropout(0.5)  # one module, two places
        self.fc1, self.fc2 = nn.Linear(24, 10), nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(self.drop_in(x))), 2)
        x = F.max_pool2d(torch.relu(self.conv2(self.drop_between(x))), 2).flatten(1)
        x = self.fc1(self.drop(x))
        return self.fc2(F.relu(self.drop(x)))  # before or after the ReLU is the same


def block(width: int) -> nn.Module:
    """A residual block whose two layers are dropped, and whose shortcut is not."""
    inner = nn.Sequential(nn.Sequential(nn.Dropout(0.3), nn.Linear(width, width)), nn.Tanh())
    parts = {"inner": inner, "drop": nn.Dropout(0.6), "out": nn.Linear(width, width)}
    return Parts(lambda net, x: x + net.out(net.drop(net.inner(x))), **parts)


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Dropout(0.1), nn.Linear(4, 12), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, 9), nn.ReLU(), nn.Dropout(0.5),
        nn.Linear(9, 2),
    )  # fmt: skip


def nested() -> nn.Module:
    return nn.Sequential(nn.Sequential(nn.Linear(4, 6), nn.ReLU()), block(6), nn.Sequential(block(6), nn.Linear(6, 2)))


def one_object_twice() -> nn.Module:
    drop = nn.Dropout(0.4)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), drop, nn.Linear(8, 8), nn.ReLU(), drop, nn.Linear(8, 2))


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (4,)),
    "lenet": (LeNet, (2, 14, 14)),
    "nested": (nested, (4,)),
    "one-object-twice": (one_object_twice, (4,)),
}


def listen(net: nn.Module) -> list[Tensor]:
    """Collect the masks of torch's own dropout as it draws them, (N, units) each."""
    masks: list[Tensor] = []

    def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
        # where the input is 0 the mask cannot be seen and does not matter
        kept = (output != 0) | (inputs[0] == 0)
        masks.append(kept if isinstance(module, nn.Dropout) else kept.flatten(2).all(-1))

    for module in net.modules():
        if isinstance(module, nn.Dropout | nn.Dropout2d):
            module.register_forward_hook(hook)
    return masks


@pytest.mark.parametrize("name", NETS)
def test_same_masks_same_outputs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, shape = NETS[name]
    net, x = make(), torch.randn(50, *shape)
    model, guide = pd.from_dropout(net)
    masks = listen(net)
    expected = net(x)
    assert bool(torch.cat([m.flatten() for m in masks]).logical_not().any())

    def uniform(shape: Any, **options: Any) -> Tensor:
        mask = masks.pop(0)
        assert tuple(shape) == mask.shape
        return torch.where(mask, 0.0, 1 - 1e-9)  # a row is kept where u < keep

    monkeypatch.setattr(torch, "rand", uniform)
    found = per_point(model, guide, x)
    assert not masks
    assert float((found - expected.detach()).abs().max()) <= 1e-6
    assert float((functional_call(model.net, guide.mean(), (x,)) - net.eval()(x)).detach().abs().max()) <= 1e-12


def test_the_network_is_left_as_it_was() -> None:
    net = LeNet()
    before, parts = copy.deepcopy(net.state_dict()), [type(m) for m in net.modules()]
    model, guide = pd.from_dropout(net)
    with torch.no_grad():
        for value in (*guide.parameters(), *model.parameters()):
            value.add_(1.0)
    assert [type(m) for m in net.modules()] == parts
    assert all(bool((before[name] == value).all()) for name, value in net.state_dict().items())
    assert not any(isinstance(m, nn.Dropout | nn.Dropout2d) for m in model.net.modules())
    assert not any(m._forward_pre_hooks for m in net.modules())


def tied() -> nn.Module:
    """One matrix in two layers; dropout stands before another one."""
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    b.weight = a.weight
    read = lambda net, x: net.c(net.drop(net.b(net.a(x).relu()).relu()))  # noqa: E731
    return Parts(read, a=a, b=b, drop=nn.Dropout(0.5), c=nn.Linear(4, 1))


def test_shared_weights_stay_shared() -> None:
    net, x = tied(), torch.randn(6, 4)
    model, guide = pd.from_dropout(net)
    assert list(model.sites) == ["a.weight", "a.bias", "b.bias", "c.weight", "c.bias"]
    assert type(guide.posterior("a.weight")).__name__ == "Delta"
    assert float((functional_call(model.net, guide.mean(), (x,)) - net.eval()(x)).detach().abs().max()) <= 1e-12


# --- what is not on rows of a weight stays in the model ---------------------------------------------------------------


def tied_behind_dropout() -> nn.Module:
    net = tied()
    net.c = net.a
    return net


def control_flow(net: Any, x: Tensor) -> Tensor:
    return net.a(x) if len(x) == 0 else net.a(net.drop(x))


def only_in_training(net: Any, x: Tensor) -> Tensor:
    return net.a(net.drop(x)) if net.training else net.a(x)


# The network, the shape of a data point, the modules that keep their noise, and those that drop rows in the guide.
ELSEWHERE: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], list[str], list[str]]] = {
    "before batch norm": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.BatchNorm1d(4), nn.Linear(4, 1)), (3,), ["1"], [],
    ),
    "single pixels before a convolution": (
        lambda: nn.Sequential(nn.Dropout(0.5), nn.Conv2d(2, 3, 3), nn.Flatten()), (2, 3, 3), ["0"], [],
    ),
    "channels before a flattened image": (
        lambda: nn.Sequential(nn.Dropout2d(0.5), nn.Flatten(), nn.Linear(8, 1)), (2, 2, 2), ["0"], [],
    ),
    "grouped convolution": (
        lambda: nn.Sequential(nn.Dropout2d(0.5), nn.Conv2d(4, 4, 3, groups=2), nn.Flatten()), (4, 3, 3), ["0"], [],
    ),
    "functional": (
        lambda: Parts(lambda net, x: net.a(F.dropout(x, 0.5, net.training)), a=nn.Linear(3, 1)), (3,), [""], [],
    ),
    "what torch.fx cannot follow": (
        lambda: Parts(control_flow, a=nn.Linear(3, 1), drop=nn.Dropout(0.5)), (3,), ["drop"], [],
    ),
    "a shortcut": (
        lambda: Parts(lambda net, x: net.d(x) + net.a(x), a=nn.Linear(3, 3), d=nn.Dropout(0.5)), (3,), ["d"], [],
    ),
    "two dropouts in a row": (
        lambda: nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5), nn.Linear(3, 1)), (3,), ["0"], ["1"],
    ),
    "one mask for two layers": (
        lambda: Parts(lambda net, x: (lambda h: net.a(h) + net.b(h))(net.d(x)), a=nn.Linear(3, 1),
                            b=nn.Linear(3, 1), d=nn.Dropout(0.5)),
        (3,), ["d"], [],
    ),
    "a tied weight behind dropout": (tied_behind_dropout, (4,), ["drop"], []),
    "a computed weight": (
        lambda: nn.Sequential(nn.Dropout(0.5), nn.utils.parametrizations.weight_norm(nn.Linear(3, 1))), (3,), ["0"], [],
    ),
    "rows that are dropped in training mode only": (
        lambda: Parts(only_in_training, a=nn.Linear(3, 1), drop=nn.Dropout(0.5)), (3,), [], ["drop"],
    ),
    "a mask for each position": (
        lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 1), nn.Flatten()), (4, 3), ["0"], [],
    ),
}  # fmt: skip


# --- a subclass or a hook may compute something else ------------------------------------------------------------------


class Unscaled(nn.Dropout):
    """Dropout as it was first published: what is kept is not scaled in training."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (torch.rand_like(x) > self.p) if self.training else x * (1 - self.p)


class Adapted(nn.Linear):
    """A layer with a second path of low rank."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.down, self.up = nn.Parameter(torch.randn(2, inputs)), nn.Parameter(torch.randn(outputs, 2))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) + x @ self.down.T @ self.up.T


class Squared(nn.Conv2d):
    """A convolution that multiplies twice."""

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(x, weight, bias) + super()._conv_forward(x, weight, bias).square()


class Named(nn.Linear):
    """A layer that computes what torch's does."""

    def extra_repr(self) -> str:
        return f"named, {super().extra_repr()}"


def hooked(at: str, **hooks: Callable[..., object]) -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.4), nn.Linear(8, 2))
    for kind, hook in hooks.items():
        getattr(net.get_submodule(at), f"register_{kind}")(hook)
    return net


def patched() -> nn.Module:
    net = hooked("2")
    net[2].forward = lambda x: F.dropout(x, 0.4) + 1  # type: ignore[index, operator, assignment]
    return net


# As above; they are read so without an example too.
CHANGED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], list[str], list[str]]] = {
    "dropout of its own": (lambda: nn.Sequential(nn.Linear(3, 8), Unscaled(0.4), nn.Linear(8, 2)), (3,), ["1"], []),
    "an adapted layer": (lambda: nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.4), Adapted(8, 2)), (3,), ["1"], []),
    "a part of the forward pass": (
        lambda: nn.Sequential(nn.Dropout2d(0.4), Squared(2, 2, 3), nn.Flatten()), (2, 3, 3), ["0"], [],
    ),
    "a forward pass put in place": (patched, (3,), ["2"], []),
    "a hook behind dropout": (lambda: hooked("2", forward_hook=lambda m, i, o: o * 2), (3,), ["2"], []),
    "a hook before the layer": (lambda: hooked("3", forward_pre_hook=lambda m, i: (i[0] + 1,)), (3,), ["2"], []),
    "a hook between them": (lambda: hooked("3", forward_hook=lambda m, i, o: o + i[0].sum(-1, True)), (3,), ["2"], []),
    "a subclass that computes the same": (
        lambda: nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.4), Named(8, 2)), (3,), [], ["1"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "with_example"), [*((name, True) for name in ELSEWHERE | CHANGED), *((name, False) for name in CHANGED)]
)
def test_other_dropout_stays_in_the_model(name: str, with_example: bool) -> None:
    # At most 48 differences a network, each beyond 4 standard errors with probability 6e-5 on correct code.
    torch.manual_seed(1)
    make, shape, noise, dropped = (ELSEWHERE | CHANGED)[name]
    net, x = make().eval(), torch.randn(4, *shape)
    model, guide = pd.from_dropout(net, example=x if with_example else None)
    assert (model.noise, model.dropped) == (noise, dropped)
    assert largest_z(stochastic_passes(net, x, 3000), predicted(model, guide, x, 3000)) < 4


def test_dropping_everything_is_told() -> None:
    net = Parts(lambda net, x: net.a(F.dropout(x, 1.0, net.training)), a=nn.Linear(3, 1))
    with pytest.raises(pd.errors.PyroDropoutError, match="Parts computes something else in training mode"):
        pd.from_dropout(net, example=torch.ones(1, 3))


@pytest.mark.parametrize(
    ("outputs", "y", "said"),
    [
        (3, torch.arange(30) % 3, "likelihood=Categorical"),
        (3, torch.eye(3)[torch.arange(30) % 3], "nothing but 0 and 1.*Categorical.*argmax"),
        (1, torch.arange(30).unsqueeze(1) % 2, "nothing but 0 and 1.*Bernoulli"),
    ],
)
def test_classes_do_not_become_numbers_without_a_word(outputs: int, y: Tensor, said: str) -> None:
    net, x = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, outputs)), torch.randn(30, 2)
    model, guide = pd.from_dropout(net)
    doors: list[Callable[[], object]] = [
        lambda: pd.fit(model, guide, x, y, steps=1, progress=False),
        lambda: pd.predict(model, guide, x, samples=2).log_prob(y),
        lambda: pd.nuts(model, x, y, samples=1, warmup=0, progress=False),
    ]
    for door in doors:  # warnings are errors here
        with pytest.raises((UserWarning, pd.errors.PyroDropoutError), match=said):
            door()
    chosen, guide = pd.from_dropout(net, tau=1.0)  # Gaussian noise was asked for
    if y.dim() == 2:
        pd.fit(chosen, guide, x, y.float(), steps=1, progress=False)


class Gated(nn.Linear):
    """A network of one's own: its dropout is seen when it runs."""

    def __init__(self, p: float) -> None:
        super().__init__(2, 1)
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(x, self.p, self.training) if self.p else x)


def test_a_network_without_dropout_is_refused_when_that_is_known() -> None:
    x, said = torch.ones(3, 2), "net must have dropout.* has none.*AutoDropout"
    with pytest.raises(pd.errors.PyroDropoutError, match=said):
        pd.from_dropout(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)))
    with pytest.raises(pd.errors.PyroDropoutError, match=said):
        pd.from_dropout(Gated(0.0), example=x)
    with pytest.raises(pd.errors.PyroDropoutError, match=said):
        pd.predict(*pd.from_dropout(Gated(0.0)), x, samples=3)
    assert bool((pd.predict(*pd.from_dropout(Gated(0.5)), x, samples=50).epistemic > 0).all())
    pd.predict(*pd.from_dropout(nn.Sequential(nn.Dropout(0.0), nn.Linear(2, 1))), x, samples=3)  # the end of a sweep
