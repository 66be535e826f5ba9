"""Steps by the kernels of wide layers equal the steps of any model with the same masks: losses, parameters, moments.

The oracle takes its steps eagerly, through Pyro and autograd, in float64 on the CPU. Products of the kernels are in
float32 here; ``test_rounding`` is about bfloat16.
"""

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pyro_dropout as pd
from pyro_dropout.engines.engine import CHAIN
from pyro_dropout.training.optimisers import adam
from pyro_dropout.training.wide_kernels.wide_steps import WideSteps
from tests.training.wide_kernels.kernel_runs import PLACE, data, masks_of, net, one_run, with_masks

pytestmark = pytest.mark.usefixtures("exact")

MANY = CHAIN if PLACE == "cuda" else 3  # steps: a chain of them is one CUDA graph


def assert_alike(found: Tensor, expected: Tensor, scale: float = 1.0) -> None:
    """Hold numbers of the kernels to those of the oracle: sums over many units are as exact as their largest terms."""
    assert found.shape == expected.shape
    error = 1e-5 * scale * max(1.0, expected.abs().max().item())
    torch.testing.assert_close(found.double().cpu(), expected.double().cpu(), rtol=0, atol=error)


def case(model: Any, points: int = 20, keep: Any = 0.7) -> Any:
    first, last = model.net[0].in_features, model.net[-1].out_features
    x, y = data(points, first, last)
    if isinstance(model.likelihood, pd.Categorical):
        y = y.argmax(1)
    return model, pd.AutoDropout(model, keep=keep), x, y


def classes(*widths: int, kind: Callable[[], nn.Module] = nn.ReLU) -> Any:
    return pd.BayesianNet(net(*widths, kind=kind), likelihood=pd.Categorical())


def standardised() -> Any:
    x, y = data(20, 9, 1)
    x, y = 5 + 3 * x, 100 - 20 * y
    model = pd.Standardised(pd.BayesianNet(net(9, 17, 1), likelihood=pd.Gaussian(4.0)), x, y)
    return model, pd.AutoDropout(model, keep=0.7), x, y


# thin and wide first and last layers, sizes that fill no tile, one hidden layer and several
CASES: dict[str, Callable[[], Any]] = {
    "1-40-70-1": lambda: case(pd.BayesianNet(net(1, 40, 70, 1), likelihood=pd.Gaussian(4.0))),
    "one hidden layer": lambda: case(pd.BayesianNet(net(3, 33, 2), likelihood=pd.Gaussian(torch.tensor([0.5, 4.0])))),
    "tanh, four layers": lambda: case(pd.BayesianNet(net(2, 17, 18, 19, 1, kind=nn.Tanh)), 37),
    "sigmoid, many outputs": lambda: case(pd.BayesianNet(net(11, 40, 20, 33, kind=nn.Sigmoid))),
    "classes, silu": lambda: case(classes(20, 40, 30, 10, kind=nn.SiLU), 70),
    "three classes": lambda: case(classes(20, 65, 3)),
    "more units than a tile": lambda: case(classes(70, 130, 129, 9), 70),
    "keep and priors by row": lambda: case(
        pd.BayesianNet(
            net(3, 20, 21, 1),
            pd.Prior(length_scale={"0.weight": torch.tensor([0.5, 1.0, 3.0])}, bias_length_scale=2.0),
        ),
        keep={"0.weight": torch.tensor([0.5, 0.7, 0.9]), "2.weight": 0.6, "4.weight": torch.linspace(0.3, 1.0, 21)},
    ),
    "standardised": standardised,
}
LONG = ("more units than a tile", "1-40-70-1", "classes, silu", "tanh, four layers")


def assert_same_steps(model: Any, guide: Any, x: Tensor, y: Tensor, batch: int, update: Any = None) -> None:
    run = one_run(model, guide, x, y, batch, update, True, "bf16")
    assert isinstance(run._loop, WideSteps)
    other = one_run(model, guide, x, y, batch, update, compile=False)
    order, steps = None, 3
    if run._batches is not None:
        order = run._batches.take(steps)
        other._batches.take = lambda count: order[:count].cpu()
    masks = masks_of(run, steps, batch)
    starts = (0, *accumulate(run._loop._network.widths[:-1]))
    expected = with_masks(other, masks[:, 0], list(pairwise(starts)))
    assert_alike(run._loop.advance(steps, order, masks), expected)
    for mine, theirs in zip(run.leaves, other.leaves, strict=True):
        assert_alike(mine, theirs)
    assert run.t.item() == other.t.item() == steps + 1


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.deep if name in LONG else ()) for name in CASES])
def test_with_the_same_masks_steps_are_the_same(name: str) -> None:
    torch.manual_seed(0)
    model, guide, x, y = CASES[name]()
    assert_same_steps(model, guide, x, y, len(x))


@pytest.mark.deep
@pytest.mark.parametrize("name", ["1-40-70-1", "classes, silu"])
def test_batches_are_taken_in_their_order(name: str) -> None:
    torch.manual_seed(0)
    model, guide, x, y = CASES[name]()
    assert_same_steps(model, guide, x, y, len(x) // 3, adam(0.02, (0.8, 0.95), 1e-3))


def prior_by_weight(model: Any, name: str) -> None:
    """Give every weight of a layer a width of its own."""
    scale = model.get_buffer(f"prior_scale/{name.replace('.', '/')}")
    shape = model.net.get_parameter(name).shape
    generator = torch.Generator().manual_seed(4)
    model._buffers[f"prior_scale/{name.replace('.', '/')}"] = scale * (0.5 + torch.rand(shape, generator=generator))


@pytest.mark.parametrize("name", ["0.weight", "2.weight", "4.weight"])
@pytest.mark.parametrize("widths", [(2, 20, 21, 1), (9, 20, 21, 9)])
def test_every_weight_may_have_a_prior_of_its_own(widths: tuple[int, ...], name: str) -> None:
    model, guide, x, y = case(pd.BayesianNet(net(*widths), likelihood=pd.Gaussian(4.0)))
    prior_by_weight(model, name)
    assert_same_steps(model, guide, x, y, len(x))


@pytest.mark.deep
def test_where_nothing_is_dropped_a_whole_training_is_the_same() -> None:
    """keep = 1: masks that are drawn keep everything, in a chain of steps and in single ones."""
    model, _, x, y = CASES["1-40-70-1"]()
    guide = pd.AutoDropout(model, keep=1.0)
    runs = [one_run(model, guide, x, y, len(x), None, each, "bf16") for each in (True, False)]
    losses = [torch.cat([run.advance(MANY), run.advance(2)]) for run in runs]
    assert_alike(*losses, scale=10)
    for mine, theirs in zip(runs[0].leaves, runs[1].leaves, strict=True):
        assert_alike(mine, theirs, scale=10)


@pytest.mark.deep
def test_a_setting_that_changes_between_steps_is_seen() -> None:
    model, guide, x, y = CASES["one hidden layer"]()
    run = one_run(model, guide, x, y, len(x), None, True, "bf16")
    run.advance(MANY)
    model.set_prior_scales({"0.weight": 0.1})
    guide._states[guide._sites["2.weight"].key].keep.fill_(1.0)
    guide._states[guide._sites["0.weight"].key].keep.fill_(1.0)
    other = one_run(model, guide, x, y, len(x), None, compile=False)
    for mine, theirs in zip([*other.leaves, other.t], [*run.leaves, run.t], strict=True):
        mine.copy_(theirs)
    ones = torch.ones(MANY, len(x), 36)
    assert_alike(run.advance(MANY), with_masks(other, ones, [(0, 3), (3, 36)]), scale=10)


@pytest.mark.deep
def test_masks_are_drawn_anew_at_every_step_unit_and_point() -> None:
    """The masked activations of layers whose units are all on show what was kept: 0.8, up to five standard errors."""
    model = pd.BayesianNet(net(9, 64, 32, 1), likelihood=pd.Gaussian(1.0))
    guide = pd.AutoDropout(model, keep=0.8)
    x, y = data(100, 9, 1)
    for name, value in guide.named_parameters():
        value.data.fill_(0.0 if name.count("weight") else 1.0)
    run = one_run(model, guide, x, y, len(x), adam(1e-9), True, "bf16")
    seen = []
    for _ in range(4):
        run.advance(1)
        seen.append([run._loop._layers[k].a[:100, :width].float().cpu() != 0 for k, width in ((1, 64), (2, 32))])
    for each in zip(*seen, strict=True):
        kept = torch.stack(each).float()
        error = (0.16 / kept.numel()) ** 0.5
        assert abs(kept.mean().item() - 0.8) < 5 * error
        assert (kept.mean((0, 1)) - 0.8).abs().max().item() < 5 * (0.16 / (4 * 100)) ** 0.5
        assert (kept.mean((0, 2)) - 0.8).abs().max().item() < 5 * (0.16 / (4 * kept.shape[2])) ** 0.5
        flat = (kept - 0.8).flatten(1)
        together = flat @ flat.T / (0.16 * flat.shape[1])
        assert (together - torch.eye(4)).abs().max().item() < 0.2
    both = [torch.stack(each).float()[:, :, :32].flatten() - 0.8 for each in zip(*seen, strict=True)]
    assert abs((both[0] * both[1]).mean().item() / 0.16) < 5 / len(both[0]) ** 0.5


@pytest.mark.skipif(PLACE == "cpu", reason="needs a GPU")
def test_a_chain_of_steps_is_what_single_steps_are() -> None:
    found = []
    for sizes in ([CHAIN], [7, CHAIN - 7]):
        torch.manual_seed(0)
        model, guide, x, y = CASES["classes, silu"]()
        torch.manual_seed(1)
        run = one_run(model, guide, x, y, 32, None, True, "bf16")
        losses = torch.cat([run.advance(size) for size in sizes])
        found.append([losses, *(leaf.clone() for leaf in run.leaves)])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
