"""Fitting a guide to data: mini-batches, progress, early stopping, and a stop when the loss is no longer a number."""

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyro
import torch
from torch import Tensor, nn

from pyro_dropout.inference.admission import check_how, check_length, check_owned, check_targets, check_watch
from pyro_dropout.inference.data_parallel import check_parallel, parallel_run
from pyro_dropout.inference.distributed import ALONE, Group, join
from pyro_dropout.inference.elbo import ELBO
from pyro_dropout.inference.facts import told_loss, told_update
from pyro_dropout.inference.functional import (
    Buffers,
    Parameters,
    check_programs,
    loss_and_gradients,
    make_gradients,
    make_step,
    quietly,
    unvalidated,
)
from pyro_dropout.inference.history import History
from pyro_dropout.inference.looping import Watch, loop
from pyro_dropout.inference.memory import explained
from pyro_dropout.inference.resumption import Checkpoint, Keeper
from pyro_dropout.inference.runs import Batches, BesideRun, Run
from pyro_dropout.inference.svi import Compile, check_compile
from pyro_dropout.inference.tensor_file import digest
from pyro_dropout.inference.torchrun import local_device
from pyro_dropout.inference.updates import Schedule, Update, chosen, from_optimiser
from pyro_dropout.mathematics.errors import PyroDropoutError


def fit(
    model: Any,
    guide: Any,
    x: Tensor,
    y: Tensor,
    *,
    steps: int | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    lr: float = 1e-3,
    optim: str | torch.optim.Optimizer | Update = "adam",
    schedule: Schedule | None = None,
    clip_norm: float | None = None,
    loss: Any = None,
    compile: Compile = "auto",
    progress: bool = True,
    seed: int | None = None,
    device: torch.device | str | None = None,
    validation: tuple[Tensor, Tensor] | None = None,
    patience: int = 10,
    check_every: int | None = None,
    checkpoint: str | Path | Checkpoint | None = None,
    distributed: bool = False,
) -> History:
    """Train a guide (and a model's ordinary parameters) on data, and say how it went.

    Mini-batches are shuffled and without replacement within an epoch. The step is compiled, optimiser and mini-batch
    gather included; on a GPU many steps run in one CUDA graph, with the data resident there.

    Args:
        model: a Pyro model ``model(x, y, num_data)``.
        guide: its guide.
        x: inputs, (N, ...).
        y: targets, (N, D) or (N,).
        steps: how many steps to take; or give ``epochs``.
        epochs: how often to go through the data.
        batch_size: points in a mini-batch; all of them by default, and where there are fewer.
        lr: learning rate.
        optim: "adam", "adamw", "sgd" (momentum 0.9), an ``Update``, or a torch optimiser of the guide's parameters.
            Adam, AdamW and SGD join the compiled step, from zero state; any other runs beside it.
        schedule: multiplies ``lr``: a function of the number of steps done, such as ``inverse_decay()``.
        clip_norm: the largest norm of the gradient; None for any.
        loss: ``ELBO()`` by default.
        compile: "auto", True or False, as in ``SVI``.
        progress: show a progress bar with the loss and the speed.
        seed: of weight draws and mini-batches.
        device: where to train; model, guide and data are moved there. By default, where the model is.
        validation: (x, y) to watch; training stops when its log-likelihood has not improved ``patience`` times, and the
            best parameters are put back.
        patience: how many checks without improvement are borne.
        check_every: steps between checks; a fiftieth of all steps by default. On a GPU steps come in twenties, and a
            check comes after the twenty in which it falls. The last step is always checked. Checks draw random numbers
            of their own, so that training does not depend on how many there are.
        checkpoint: a folder for checkpoints, or a ``Checkpoint`` that says how often to write them. If the folder holds
            one of this same training, it goes on from there and ends as if it had never stopped, bit by bit.
        distributed: whether this is one of several processes that torchrun has started for one training, on one machine
            or many. Each makes the same call with all of the data, and computes on its share of every batch;
            ``batch_size`` counts over all. All end with the same parameters, the first shows progress and writes the
            checkpoints, and steps run eagerly.

    Returns:
        The history of the loss.

    Example:
        >>> import torch, pyro_dropout as pd
        >>> x = torch.linspace(-1, 1, 64).unsqueeze(-1)
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 20), torch.nn.ReLU(), torch.nn.Linear(20, 1))
        >>> model = pd.BayesianNet(net, likelihood=pd.Gaussian(tau=25.0))
        >>> guide = pd.AutoDropout(model, keep=0.95)
        >>> quiet = {"compile": False, "progress": False, "seed": 0}
        >>> history = pd.fit(model, guide, x, x**2, epochs=50, batch_size=32, lr=0.01, **quiet)
        >>> history.steps, bool(history.losses[-20:].mean() < history.losses[:20].mean())
        (100, True)
    """
    check_programs(model, guide)
    check_compile(compile)
    check_length(x, y, steps, epochs, batch_size)
    check_how(clip_norm, seed, device, lr=lr, schedule=schedule, loss=loss)
    check_watch(validation, patience, check_every)
    check_targets(model, x, y)
    if validation is not None:
        check_targets(model, *validation, watched=True)
    check_owned(optim, model, guide)
    update = _update(optim, lr, schedule, clip_norm)
    group = ALONE
    if distributed:
        device = local_device(device, move_to(None, [model, guide]))
        group = join(device)
    if seed is not None:
        pyro.set_rng_seed(seed)
    place = move_to(device, [model, guide])
    x, y = x.to(place), y.to(place)
    count = len(x)
    batch = count if batch_size is None else min(batch_size, count)
    total = steps if steps is not None else int(epochs or 0) * max(1, count // batch)
    task = _Task(model, guide, ELBO() if loss is None else loss, x, y)
    facts: dict[str, Any] = {"batch": batch, "seed": seed}
    if distributed or checkpoint is not None:
        facts["update"] = told_update(update)
    if distributed:
        check_parallel(group, batch, compile)
        facts["world"] = group.world
        watched = None if validation is None else [*map(digest, validation), patience, check_every]
        group.check_same(task.facts() | facts | {"steps": total, "validation": watched, "checkpoint": str(checkpoint)})

    def train() -> History:
        run = task.run_on(group, update, batch, seed) if distributed else task.run(update, batch, compile)
        watch = None
        if validation is not None:
            every = check_every or max(1, total // 50)
            watch = Watch(model, guide, run, validation, patience, every, seed, group)
        keeper = None
        if checkpoint is not None:
            same = facts | task.facts() | ({} if watch is None else {"validation": watch.facts()})
            keeper = Keeper(checkpoint, run, model, guide, same, watch, group)
        return loop(run, total, progress, watch=watch, blame=task.blame, keeper=keeper, group=group)

    return explained(train, task.try_step, batch)


def move_to(device: torch.device | str | None, parts: Iterable[Any]) -> torch.device | str:
    """Move modules to ``device``; without one, return the device that they are on."""
    modules = [part for part in parts if isinstance(part, nn.Module)]
    if device is not None:
        for module in modules:
            module.to(device)
        return device
    return next((p.device for module in modules for p in module.parameters()), torch.device("cpu"))


def _update(
    optim: Any, lr: float, schedule: Schedule | None, clip_norm: float | None
) -> Update | torch.optim.Optimizer:
    if not isinstance(optim, torch.optim.Optimizer):
        return chosen(optim, lr, schedule, clip_norm)
    found = from_optimiser(optim, schedule=schedule, clip_norm=clip_norm)
    if found is None and (schedule is not None or clip_norm is not None):
        raise PyroDropoutError(
            f"{type(optim).__name__} with these options runs beside the step, where schedule and clip_norm do not reach"
            " it; use Adam, AdamW or SGD with one group of parameters, or leave the two out."
        )
    return optim if found is None else found


@dataclass
class _Task:
    """What is fitted to what."""

    model: Any
    guide: Any
    loss: Any
    x: Tensor
    y: Tensor

    def run(self, update: Update | torch.optim.Optimizer, batch: int, compile: Compile) -> Run:
        """Return a training of the guide's and the model's parameters, ready to start."""
        parts = (self.model, self.guide, self.loss)
        first = (self.x[:batch], self.y[:batch], len(self.x))
        parameters = Parameters(*parts, first, {})
        batches = None
        if batch < len(self.x):
            batches = Batches(batch, torch.arange(len(self.x), device=self.x.device))
        buffers = (Buffers(self.model, self.guide).values,)
        with quietly(self.model, self.guide):  # compiling runs the model, whose buffers must not notice
            if isinstance(update, torch.optim.Optimizer):
                gradients_of = make_gradients(*parts, parameters, self._arguments)
                trained = list(parameters.by_name.values())
                return BesideRun(gradients_of, trained, update, inputs=buffers, batches=batches, compile=compile)
            step = make_step(*parts, parameters, update, self._arguments)
            options: Any = {"inputs": buffers, "batches": batches, "compile": compile}
            return Run(step, parameters.values, update, write=parameters.write, **options)

    def run_on(self, group: Group, update: Update | torch.optim.Optimizer, batch: int, seed: int | None) -> Run:
        """Return a training by several ranks, of which each draws its own masks, but all the same batches."""
        base = group.one_seed(seed)
        torch.manual_seed(base)
        run = parallel_run(group, (self.model, self.guide, self.loss), self.x, self.y, update, batch)
        torch.manual_seed(group.seed(base))
        return run

    def _arguments(self, *index: Tensor) -> tuple[Any, Any]:
        if not index:
            return (self.x, self.y, len(self.x)), {}
        return (self.x[index[0]], self.y[index[0]], len(self.x)), {}

    def try_step(self, points: int) -> None:
        """Take the gradient of the first ``points`` points, and throw it away: to see whether it fits into memory."""
        index = torch.arange(points, device=self.x.device) % len(self.x)
        batch = (self.x[index], self.y[index], len(self.x))
        parts = (self.model, self.guide, self.loss)
        parameters = Parameters(*parts, batch, {})
        moments = [torch.zeros_like(value) for value in parameters.values for _ in range(2)]  # as Adam has them
        with quietly(self.model, self.guide):
            loss_and_gradients(*parts, parameters, parameters.values, batch, {})
        del moments

    def facts(self) -> dict[str, Any]:
        """Return what must be the same in a training that is taken up again."""
        return {"x": digest(self.x), "y": digest(self.y), "loss": told_loss(self.loss)}

    def blame(self) -> str:
        """Name a site whose term is not a number at the published parameters; "" where all are."""
        if not isinstance(self.loss, ELBO):
            return ""
        # Parameters that are no numbers leave their mark on running means, and some distributions refuse them.
        with (
            torch.no_grad(),
            unvalidated(),
            quietly(self.model, self.guide),
            contextlib.suppress(RuntimeError, ValueError),
        ):
            terms = self.loss.by_site(self.model, self.guide, self.x, self.y, len(self.x))
            return next((name for name, term in terms.items() if not bool(torch.isfinite(term).all())), "")
        return ""
