"""Networks: their function at test points, and where there are data.

Two have linear weights, and an exact posterior. The priors of the others are the paper's, ``Prior()``, unless they say
otherwise.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pyro_dropout.benchmark.problems import problem
from pyro_dropout.generative.likelihoods import Gaussian
from pyro_dropout.generative.networks import BayesianNet
from pyro_dropout.generative.priors import Prior
from pyro_dropout.generative.random_state import seeded
from pyro_dropout.protocols import Record, Weights

CLUSTERS = ((-2.0, -1.0), (1.0, 2.0))
AT_DATA, IN_GAP, OUTSIDE = 0, 1, 2


def outputs(x_test: Tensor) -> Callable[[Any, Weights], Tensor]:
    """Return the quantities of a network: its outputs at ``x_test``, (S, K), or (S, K, C) if there are several."""

    def quantities(model: Any, weights: Weights) -> Tensor:
        like = next(iter(weights.values()))
        f: Tensor = model.evaluate(weights, x_test.to(like)).detach()
        f = f.reshape(len(like), *f.shape[-2:])  # one draw comes without its dimension
        return f.squeeze(-1)

    return quantities


def posed(build: Callable[[], Any], x: Tensor, y: Tensor, x_test: Tensor, regions: Tensor, **more: Any) -> Record:
    """Return a problem of the outputs of a network, which ``build`` makes anew for each seed."""

    def make(seed: int) -> Any:
        with seeded(seed, torch.device("cpu")):
            return build()

    given = {"make": make, "arguments": (x, y), "x_test": x_test, "regions": regions, "quantities": outputs(x_test)}
    return given | more


def noise(*shape: int, seed: int) -> Tensor:
    """Return standard normal numbers of a seed."""
    return torch.randn(*shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")


def on_line(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return as many inputs in each of two clusters on a line, 40 test points, and the regions of these."""
    x = torch.cat([torch.linspace(low, high, count) for low, high in CLUSTERS]).unsqueeze(-1)
    t = torch.linspace(-3.0, 3.0, 40)
    regions = torch.full(t.shape, IN_GAP).masked_fill(t.abs() > CLUSTERS[1][1], OUTSIDE)
    at_data = (t.abs() >= CLUSTERS[1][0]) & (t.abs() <= CLUSTERS[1][1])
    return x, t.unsqueeze(-1), regions.masked_fill(at_data, AT_DATA)


# --- linear in their weights ------------------------------------------------------------------------------------------


@problem(
    "line",
    title="Linear regression with correlated inputs",
    about="Five inputs are almost equal, so that their weights are only known in sum. A factorised posterior is too"
    " narrow in every direction that the data left open.",
    kind="numbers",
    exact=True,
)
def line() -> Record:
    x = noise(40, 1, seed=1) + 0.2 * noise(40, 5, seed=2)
    y = x.sum(-1, keepdim=True) / 5 + 0.3 * noise(40, 1, seed=3)
    x_test = torch.cat([torch.linspace(-2.0, 2.0, 20).unsqueeze(-1).expand(-1, 5), noise(20, 5, seed=4)])
    regions = torch.tensor([AT_DATA] * 20 + [OUTSIDE] * 20)
    return posed(lambda: BayesianNet(nn.Linear(5, 1), Prior(), Gaussian(10.0)), x, y, x_test, regions)


class Bumps(nn.Module):
    """Twenty fixed features on a line, exp(-2 (x - c)²)."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the features of inputs, (N, 20)."""
        return torch.exp(-2 * (x - torch.linspace(-3.0, 3.0, 20).to(x)) ** 2)


@problem(
    "last-layer",
    title="The last layer of a network, with a gap in the data",
    about="Only the last layer is random, over fixed features, so that the posterior is a Gaussian with strong"
    " correlations. In the gap it is the prior.",
    kind="numbers",
    exact=True,
)
def last_layer() -> Record:
    x, x_test, regions = on_line(15)
    y = torch.cos(2 * x + 0.8) + 0.2 * noise(30, 1, seed=5)

    def build() -> BayesianNet:
        return BayesianNet(nn.Sequential(Bumps(), nn.Linear(20, 1)), Prior(), Gaussian(25.0))

    return posed(build, x, y, x_test, regions)
