"""The LSTM: what a mask per sequence and per step are, and forecasts that run on."""

import math
from types import ModuleType

import pytest
import torch
from experiments.free_running import free_run
from torch import nn

import pyro_dropout as pd
from tests.models.test_scripts import FOLDER, loaded

pytestmark = pytest.mark.deep  # the script runs whole, which takes a minute


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return loaded(FOLDER / "sequence.py")


def test_without_masks_it_is_the_lstm_of_torch(script: ModuleType) -> None:
    torch.manual_seed(0)
    net, theirs = script.Forecaster(5), nn.LSTM(1, 5, batch_first=True)
    # Torch orders the gates i, f, g, o, and has no + 1 before the forgetting.
    order = torch.cat([torch.arange(0, 10), torch.arange(15, 20), torch.arange(10, 15)])
    with torch.no_grad():
        theirs.weight_ih_l0.copy_(net.input.weight[order])
        theirs.weight_hh_l0.copy_(net.recurrent.weight[order])
        theirs.bias_ih_l0.copy_(net.input.bias[order])
        theirs.bias_hh_l0.zero_()[5:10] = 1.0
        x = torch.randn(3, 7)
        last = theirs((x - x[:, -1:]).unsqueeze(-1))[0][:, -1]
        torch.testing.assert_close(net(x), x[:, -1:] + net.output(last))


def test_one_draw_of_a_free_run_is_one_function(script: ModuleType) -> None:
    """With one hidden unit there are four draws, of which two drop W_y and agree: three noiseless forecasts."""
    torch.manual_seed(2)
    net = script.model("sequence", 0.5, 1, 1.0)
    posterior = script.guide(net, "sequence", 0.5)
    x = torch.randn(1, 5)
    posterior(x, torch.zeros(1, 1))
    f = script.free_run(net, posterior, x, 6, tau=1e14, samples=300).f[:, 0]
    mean = {name: value.detach() for name, value in posterior.mean().items()}
    expected = []
    for kept in ((0, 0), (0, 1), (1, 0), (1, 1)):
        weights = dict(mean)
        for site, z in zip(script.DROPPED, kept, strict=True):
            weights[site] = 2 * z * mean[site]
        window, steps = x, []
        for _ in range(6):
            steps.append(net.evaluate(weights, window))
            window = torch.cat([window[:, 1:], steps[-1]], 1)
        expected.append(torch.cat(steps, 1)[0])
    distance = (f[:, None] - torch.stack(expected).detach()).abs().amax(-1)
    assert bool((distance.amin(1) < 1e-4).all())
    assert set(distance.argmin(1).tolist()) == {0, 1, 3}  # one of them is missed with probability < 1e-30


def test_arms_start_with_the_same_weight_decay(script: ModuleType) -> None:
    """The penalty on keep·M in one arm is the KL of M in the other, up to the entropy of six labels."""
    penalties = []
    labels = -6 * (0.7 * math.log(0.7) + 0.3 * math.log(0.3))
    for arm in ("sequence", "step"):
        torch.manual_seed(0)
        net = script.model(arm, 0.7, 6, 1.0)
        terms = pd.ELBO().by_site(net, script.guide(net, arm, 0.7), torch.zeros(2, 4), torch.zeros(2, 1), 2)
        penalties.append([terms[site].item() for site in script.DROPPED])
    assert [value + labels for value in penalties[0]] == pytest.approx(penalties[1], rel=1e-4)


def walker(keep: float) -> tuple[pd.BayesianNet, pd.AutoDropout]:
    """The next value is w times the last one; with dropout w is 0 or its mean over keep."""
    model = pd.BayesianNet(torch.nn.Linear(1, 1, bias=False))
    guide = pd.AutoDropout(model, keep=keep)
    with torch.no_grad():
        guide.states["weight"].loc.fill_(2.0)
    return model, guide


def test_a_draw_of_the_weights_holds_to_the_end() -> None:
    model, guide = walker(keep=0.5)
    torch.manual_seed(0)
    f = free_run(model, guide, torch.ones(1, 1), 4, tau=1e16, samples=400).f[:, 0]
    alive = f[:, 0] != 0
    torch.testing.assert_close(f[alive], torch.tensor([2.0, 4.0, 8.0, 16.0]).expand(int(alive.sum()), 4))
    assert f[~alive].abs().max() < 1e-6
    assert 140 < int(alive.sum()) < 260  # 400 coins: six standard deviations of 10
