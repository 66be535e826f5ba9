"""Networks: their function at test points, and where there are data.

Two have linear weights, and an exact posterior. The priors of the others are the paper's, ``Prior()``, unless they say
otherwise.
"""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from pyro_dropout.benchmark.problems import problem
from pyro_dropout.benchmark.scores import AT_DATA, IN_GAP, OUTSIDE
from pyro_dropout.generative.gaussian_processes import DeepGP
from pyro_dropout.generative.likelihoods import Categorical, Gaussian, HeteroscedasticGaussian
from pyro_dropout.generative.networks import BayesianNet
from pyro_dropout.generative.priors import Prior
from pyro_dropout.generative.process_state import seeded
from pyro_dropout.prediction.weight_draws import WholeFunctions
from pyro_dropout.protocols import Record, Weights

CLUSTERS = ((-2.0, -1.0), (1.0, 2.0))


def outputs(x_test: Tensor) -> Callable[[Any, Weights], Tensor]:
    """Return the quantities of a network: its outputs at ``x_test``, (S, K), or (S, K, C) if there are several."""

    def quantities(model: Any, weights: Weights) -> Tensor:
        like = next(iter(weights.values()))
        with torch.no_grad():
            return WholeFunctions(model, None).outputs(weights, x_test.to(like), len(like)).squeeze(-1)

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
    " correlations. In the gap it is wide, up to 0.57 of the prior's width.",
    kind="numbers",
    exact=True,
)
def last_layer() -> Record:
    x, x_test, regions = on_line(15)
    y = torch.cos(2 * x + 0.8) + 0.2 * noise(30, 1, seed=5)

    def build() -> BayesianNet:
        return BayesianNet(nn.Sequential(Bumps(), nn.Linear(20, 1)), Prior(), Gaussian(25.0))

    return posed(build, x, y, x_test, regions)


# --- networks whose posterior is sampled ------------------------------------------------------------------------------


def network(*widths: int, likelihood: Callable[[], Any], activation: type[nn.Module] = nn.ReLU) -> Callable[[], Any]:
    """Return what builds a network of these widths, with the prior of the paper."""

    def build() -> BayesianNet:
        parts = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), activation())]
        return BayesianNet(nn.Sequential(*parts[:-1]), Prior(), likelihood())

    return build


@problem(
    "gap",
    title="A network 1-10-1 with a gap in the data",
    about="Between two clusters of data the posterior is wide, and its functions differ in shape. Factorised posteriors"
    " of one hidden layer cannot be narrow at the data and wide between them.",
    kind="numbers",
)
def gap() -> Record:
    x, x_test, regions = on_line(15)
    y = torch.cos(2 * x + 0.8) + 0.2 * noise(30, 1, seed=11)
    return posed(network(1, 10, 1, likelihood=lambda: Gaussian(25.0)), x, y, x_test, regions)


@problem(
    "deep-gap",
    title="A network 1-20-20-1 with a gap in the data",
    about="As in 'gap', with two hidden layers. Here factorised posteriors could be wider in the gap than at the data,"
    " beside the posterior's, and those that are trained are not.",
    kind="numbers",
    nuts={"max_tree_depth": 8},
)
def deep_gap() -> Record:
    x, x_test, regions = on_line(10)
    y = torch.cos(2 * x + 0.8) + 0.3 * noise(20, 1, seed=12)
    return posed(network(1, 20, 20, 1, likelihood=lambda: Gaussian(10.0)), x, y, x_test, regions)


@problem(
    "moons",
    title="Two moons, by a network 2-10-2",
    about="Two classes with a curved boundary. Away from the data the probability should return to one half, as that of"
    " no single network does.",
    kind="classes",
)
def moons() -> Record:
    y = torch.arange(60) % 2
    angle = math.pi * (torch.linspace(0.0, 1.0, 60) + y)
    centres = torch.tensor([[-0.5, -0.25], [0.5, 0.25]])
    x = centres[y] + torch.stack([angle.cos(), angle.sin()], -1) + 0.15 * noise(60, 2, seed=13)
    side = torch.linspace(-2.5, 2.5, 6)
    x_test = torch.cartesian_prod(side, side)
    far = torch.cdist(x_test, x).amin(-1)
    regions = torch.full(far.shape, OUTSIDE).masked_fill(far < 0.5, AT_DATA)
    build = network(2, 10, 2, likelihood=Categorical, activation=nn.Tanh)

    def probabilities(model: Any, weights: Weights) -> Tensor:
        return outputs(x_test)(model, weights).softmax(-1)

    return posed(build, x, y, x_test, regions, quantities=probabilities)


@problem(
    "noise",
    title="Noise that changes with the input, by a network 1-10-2",
    about="The network says the mean and the width of the noise. A posterior that is too sure of the width is too sure"
    " of the mean as well.",
    kind="numbers",
    held_out=True,
    nuts={"target_accept": 0.9},
)
def heteroscedastic() -> Record:
    x = torch.linspace(-2.0, 2.0, 60).unsqueeze(-1)
    y = torch.sin(2 * x) + (0.1 + 0.2 * (x + 2)) * noise(60, 1, seed=14)
    x_test = torch.linspace(-3.0, 3.0, 32).unsqueeze(-1)
    regions = torch.full((32,), OUTSIDE).masked_fill(x_test[:, 0].abs() <= 2, AT_DATA)
    build = network(1, 10, 2, likelihood=HeteroscedasticGaussian, activation=nn.Tanh)
    return posed(build, x, y, x_test, regions)


def thirteen(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return 60 points of 13 inputs, of which five matter, 40 test points, and the regions of these."""
    x, x_test = noise(60, 13, seed=seed), noise(40, 13, seed=seed + 1)
    x_test[20:] *= 2.0
    y = torch.sin(x[:, 0]) + x[:, 1] * x[:, 2] / 2 + (x[:, 3] + x[:, 4]).relu() / 2
    regions = torch.tensor([AT_DATA] * 20 + [OUTSIDE] * 20)
    return x, y.unsqueeze(-1) + 0.2 * noise(60, 1, seed=seed + 2), x_test, regions


@problem(
    "wide",
    title="A network 13-50-1",
    about="More weights than data, as in the regression sets of the literature. The functions are uncertain everywhere,"
    " and most directions of the weights see no data.",
    kind="numbers",
    suite="full",
    nuts={"max_tree_depth": 8},
)
def wide() -> Record:
    x, y, x_test, regions = thirteen(20)
    return posed(network(13, 50, 1, likelihood=lambda: Gaussian(25.0)), x, y, x_test, regions)


@problem(
    "wide-deep",
    title="A network 13-50-50-1",
    about="As 'wide', with two hidden layers: 3,301 weights for 60 data points.",
    kind="numbers",
    suite="full",
    nuts={"max_tree_depth": 8},
)
def wide_deep() -> Record:
    x, y, x_test, regions = thirteen(30)
    return posed(network(13, 50, 50, 1, likelihood=lambda: Gaussian(25.0)), x, y, x_test, regions)


@problem(
    "deep-gp",
    title="A deep Gaussian process of two layers, in weight space",
    about="The paper's model itself, with 20 hidden units in each layer. Dropout is said to have the uncertainty of"
    " this posterior.",
    kind="numbers",
    suite="full",
    nuts={"max_tree_depth": 8},
)
def deep_gp() -> Record:
    x, x_test, regions = on_line(10)
    y = torch.cos(2 * x + 0.8) + 0.3 * noise(20, 1, seed=15)
    return posed(lambda: DeepGP(1, [20, 20], 1, nonlinearity="tanh", likelihood=Gaussian(10.0)), x, y, x_test, regions)
