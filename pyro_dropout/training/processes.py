"""One training, shared among the processes that torchrun has started: each computes its share of every mini-batch.

They send tensors only: the mean of the loss and its gradients at each step, and between steps a few numbers by which
all decide alike. Every process keeps all data and all parameters, and takes the same mini-batches in the same order.
"""

import hashlib
import json
import os
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.generative.inputs import AnyInputs, takes_all
from pyro_dropout.generative.model_call import ModelCall, takes
from pyro_dropout.generative.process_state import seeded
from pyro_dropout.guides.ensemble import Ensemble
from pyro_dropout.protocols import PyroModel, Record
from pyro_dropout.training.checkpoints.posterior_file import identity_of, tensors_of
from pyro_dropout.training.checkpoints.tensor_file import digest
from pyro_dropout.training.compile.functional import Arguments, Gradients, Parameters
from pyro_dropout.training.loss.temperature import current_step
from pyro_dropout.training.training_run import TrainingRun, TrainingTask

_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Processes:
    """The processes of a training, as seen by the one with number ``rank``, which computes in ``place``."""

    rank: int
    count: int
    place: torch.device

    def agreed(self, *numbers: float) -> list[float]:
        """Return the largest that any process has given, of each number."""
        told = torch.tensor(numbers, dtype=torch.float64, device=self.place)
        dist.all_reduce(told, dist.ReduceOp.MAX)
        return list(told.tolist())

    def mean(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return the mean of each tensor over all processes, bitwise equal on all of them."""
        flat = torch.cat([each.detach().reshape(-1).to(self.place) for each in tensors])
        dist.all_reduce(flat)
        parts = (flat / self.count).split([each.numel() for each in tensors])
        return [part.reshape(each.shape).to(each) for part, each in zip(parts, tensors, strict=True)]

    def check_same(self, run: TrainingRun, model: PyroModel, guide: PyroModel, facts: Record) -> None:
        """Raise an error on all processes unless all begin alike; they would wait for each other for ever."""
        tensors, rest = run.state()
        state = {name: digest(value) for name, value in (tensors | tensors_of(model, guide)).items()}
        told = json.dumps([facts, state, rest, identity_of(model, guide)], sort_keys=True, default=str)
        number = int.from_bytes(hashlib.sha256(told.encode()).digest()[:6])  # exact in float64
        largest, smallest = self.agreed(number, -number)
        if largest != -smallest:
            raise PyroDropoutError(
                f"the {self.count} processes were not given the same: data, settings or start values differ between"
                " them. Each must make the same call with the same data; seed what is random (torch.manual_seed)."
            )


@dataclass
class SharedTask(TrainingTask):
    """A training whose gradient is the mean over processes, each with rows and masks of its own."""

    processes: Processes = field(kw_only=True)
    seed: int | None = field(kw_only=True)

    def start(self, *how: Any) -> TrainingRun:
        """Return a training run whose decisions all processes share."""
        run = super().start(*how)
        run.agreed, run.shared = self.processes.agreed, True
        return run

    def _arguments(self, *row: Tensor) -> Arguments:
        rows = row[0] if row else torch.arange(self.call.count or 1, device=self.processes.place)
        return super()._arguments(rows.chunk(self.processes.count)[self.processes.rank])

    def _gradients(self, parameters: Parameters, call: ModelCall) -> Gradients:
        own, ours, many = super()._gradients(parameters, call), self.processes, range(len(parameters.names))

        def gradients_of(values: list[Tensor], buffers: list[Tensor], *row: Tensor) -> tuple[Tensor, list[Tensor]]:
            failed, kept = None, [each for each in buffers if each.is_floating_point()]
            before, step = [each.clone() for each in kept], current_step()
            # By the step's number, so that a resumed training draws what an uninterrupted one does.
            name = f"{self.seed}:{ours.rank}:{0 if step is None else int(step)}"
            try:
                with seeded(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) >> 2, ours.place):
                    loss, slopes = own(values, buffers, *row)
            except Exception as cause:  # the others must hear of it: they wait for this process
                failed, loss, slopes = cause, values[0].new_zeros(()), [torch.zeros_like(each) for each in values]
            facts = torch.tensor([failed is not None, *(k not in parameters.unused for k in many)]).to(loss)
            # Running statistics: what the step has changed. Others may be infinite, and stay as they are.
            moved = [torch.where(now == was, 0.0, now - was) for now, was in zip(kept, before, strict=True)]
            facts, loss, *rest = ours.mean([facts, loss, *slopes, *moved])
            if facts[0] > 0:
                raise failed or PyroDropoutError(f"another of the {ours.count} processes failed at a step; see there.")
            parameters.unused = {k for k in many if not facts[1 + k]}
            for now, was, change in zip(kept, before, rest[len(values) :], strict=True):
                now.copy_(was + change)
            return loss, rest[: len(values)]

        return gradients_of


def join(call: ModelCall, guide: object, batch: int, place: torch.device, fixed: bool, **refused: bool) -> Processes:
    """Return the processes that share a training; join their process group, unless there is one.

    ``refused`` are things that cannot be shared, and whether they were asked for. A GPU is that of the process on its
    machine, unless its number is ``fixed``.
    """
    pair = len(call.args) == 3 and isinstance(call.args[0], AnyInputs) and isinstance(call.args[1], Tensor)
    called = pair and not call.kwargs and takes(call.model, "num_data")
    refused |= {
        "an Ensemble": isinstance(guide, Ensemble),
        "whole_batch=True": takes_all(call.model),
        "a model that is not called as model(x, y, num_data)": not called,
        f"device {place}": place.type not in ("cpu", "cuda"),
    }
    for what in (name for name, asked in refused.items() if asked):
        raise PyroDropoutError(f"distributed=True does not go with {what}; change that, or train in one process.")
    local = os.environ.get("LOCAL_RANK")
    if place.type == "cuda" and not fixed and local:
        place = torch.device("cuda", int(local))
    if not dist.is_initialized():
        missing = [name for name in _NEEDED if not os.environ.get(name)]
        if missing:
            how = "start the script with torchrun, as in torchrun --nproc-per-node 2 script.py"
            raise PyroDropoutError(f"distributed=True: the environment lacks {', '.join(missing)}; {how}.")
        if place.type == "cuda":
            torch.cuda.set_device(place)
        dist.init_process_group("gloo" if place.type == "cpu" else "cpu:gloo,cuda:nccl")
    found = Processes(dist.get_rank(), dist.get_world_size(), place)
    if batch % found.count:
        whose = f"the {found.count} processes must divide it"
        raise PyroDropoutError(f"batch_size, or N without mini-batches, got {batch}: {whose} (distributed=True).")
    return found
