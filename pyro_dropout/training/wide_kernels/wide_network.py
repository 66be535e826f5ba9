"""Which trainings the kernels of wide layers take: wide dropout networks with products in bfloat16."""

from collections.abc import Sequence
from itertools import pairwise

from pyro_dropout.generative.likelihoods import Categorical, Gaussian
from pyro_dropout.training.compile.functional import Parameters
from pyro_dropout.training.optimisers import Update
from pyro_dropout.training.wide_kernels.dropout_network import DropoutNetwork, check, dropout_network

# What was measured on an H200: within these sizes the kernels take less time than compiled steps.
NARROWEST = 256  # units of a hidden layer
WIDEST = 1024  # units of a layer, inputs too
DEEPEST = 12  # weight layers
MOST_OUTPUTS = 64
MOST_POINTS = 512  # of a step


def wide_network(
    model: object, guide: object, loss: object, update: Update, parameters: Parameters, x: object, y: object, batch: int
) -> DropoutNetwork:
    """Return what the kernels have to know of a training, or raise ``CannotError``.

    Args:
        model: the model.
        guide: its guide.
        loss: the loss.
        update: the optimiser.
        parameters: what is trained.
        x: all inputs.
        y: all targets.
        batch: how many points a step has.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> from pyro_dropout.generative.precision import products_in
        >>> from pyro_dropout.training.optimisers import named
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
        >>> model = pdrop.BayesianNet(net, likelihood=pdrop.Gaussian(tau=4.0))
        >>> guide, loss, x, y = pdrop.AutoDropout(model), pdrop.ELBO(), torch.zeros(5, 2), torch.zeros(5, 1)
        >>> parameters = Parameters(model, guide, loss, (x, y), {})
        >>> with products_in("bf16"):
        ...     wide_network(model, guide, loss, named("adam", 1e-3), parameters, x, y, 5).widths
        (2, 256, 1)
    """
    network = dropout_network(
        model, guide, loss, update, parameters, x, y, precision="bf16", likelihoods=(Gaussian, Categorical)
    )
    check(not network.learned, "the precision of the noise is learned")
    check_sizes(network.widths, batch)
    return network


def check_sizes(widths: Sequence[int], batch: int) -> None:
    """Raise ``CannotError`` unless the kernels take layers of these sizes."""
    check(len(widths) > 2, "there is no hidden layer")
    check(min(widths[1:-1]) >= NARROWEST, f"a hidden layer has fewer than {NARROWEST} units")
    check(max(widths) <= WIDEST, f"a layer has more than {WIDEST} units")
    check(len(list(pairwise(widths))) <= DEEPEST, f"there are more than {DEEPEST} layers")
    check(widths[-1] <= MOST_OUTPUTS, f"there are more than {MOST_OUTPUTS} outputs")
    check(batch <= MOST_POINTS, f"a step has more than {MOST_POINTS} points")
