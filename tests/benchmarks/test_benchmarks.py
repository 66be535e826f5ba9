"""The benchmark of steps runs; and what one step holds in memory, beside the same step of plain dropout in torch."""

import gc
from collections.abc import Callable

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

import pyro_dropout as pd
from tests.benchmarks import steps
from tests.benchmarks.contestants import BASELINE
from tests.benchmarks.figures import Asked
from tests.benchmarks.settings import DEEP, SMALL, Setting
from tests.oracles.memory import allocations, peak_allocated
from tests.own_process import python


def test_the_data_of_experiments_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    python("-c", "import tests.benchmarks, experiments")


@pytest.mark.deep
def test_steps_are_compared_with_the_baseline(capsys: pytest.CaptureFixture[str]) -> None:
    tiny, asked = Setting(layers=(4, 5, 5), likelihood="classes", batch=6, points=6), Asked(quick=True, rounds=2)
    found = {each.what: each.value for each in steps.measured(tiny, asked, "highest")}
    base = f"4-5x2, batch 6, fp32, {BASELINE}"
    assert found[f"{base}, over the baseline"] == found[f"{base}, over the baseline, the median of the rounds"] == 1
    assert all(value > 0 for value in found.values())
    assert {f"4-5x2, batch 6, fp32, fit, {name}" for name in steps.ROWS} <= found.keys()
    assert all("not installed" in line for line in capsys.readouterr().out.splitlines())
    names = [each.name for each in steps.lined_up(SMALL, Asked(quick=True, who="AutoDropout$"), "highest")]
    assert names[0] == BASELINE
    assert len(names) > 1
    assert all(name.endswith("AutoDropout") for name in names[1:])


def step_peak(trained: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]) -> int:
    """The most bytes held at any time in one step: the trained weights, and all that the step allocates."""
    x, y = DEEP.data("cpu")
    weights = sum(p.numel() * p.element_size() for p in trained.parameters())
    return weights + peak_allocated(lambda: loss(x, y).backward())


def test_a_step_holds_at_most_half_as_much_again_as_plain_dropout() -> None:
    net = DEEP.network(dropout=True)
    weights = sum(p.numel() * p.element_size() for p in net.parameters())
    theirs = step_peak(net, lambda x, y: F.mse_loss(net(x), y))
    assert theirs > 2 * weights  # weights and gradients at least, or the measurement is not one
    model = DEEP.model("cpu")
    guide, elbo = pd.AutoDropout(model, keep=0.9), pd.ELBO()
    own = step_peak(guide, lambda x, y: elbo.differentiable_loss(model, guide, x, y))
    assert own <= 1.5 * theirs
    assert own + weights <= 1.6 * theirs  # the network that the guide started from keeps its values


def test_a_step_leaves_nothing_behind() -> None:
    # what is left after a step must not wait for Python's cycle collector
    wide = Setting(layers=(1, 512, 512, 1), batch=272, points=272)
    model, (x, y) = wide.model("cpu"), wide.data("cpu")
    guide, elbo = pd.AutoDropout(model, keep=0.9), pd.ELBO()
    elbo.differentiable_loss(model, guide, x, y).backward()

    def three_steps() -> None:
        for _ in range(3):
            elbo.differentiable_loss(model, guide, x, y).backward()

    gc.collect()
    gc.disable()
    try:
        left = sum(allocations(three_steps))
    finally:
        gc.enable()
    assert left < wide.batch * wide.layers[1]  # bytes: less than a quarter of one activation
