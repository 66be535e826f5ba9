"""The likelihoods under contract: every one of the registry, some with several settings, and targets for each."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_dropout import Bernoulli, Categorical, Counts, Gaussian, HeteroscedasticGaussian, Poisson, Transformed
from pyro_dropout.generative import Likelihood
from pyro_dropout.registry import likelihoods
from tests.contracts.student_t import HeavyTails

N = 6  # data points


class Case(NamedTuple):
    """A likelihood as a user makes it, how many outputs it takes, and targets for N points."""

    make: Callable[[], Likelihood]
    outputs: int
    targets: Callable[[], Tensor]


LIKELIHOODS: dict[str, Case] = {
    "gaussian": Case(lambda: Gaussian(torch.tensor([0.25, 3.0], dtype=torch.float64)), 2, lambda: torch.randn(N, 2)),
    "heteroscedastic": Case(HeteroscedasticGaussian, 4, lambda: torch.randn(N, 2)),
    "categorical": Case(Categorical, 3, lambda: torch.randint(3, (N,))),
    "bernoulli": Case(Bernoulli, 2, lambda: torch.randint(2, (N, 2))),
    "poisson": Case(Poisson, 2, lambda: torch.randint(9, (N, 2))),
    "log-normal": Case(lambda: Transformed(Gaussian(0.25), "log"), 2, lambda: torch.rand(N, 2) + 0.1),
    "logit-normal": Case(
        lambda: Transformed(HeteroscedasticGaussian(), "logit"), 4, lambda: 0.1 + 0.8 * torch.rand(N, 2)
    ),
    "counts": Case(lambda: Counts(3.0, offset=1.0), 2, lambda: torch.randint(9, (N, 2))),
    "counts by input": Case(lambda: Counts(3.0, by_input=True), 4, lambda: torch.randint(9, (N, 2))),
    "heavy tails": Case(HeavyTails, 2, lambda: torch.randn(N, 2)),
}


def _drawn(make: Callable[[], Likelihood], outputs: int) -> Tensor:
    return make().distribution(torch.zeros(N, outputs)).sample()


_COVERED = {type(case.make()) for case in LIKELIHOODS.values()}
LIKELIHOODS |= {
    name: Case(entry.make, entry.outputs, partial(_drawn, entry.make, entry.outputs))
    for name, entry in likelihoods().items()
    if entry.likelihood not in _COVERED
}
