"""The width of a prior after training: tuned by held-out data, or narrowed by training data."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pyro_dropout as pd
from tests.training.laplace.test_laplace import STRUCTURES, untrained


def overconfident() -> tuple[nn.Module, Tensor, Tensor, Tensor, Tensor]:
    """A network that fits 60 training points perfectly, of classes that overlap; and 200 held-out points."""
    torch.manual_seed(1)
    y = torch.arange(260) % 3
    x = 1.5 * torch.eye(3)[y] @ torch.randn(3, 8) + torch.randn(260, 8)
    net = nn.Sequential(nn.Linear(8, 20), nn.Tanh(), nn.Linear(20, 3))
    optimiser = torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(200):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(x[:60]), y[:60]).backward()
        optimiser.step()
    return net, x[:60], y[:60], x[60:], y[60:]


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.thinned(3)
def test_held_out_data_tune_the_width_of_the_prior(structure: Any) -> None:
    # Bounds for this seed alone.
    net, x, y, held_x, held_y = overconfident()
    model = pd.BayesianNet(net, pd.Prior(length_scale=0.1, width_scaled=False), pd.Categorical())
    with pytest.warns(UserWarning, match=r"less confident than it is right.*validation=\(x, y\)"):
        wide = pd.laplace(model, net, x, y, structure)
    guide = untrained(model, net, x, y, structure, validation=(held_x[:100], held_y[:100]))
    answer, before = (pd.predict(model, each, held_x[100:], method="linearised") for each in (guide, wide))
    assert answer.log_prob(held_y[100:]).mean() > before.log_prob(held_y[100:]).mean() + 0.2
    accuracy = (answer.probs.argmax(1) == held_y[100:]).double().mean()
    assert abs(answer.probs.amax(1).mean() - accuracy) < 0.1
    # No factor beside the one that was found is better on the data that it was tuned by.
    tuned = pd.predict(model, guide, held_x[:100], method="linearised").log_prob(held_y[:100]).mean()
    for factor in (0.2, 5.0):
        for block in guide.curvature:
            block.prior.mul_(factor)
        other = pd.predict(model, guide, held_x[:100], method="linearised").log_prob(held_y[:100]).mean()
        assert other < tuned + 1e-3
        for block in guide.curvature:
            block.prior.div_(factor)
    with pytest.raises(pd.errors.ShapeError, match=r"validation must be a pair \(x, y\)"):
        pd.laplace(model, net, x, y, structure, validation=held_x)


def test_a_prior_that_leaves_little_more_than_the_point_is_told_of() -> None:
    """Held-out data that the point fits better than any Gaussian around it."""
    net, x, _, _, _ = overconfident()
    model = pd.BayesianNet(net, pd.Prior(length_scale=0.1, width_scaled=False), pd.Categorical())
    with pytest.warns(UserWarning, match="held-out data find nothing better than the point itself"):
        pd.laplace(model, net, x, net(x).argmax(-1), "last", validation=(x, net(x).argmax(-1)))


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.thinned(3)
def test_a_default_prior_is_narrowed_by_training_data(structure: Any) -> None:
    """The confidence of the point on its training data is left to it; the next wider prior takes more."""
    net, x, y, _, _ = overconfident()
    model = pd.BayesianNet(net, likelihood=pd.Categorical())
    guide = untrained(model, net, x, y, structure)
    certain = net(x).softmax(-1).amax(-1).mean().item()

    def taken() -> float:
        return certain - pd.predict(model, guide, x, method="linearised").probs.amax(-1).mean().item()

    assert taken() < 0.011
    for block in guide.curvature:
        block.prior.div_(10**0.5)
    assert guide.prior_factor == 1 or taken() > 0.009
    ours = untrained(pd.BayesianNet(net, pd.Prior(), pd.Categorical()), net, x, y, structure)
    assert ours.prior_factor == 1, "a prior that was written out stays"
    alone = pd.BayesianNet(nn.Linear(8, 3), likelihood=pd.Categorical())
    assert untrained(alone, alone, x, y, structure).prior_factor == 1, "that of a single layer is at full weight"
