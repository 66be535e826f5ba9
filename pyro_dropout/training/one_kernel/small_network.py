"""Which trainings one kernel takes: those of small dropout networks."""

from itertools import pairwise

import torch

from pyro_dropout.generative.precision import Precision, precision_now
from pyro_dropout.training.compile.functional import Parameters
from pyro_dropout.training.one_kernel.dropout_network import DropoutNetwork, check, dropout_network
from pyro_dropout.training.optimisers import Update

WIDEST = 64  # units of a layer
DEEPEST = 4  # weight layers
LARGEST = 2**11  # weights of a matrix product, each side rounded up to a power of two of at least 16
# Products of a step in each direction, batch × weights. On an H200 many more of them take one processor as long as the
# kernels of a compiled step take all processors.
MOST_WORK = 200_000


def products() -> str:
    """Return how exact products in float32 are, in Triton's words: "ieee", unless torch was told that TF32 will do."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def padded(width: int) -> int:
    """Return the size of a tile that holds ``width`` units: a power of two, at least 16.

    Example:
        >>> [padded(width) for width in (1, 16, 50)]
        [16, 16, 64]
    """
    return max(16, 1 << (width - 1).bit_length())


def small_network(
    model: object, guide: object, loss: object, update: Update, parameters: Parameters, x: object, y: object, batch: int
) -> DropoutNetwork:
    """Return what the kernel has to know of a training, or raise ``CannotError``.

    Args:
        model: the model, or the first of several that are alike.
        guide: its guide.
        loss: the loss.
        update: the optimiser.
        parameters: what is trained.
        x: all inputs.
        y: all targets.
        batch: how many points a step has.

    Example:
        >>> import torch, pyro_dropout as pd
        >>> from pyro_dropout.training.optimisers import named
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        >>> model = pd.BayesianNet(net, likelihood=pd.Gaussian(tau=4.0))
        >>> guide, loss, x, y = pd.AutoDropout(model), pd.ELBO(), torch.zeros(5, 2), torch.zeros(5, 1)
        >>> parameters = Parameters(model, guide, loss, (x, y), {})
        >>> small_network(model, guide, loss, named("adam", 1e-3), parameters, x, y, 5).widths
        (2, 8, 1)
    """
    precision: Precision = "bf16" if precision_now() == "bf16" else "float32"
    network = dropout_network(model, guide, loss, update, parameters, x, y, precision=precision)
    widths = network.widths
    check(max(widths) <= WIDEST, f"a layer has more than {WIDEST} units")
    check(len(widths) - 1 <= DEEPEST, f"there are more than {DEEPEST} layers")
    largest = max((padded(a) * padded(b) for a, b in pairwise(widths) if b > 1), default=0)
    check(largest <= LARGEST, f"a layer has more than {LARGEST} weights")
    check(batch * network.weights <= MOST_WORK, "a step has too many products for one processor")
    return network
