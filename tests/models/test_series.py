"""The series of the paper, gaps and digits: models are what they are called, beside closed forms."""

from typing import Any

import pytest
import torch
from experiments.two_clusters import on_line

import pyro_dropout as pd
from tests.models.test_scripts import FOLDER, loaded

co2 = loaded(FOLDER / "co2.py")


N = 30


@pytest.mark.deep
@pytest.mark.parametrize("dropped", [0.1, 0.2])
def test_every_weight_and_bias_has_the_papers_weight_decay(dropped: float) -> None:
    net = co2.model(4, 6, "ReLU", dropped, N)
    guide = co2.guide(net, dropped)
    torch.nn.init.normal_(guide.states["2/bias"].loc)
    kl = pd.ELBO().parts(net, guide, torch.zeros(N, 1), torch.zeros(N, 1))["kl"]
    kl.backward()
    locs = {name: p for name, p in guide.named_parameters() if name.endswith("loc")}
    assert len(locs) == 10  # five weights and five biases
    for name, loc in locs.items():  # minus the ELBO is Nτ times eq. 3, whose λ‖M‖² has the gradient 2λM
        assert torch.allclose(loc.grad, 2 * N * co2.TAU * co2.LAMBDA * loc, rtol=1e-5), name
    assert type(guide.posterior("0.weight")).__name__ == "Delta"  # the only input is never dropped
    assert guide.posterior("2.weight").probs[..., 0].unique().item() == pytest.approx(1 - dropped)


in_between = loaded(FOLDER / "in_between.py")


def test_dropout_has_the_variance_of_its_masks_and_cannot_see_the_gap() -> None:
    """Var f(x) = Σ_k p(1 − p) m_k² relu(w_k x + b_k)²: a sum of convex functions, so no gap can be its maximum."""
    torch.manual_seed(0)
    net = in_between.model(depth=1, width=20)
    guide = in_between.guide("dropout", net)
    x = on_line(in_between.GRID, 5)
    hidden = torch.relu(net.net[0](x)).detach()
    out = guide.posterior("2.weight").loc.detach()  # (1, 20)
    variance = 0.9 * 0.1 * (hidden.square() * out.square()).sum(-1)
    drawn = pd.predict(net, guide, x, samples=4000, seed=0).epistemic[:, 0]
    # A variance of 4,000 draws of a sum of twenty coins is known to about 2.5 %: five times that.
    assert torch.allclose(drawn, variance, rtol=0.125)
    assert (variance[2:] - 2 * variance[1:-1] + variance[:-2] > -1e-6).all()
    left, right = (int((in_between.GRID - t).abs().argmin()) for t in (-1.4, 1.0))
    assert variance[left : right + 1].max() <= max(variance[left], variance[right]) + 1e-6


WIDTHS = (3, 4, 12)


mnist = loaded(FOLDER / "mnist.py")


def pair_of(arm: str, seed: int = 0) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    net = mnist.model(WIDTHS, 100)
    posterior = mnist.guide(net, arm)
    posterior(torch.zeros(2, 1, 28, 28), torch.zeros(2, dtype=torch.long))
    return net, posterior


@pytest.mark.deep
def test_the_prior_is_the_weight_decay() -> None:
    net, posterior = pair_of("none")
    terms = pd.ELBO().by_site(net, posterior, torch.zeros(2, 1, 28, 28), torch.zeros(2, dtype=torch.long), 100)
    for name in mnist.WEIGHTS:
        expected = 100 * mnist.WEIGHT_DECAY * posterior.mean()[name].square().sum().item()
        assert terms[name].item() == pytest.approx(expected, rel=1e-5)
