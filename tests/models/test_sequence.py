"""The LSTM: what a mask per sequence and per step are, and forecasts that run on."""

from types import ModuleType

import pytest
import torch
from torch import nn

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
