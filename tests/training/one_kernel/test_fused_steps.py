"""Steps by the kernel equal the steps of any model with the same masks: losses, parameters and moments.

The oracle takes its steps eagerly, through Pyro and autograd, in float64 on the CPU.
"""

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pyro_dropout as pd
from pyro_dropout.training.one_kernel import fused_steps
from pyro_dropout.training.one_kernel.fused_steps import together
from pyro_dropout.training.optimisers import adam
from tests.training.one_kernel.kernel_runs import PLACE, by_the_kernel, masks_of, one_run, with_masks


def assert_alike(found: Tensor, expected: Tensor, scale: float = 1.0) -> None:
    """Hold numbers of the kernel to those of the oracle, in float64."""
    assert found.shape == expected.shape
    torch.testing.assert_close(found.double().cpu(), expected.double(), rtol=1e-5 * scale, atol=1e-5 * scale)


@pytest.fixture(autouse=True)
def full_precision() -> None:
    assert torch.get_float32_matmul_precision() == "highest"


def net(*widths: int, kind: Callable[[], nn.Module] = nn.ReLU) -> nn.Module:
    torch.manual_seed(1)
    parts = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), kind())]
    return nn.Sequential(*parts[:-1])


def data(points: int, inputs: int, outputs: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(points, inputs, generator=generator), torch.randn(points, outputs, generator=generator)


def standardised() -> Any:
    x, y = data(20, 3, 1)
    x, y = 5 + 3 * x, 100 - 20 * y
    model = pd.Standardised(pd.BayesianNet(net(3, 7, 1), likelihood=pd.Gaussian(4.0, learn=True)), x, y)
    return model, pd.AutoDropout(model, keep=0.7), x, y


def case(model: Any, points: int = 20, keep: Any = 0.7) -> Any:
    first, last = model.net[0].in_features, model.net[-1].out_features
    return model, pd.AutoDropout(model, keep=keep), *data(points, first, last)


CASES: dict[str, Callable[[], Any]] = {
    "13-50-1": lambda: case(pd.BayesianNet(net(13, 50, 1), likelihood=pd.Gaussian(10.0)), 40),
    "one layer": lambda: case(pd.BayesianNet(net(4, 1), likelihood=pd.Gaussian(2.0))),
    "tanh, two outputs": lambda: case(pd.BayesianNet(net(3, 5, 2, kind=nn.Tanh), likelihood=pd.Gaussian(2.0))),
    "silu, three layers": lambda: case(pd.BayesianNet(net(3, 17, 6, 1, kind=nn.SiLU), likelihood=pd.Gaussian(2.0))),
    "sigmoid, four layers": lambda: case(pd.BayesianNet(net(2, 4, 5, 6, 3, kind=nn.Sigmoid))),
    "a precision for each output": lambda: case(
        pd.BayesianNet(net(3, 5, 2), likelihood=pd.Gaussian(torch.tensor([0.5, 4.0])))
    ),
    "learned precisions": lambda: case(
        pd.BayesianNet(net(3, 5, 2), likelihood=pd.Gaussian(torch.tensor([0.5, 4.0]), learn=True))
    ),
    "a learned precision": lambda: case(pd.BayesianNet(net(3, 5, 1), likelihood=pd.Gaussian(4.0, learn=True))),
    "keep and priors by row": lambda: case(
        pd.BayesianNet(
            net(3, 5, 1), pd.Prior(length_scale={"0.weight": torch.tensor([0.5, 1.0, 3.0])}, bias_length_scale=2.0)
        ),
        keep={"0.weight": torch.tensor([0.5, 0.7, 0.9]), "2.weight": 0.6},
    ),
    "standardised": standardised,
}


@pytest.mark.parametrize("batch", [20, 7])
@pytest.mark.parametrize("name", CASES)
def test_with_the_same_masks_steps_are_the_same(name: str, batch: int) -> None:
    torch.manual_seed(0)
    model, guide, x, y = CASES[name]()
    size, steps = min(batch * (2 if len(x) > 20 else 1), len(x)), 4
    run = one_run(model, guide, x, y, size, None, compile=True)
    other = one_run(model, guide, x, y, size, None, compile=False)
    order = None
    if run._batches is not None:
        order = run._batches.take(steps)
        other._batches.take = lambda count: order[:count].cpu()
    masks = masks_of(run, steps, size)
    starts = (0, *accumulate(run._loop.fused._network.widths[:-1]))
    expected = with_masks(other, masks[:, 0], list(pairwise(starts)))
    found = run._loop.fused.advance(steps, order, masks)
    assert_alike(found, expected)
    for mine, theirs in zip(run.leaves, other.leaves, strict=True):
        assert_alike(mine, theirs)
    assert run.t.item() == other.t.item() == steps + 1


@pytest.mark.parametrize("name", ["13-50-1", "learned precisions", "silu, three layers"])
def test_points_may_be_looked_at_in_several_turns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_steps, "together", lambda *sizes: 16)
    model, guide, x, y = CASES[name]()
    run, other = (one_run(model, guide, x, y, len(x), None, each) for each in (True, False))
    masks = masks_of(run, 3, len(x))
    starts = (0, *accumulate(run._loop.fused._network.widths[:-1]))
    expected = with_masks(other, masks[:, 0], list(pairwise(starts)))
    assert_alike(run._loop.fused.advance(3, None, masks), expected)
    for mine, theirs in zip(run.leaves, other.leaves, strict=True):
        assert_alike(mine, theirs)


def test_a_layer_that_is_never_dropped_is_a_point() -> None:
    model, _, x, y = CASES["13-50-1"]()
    guide = pd.AutoDropout(model, keep={"0.weight": 1.0, "2.weight": 0.6})
    run, other = (one_run(model, guide, x, y, len(x), adam(0.02, (0.8, 0.95), 1e-3), each) for each in (True, False))
    masks = masks_of(run, 3, len(x))
    masks[..., :13] = 1
    expected = with_masks(other, masks[:, 0], [(13, 63)])
    assert_alike(run._loop.fused.advance(3, None, masks), expected)
    for mine, theirs in zip(run.leaves, other.leaves, strict=True):
        assert_alike(mine, theirs)


@pytest.mark.deep
def test_where_nothing_is_dropped_a_whole_training_is_the_same() -> None:
    """keep = 1: masks that are drawn keep everything, and a hundred steps agree."""
    model, _, x, y = CASES["tanh, two outputs"]()
    runs = [one_run(model, pd.AutoDropout(model, keep=1.0), x, y, len(x), None, each) for each in (True, False)]
    losses = [torch.cat([run.advance(20) for _ in range(2)]) for run in runs]
    assert_alike(*losses, scale=10)
    for mine, theirs in zip(runs[0].leaves, runs[1].leaves, strict=True):
        assert_alike(mine, theirs, scale=10)


@pytest.mark.deep
def test_replicas_of_a_fleet_are_what_they_are_alone() -> None:
    x, y = data(24, 3, 1)
    settings: Any = {"seed": [0, 1, 2], "keep": [0.6, 0.7, 0.9], "tau": [1.0, 4.0, 16.0], "length": [0.5, 1.0, 2.0]}
    rates, splits = [0.01, 0.02, 0.005], torch.stack([torch.arange(k, k + 12) for k in (0, 5, 12)])

    def build(seed: int, keep: float, tau: float, length: float) -> Any:
        torch.manual_seed(seed)
        inner = nn.Sequential(nn.Linear(3, 9), nn.ReLU(), nn.Linear(9, 1))
        model = pd.BayesianNet(inner, pd.Prior(length_scale=length), pd.Gaussian(tau))
        return model, pd.AutoDropout(model, keep=keep)

    fleet = pd.Fleet(build, settings)
    with by_the_kernel():
        run: Any = fleet.prepare(x, y, indices=splits, steps=3, lr=rates, device=PLACE, compile=True)
    assert run.compiled
    masks = masks_of(run, 3, 12, networks=3)
    losses = run._loop.fused.advance(3, None, masks)
    assert losses.shape == (3, 3)
    for k in range(3):
        model, guide = build(**{name: values[k] for name, values in settings.items()})
        solo = one_run(model, guide, x[splits[k]], y[splits[k]], 12, adam(rates[k]), compile=False)
        expected = with_masks(solo, masks[:, k], [(0, 3), (3, 12)])
        assert_alike(losses[:, k], expected)
        for mine, theirs in zip(run.leaves, solo.leaves, strict=True):
            assert_alike(mine[k], theirs)


def test_a_setting_that_changes_between_steps_is_seen() -> None:
    model, guide, x, y = CASES["tanh, two outputs"]()
    run = one_run(model, guide, x, y, len(x), None, compile=True)
    run._loop.fused.advance(1)
    model.set_prior_scales({"0.weight": 0.1})
    guide._states[guide._sites["2.weight"].key].keep.fill_(0.9)
    other = one_run(model, guide, x, y, len(x), None, compile=False)
    for mine, theirs in zip([*other.leaves, other.t], [*run.leaves, run.t], strict=True):
        mine.copy_(theirs)
    masks = masks_of(run, 2, len(x))
    expected = with_masks(other, masks[:, 0], [(0, 3), (3, 8)])
    assert_alike(run._loop.fused.advance(2, None, masks), expected)


def test_how_many_points_are_looked_at_together() -> None:
    assert together((13, 50, 1), 128, "ieee") == 128
    assert together((13, 50, 1), 5, "ieee") == 16
    assert together((32, 64, 1), 128, "ieee") == 64  # products are written out one by one
    assert together((32, 64, 1), 128, "tf32") == 128


@pytest.mark.skipif(PLACE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("widths", [(13, 50, 1), (13, 30, 20, 1)])
def test_lower_precision_of_products_is_followed(widths: tuple[int, ...]) -> None:
    model, guide, x, y = case(pd.BayesianNet(net(*widths), likelihood=pd.Gaussian(10.0)), 40)
    try:
        torch.set_float32_matmul_precision("high")
        rough = one_run(model, guide, x, y, len(x), None, compile=True)
    finally:
        torch.set_float32_matmul_precision("highest")
    exact = one_run(model, guide, x, y, len(x), None, compile=False)
    masks = masks_of(rough, 1, len(x))
    starts = (0, *accumulate(widths[:-1]))
    near, right = rough._loop.fused.advance(1, None, masks), with_masks(exact, masks[:, 0], list(pairwise(starts)))
    assert 1e-7 < abs(near.item() / right.item() - 1) < 1e-2


def surprise(run: Any, x: Tensor, y: Tensor, masks: Tensor, rounds: bool) -> float:
    """Return -log p(y) of a step in float64; with the numbers of wide enough layers rounded to bfloat16, if asked."""
    widths = run._loop.fused._network.widths
    a = x.double().to(PLACE)
    for k, (sizes, kept) in enumerate(zip(pairwise(widths), masks.double().split(list(widths[:-1]), 1), strict=True)):
        weight, bias = (value.double() for value in run.leaves[2 * k : 2 * k + 2])
        a = a * kept
        if rounds and min(sizes) >= 8:
            a, weight = a.bfloat16().double(), weight.bfloat16().double()
        z = a @ weight.mT + bias
        a = z.relu()
    return -torch.distributions.Normal(z, 10.0**-0.5).log_prob(y.double().to(PLACE)).sum().item()


@pytest.mark.skipif(PLACE == "cpu", reason="needs a GPU: Triton's interpreter has no products in bfloat16")
@pytest.mark.parametrize("widths", [(13, 50, 1), (13, 30, 20, 9), (3, 40, 7, 2)])
def test_in_bf16_the_products_of_wide_enough_layers_are_of_rounded_numbers(widths: tuple[int, ...]) -> None:
    model, guide, x, y = case(pd.BayesianNet(net(*widths), likelihood=pd.Gaussian(10.0)), 40)
    run = one_run(model, guide, x, y, len(x), None, True, "bf16")
    assert isinstance(run._loop.fused, fused_steps.FusedSteps)
    other = one_run(model, guide, x, y, len(x), None, compile=False)
    masks = masks_of(run, 1, len(x))
    rounding = surprise(run, x, y, masks[0, 0], rounds=True) - surprise(run, x, y, masks[0, 0], rounds=False)
    starts = (0, *accumulate(widths[:-1]))
    expected = with_masks(other, masks[:, 0], list(pairwise(starts)))
    assert_alike(run._loop.fused.advance(1, None, masks), expected + rounding)
    if any(min(sizes) >= 8 for sizes in pairwise(widths)):
        assert abs(rounding) > 1e-6 * expected.abs().item()
    else:
        assert rounding == 0
    for mine, theirs in zip(run.leaves, other.leaves, strict=True):
        error = (mine.double().cpu() - theirs.double()).norm() / theirs.double().norm()
        assert error < (0.1 if rounding else 1e-4)
