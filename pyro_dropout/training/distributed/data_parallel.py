"""Data-parallel training: each rank has a share of every batch, and all take the same step.

With N points, a batch of B and R ranks, rank r has s_r of the batch's points, and its loss is that of a mini-batch of
s_r, L_r = (N / s_r) Σ_{i in share} -log p(y_i | w) + KL. PyTorch's DistributedDataParallel averages the gradients of
(R s_r / B) L_r over ranks, and since Σ_r s_r = B, that average is (N / B) Σ_{i in batch} -log p(y_i | w) + KL: the loss
of the whole batch with one KL, even if B is not a multiple of R.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from pyro import poutine
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pyro_dropout.engines.choose import HowCompiled
from pyro_dropout.generative.inputs import AnyInputs
from pyro_dropout.generative.trial_run import quietly
from pyro_dropout.mathematics.errors import PyroDropoutError, RangeError
from pyro_dropout.protocols import PyroModel
from pyro_dropout.training.batches import Batches
from pyro_dropout.training.compile.functional import Buffers, Loss, Parameters, unvalidated
from pyro_dropout.training.distributed.process_group import Group
from pyro_dropout.training.make_run import make_run
from pyro_dropout.training.optimisers import Update
from pyro_dropout.training.preflight import check_trained
from pyro_dropout.training.runner import TrainingRun
from pyro_dropout.training.torch_optimisers import for_parameters

Parts = tuple[PyroModel, PyroModel, Loss]  # model, guide and loss


class Objective(nn.Module):
    """The loss as a module: its parameters replace those of the model and the guide while it runs."""

    def __init__(self, model: PyroModel, guide: PyroModel, loss: Loss, parameters: Parameters) -> None:
        super().__init__()
        self.values = nn.ParameterList(nn.Parameter(value.clone()) for value in parameters.values)
        self.parts = (model, guide, loss, parameters)  # in a tuple, so that they are not submodules

    def forward(self, weight: float, *args: object) -> Tensor:
        """Return the loss at the model's arguments, times ``weight``."""
        model, guide, loss, parameters = self.parts
        with unvalidated(), poutine.block(), parameters.replaced(list(self.values)):
            return weight * loss.differentiable_loss(model, guide, *args)


class SharedGradients:
    """The gradients of a batch that is split among the ranks, as a function of parameters, buffers and indices."""

    def __init__(self, group: Group, parts: Parts, parameters: Parameters, x: AnyInputs, y: Tensor, batch: int) -> None:
        model, guide, _ = parts
        self._group, self._x, self._y = group, x, y
        self._share = group.share(batch)
        self._weight = group.world * (self._share.stop - self._share.start) / batch
        self._places = Buffers(model, guide)
        self.objective = Objective(*parts, parameters)
        unused, self._changing = self._tried(model, guide, batch)
        # The objective has no buffers, because they are shared here: DDP would give all ranks those of the first, which
        # has seen only its own share.
        self._parallel = DistributedDataParallel(self.objective, find_unused_parameters=unused)
        with quietly(model, guide):
            # DDP orders its messages by the first gradients it sees. They do not come from the training's first step,
            # so a resumed training sums in the same order.
            self(list(self.objective.values), self._places.values, *self._first_batch(batch))

    def __call__(self, values: list[Tensor], buffers: list[Tensor], *index: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return this rank's part of the loss, whose mean over ranks is the loss, and the whole gradients."""
        own = list(self.objective.values)
        with torch.no_grad():
            for mine, value in zip(own, values, strict=True):
                mine.copy_(value)
        for mine in own:
            mine.grad = None
        with torch.enable_grad(), self._places.replaced(buffers):
            loss = self._parallel(self._weight, *self._arguments(*index))
            loss.backward()
        self._share_buffers(buffers)
        return loss.detach(), [torch.zeros_like(p) if p.grad is None else p.grad for p in own]

    def _arguments(self, *index: Tensor) -> tuple[AnyInputs, Tensor, int]:
        rows = index[0][self._share] if index else self._share
        return self._x[rows], self._y[rows], len(self._x)

    def _first_batch(self, batch: int) -> list[Tensor]:
        return [torch.arange(batch, device=self._x.device)] if batch < len(self._x) else []

    def _tried(self, model: PyroModel, guide: PyroModel, batch: int) -> tuple[bool, list[int]]:
        """Return whether any rank's loss leaves a parameter out, and which buffers any rank's forward pass changes."""
        before = [buffer.clone() for buffer in self._places.values]
        with quietly(model, guide), torch.enable_grad():
            loss = self.objective(self._weight, *self._arguments(*self._first_batch(batch)))
            slopes = torch.autograd.grad(loss, list(self.objective.values), allow_unused=True)
            self.objective.parts[3].check_used(slopes)
            moved = [not torch.equal(*pair) for pair in zip(before, self._places.values, strict=True)]
        unused, *changing = self._group.any(any(slope is None for slope in slopes), *moved)
        return bool(unused), [k for k, each in enumerate(changing) if each]

    def _share_buffers(self, buffers: list[Tensor]) -> None:
        """Give all ranks the same buffers: running means are averaged, whole numbers are taken from the first rank."""
        if self._group.world == 1:
            return
        found = [buffers[k] for k in self._changing]
        means = [buffer for buffer in found if buffer.is_floating_point()]
        if means:
            flat = torch.cat([buffer.reshape(-1).double() for buffer in means])
            dist.all_reduce(flat)
            parts = (flat / self._group.world).split([buffer.numel() for buffer in means])
            for buffer, part in zip(means, parts, strict=True):
                buffer.copy_(part.reshape(buffer.shape))
        self._group.copy_from_first([buffer for buffer in found if not buffer.is_floating_point()])


def parallel_run(group: Group, parts: Parts, x: AnyInputs, y: Tensor, update: Update, batch: int) -> TrainingRun:
    """Return one training run of all ranks together, ready to start from the first rank's parameters.

    Args:
        group: the ranks.
        parts: model, guide and loss.
        x: all inputs, the same on every rank.
        y: all targets.
        update: the optimiser.
        batch: points in a batch, over all ranks.
    """
    model, guide, _ = parts
    share = group.share(batch)
    parameters = Parameters(*parts, (x[share], y[share], len(x)), {})
    check_trained(parameters.names, guide)
    update = for_parameters(update, parameters.by_name.values())
    # Without their names, which depend on what a process has built before.
    shapes = [[list(value.shape), str(value.dtype)] for value in parameters.values]
    group.check_same({"the trained parameters": shapes})
    start_alike(group, (model, guide), parameters.by_name.values())
    batches = Batches(batch, torch.arange(len(x), device=x.device)) if batch < len(x) else None
    gradients_of = SharedGradients(group, parts, parameters, x, y, batch)
    buffers = (Buffers(model, guide).values,)
    return make_run(gradients_of, parameters, update, inputs=buffers, batches=batches, compile=False, guarded=False)


def start_alike(group: Group, parts: Iterable[object], others: Iterable[Tensor] = ()) -> None:
    """Give all ranks the tensors of the first: those of modules, and others; raise unless they have the same shapes."""
    modules = [part for part in parts if isinstance(part, nn.Module)]
    tensors = {id(t): t for module in modules for t in (*module.parameters(), *module.buffers())}
    tensors |= {id(tensor): tensor for tensor in others}
    group.check_same({"the tensors of model and guide": [list(tensor.shape) for tensor in tensors.values()]})
    group.copy_from_first(list(tensors.values()))


def check_parallel(group: Group, batch: int, compile: HowCompiled) -> None:
    """Raise an error unless the ranks can share a training run."""
    if compile is True:
        raise PyroDropoutError(
            "compile=True and distributed=True cannot be combined: the steps of several processes run eagerly. Leave"
            " compile at 'auto', or train in one process."
        )
    if batch < group.world:
        raise RangeError(
            f"a batch has {batch} points, fewer than the {group.world} processes, and each needs at least one: give a"
            " larger batch_size (it counts over all processes), or start fewer."
        )
