"""Data-parallel training: each rank has a share of every batch, and all take the same step.

With N points, a batch of B and R ranks, rank r has s_r of the batch's points, and its loss is that of a mini-batch of
s_r, L_r = (N / s_r) Σ_{i in share} -log p(y_i | w) + KL. The gradients of (R s_r / B) L_r are averaged over ranks, and
since Σ_r s_r = B, that average is (N / B) Σ_{i in batch} -log p(y_i | w) + KL: the loss of the whole batch with one KL,
even if B is not a multiple of R.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyro_dropout.generative.inputs import AnyInputs
from pyro_dropout.generative.trial_run import quietly
from pyro_dropout.protocols import PyroModel
from pyro_dropout.training.compile.functional import Buffers, Loss, Parameters, loss_and_gradients
from pyro_dropout.training.distributed.process_group import Group

Parts = tuple[PyroModel, PyroModel, Loss]  # model, guide and loss


@dataclass
class WeightedLoss:
    """A loss times a number."""

    loss: Loss
    weight: float

    def differentiable_loss(self, model: object, guide: object, *args: object) -> Tensor:
        """Return the weighted loss."""
        return self.weight * self.loss.differentiable_loss(model, guide, *args)


class SharedGradients:
    """The gradients of a batch that is split among the ranks, as a function of parameters, buffers and indices."""

    def __init__(self, group: Group, parts: Parts, parameters: Parameters, x: AnyInputs, y: Tensor, batch: int) -> None:
        model, guide, loss = parts
        self._group, self._x, self._y = group, x, y
        self._share = group.share(batch)
        weight = group.world * (self._share.stop - self._share.start) / batch
        self._parts = model, guide, WeightedLoss(loss, weight), parameters
        self._places = Buffers(model, guide)
        first = [torch.arange(batch, device=x.device)] if batch < len(x) else []
        before = [buffer.clone() for buffer in self._places.values]
        with quietly(model, guide):
            self._own(parameters.values, *first)
            moved = [not torch.equal(*pair) for pair in zip(before, self._places.values, strict=True)]
        self._changing = [k for k, any_rank in enumerate(group.any(*moved)) if any_rank]

    def __call__(self, values: list[Tensor], buffers: list[Tensor], *index: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return this rank's part of the loss, whose mean over ranks is the loss, and the whole gradients."""
        with self._places.replaced(buffers):
            loss, gradients = self._own(values, *index)
        found = [buffers[k] for k in self._changing]
        # Running means are averaged; whole numbers, such as how many batches were seen, are those of the first rank.
        self._average([*gradients, *(buffer for buffer in found if buffer.is_floating_point())])
        self._group.copy_from_first([buffer for buffer in found if not buffer.is_floating_point()])
        return loss, gradients

    def _own(self, values: list[Tensor], *index: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the weighted loss of this rank's share of a batch, and its gradients."""
        rows = index[0][self._share] if index else self._share
        found = loss_and_gradients(*self._parts, values, (self._x[rows], self._y[rows], len(self._x)), {})
        self._parts[-1].unused = set()  # another rank's share may depend on them
        return found

    def _average(self, tensors: list[Tensor]) -> None:
        """Replace tensors by their means over ranks, in one message for each type."""
        if self._group.world == 1:
            return
        for kind in dict.fromkeys(tensor.dtype for tensor in tensors):
            own = [tensor for tensor in tensors if tensor.dtype == kind]
            flat = torch.cat([tensor.reshape(-1) for tensor in own]) / self._group.world
            dist.all_reduce(flat)
            for tensor, mean in zip(own, flat.split([tensor.numel() for tensor in own]), strict=True):
                tensor.copy_(mean.reshape(tensor.shape))


def start_alike(group: Group, parts: Iterable[object], parameters: Parameters) -> None:
    """Give all ranks the tensors of the first: those of modules, and what is trained; raise unless they are alike."""
    modules = [part for part in parts if isinstance(part, nn.Module)]
    tensors = {id(t): t for module in modules for t in (*module.parameters(), *module.buffers())}
    tensors |= {id(tensor): tensor for tensor in parameters.by_name.values()}
    group.check_same({"the tensors of model and guide": [[*t.shape, str(t.dtype)] for t in tensors.values()]})
    group.copy_from_first(list(tensors.values()))
