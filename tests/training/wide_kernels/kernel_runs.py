"""Trainings by the kernel, and the same ones by the steps of any model with the same masks."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any
from unittest import mock

import pyro
import torch
from torch import Tensor, nn

import pyro_dropout as pd
from pyro_dropout.generative.model_call import ModelCall
from pyro_dropout.generative.precision import Precision, products_in
from pyro_dropout.mathematics.distributions import BernoulliMixture
from pyro_dropout.training.optimisers import Update, named
from pyro_dropout.training.training_task import TrainingTask
from pyro_dropout.training.wide_kernels import kernels
from tests.oracles.triton_here import PLACE, needed

needed()


def net(*widths: int, kind: Callable[[], nn.Module] = nn.ReLU) -> nn.Module:
    torch.manual_seed(1)
    parts = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), kind())]
    return nn.Sequential(*parts[:-1])


def data(points: int, inputs: int, outputs: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(points, inputs, generator=generator), torch.randn(points, outputs, generator=generator)


@contextlib.contextmanager
def by_the_kernel() -> Iterator[None]:
    """Within this context small networks are trained by the kernel, on a CPU too."""
    with mock.patch.object(kernels, "is_possible", return_value=True):
        yield


def one_run(
    model: Any,
    guide: Any,
    x: Tensor,
    y: Tensor,
    batch: int,
    update: Update | None,
    compile: bool,
    precision: Precision = "float32",
) -> Any:
    """Return a training that was set up as ``fit`` sets it up: by the kernel, or eagerly in float64 on the CPU."""
    if not compile:
        model, guide = copy.deepcopy((model, guide))
    how: Any = {"device": PLACE} if compile else {"device": "cpu", "dtype": torch.float64}
    model.to(**how), guide.to(**how)
    targets = y.to(**how) if y.is_floating_point() else y.to(how["device"])
    call = ModelCall(model, (x.to(**how), targets, len(x)))
    task = TrainingTask(guide, pd.ELBO(), call)
    pyro.clear_param_store()
    with by_the_kernel() if compile else contextlib.nullcontext(), products_in(precision if compile else "float32"):
        run = task.start(update or named("adam", 0.01), batch, compile)
    assert (run.engine == "kernels") is compile
    return run


def with_masks(run: Any, masks: Tensor, sites: list[tuple[int, int]]) -> Tensor:
    """Take eager steps with these masks, (steps, points, units); ``sites`` are the units of each layer that drops."""
    drawn = iter(step[:, first:last] for step in masks.double().cpu() for first, last in sites)

    def sample_masks(self: BernoulliMixture, sample_shape: Any = ()) -> list[Tensor]:
        kept = next(drawn)
        assert kept.shape == (*sample_shape, self.rows)
        return [kept, 1 - kept]

    losses = []
    with mock.patch.object(BernoulliMixture, "sample_masks", sample_masks):
        while sum(map(len, losses)) < len(masks):
            losses.append(run.advance(len(masks) - sum(map(len, losses))))
    return torch.cat(losses)


def masks_of(run: Any, steps: int, points: int, keep: float = 0.7, networks: int = 1) -> Tensor:
    """Return masks for all layers of a run's networks, (steps, networks, points, units)."""
    units = sum(run._loop._network.widths[:-1])
    generator = torch.Generator().manual_seed(3)
    return (torch.rand(steps, networks, points, units, generator=generator) < keep).float().to(PLACE)
