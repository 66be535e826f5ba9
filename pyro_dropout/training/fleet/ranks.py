"""A fleet on several ranks: each trains some of the replicas alone, and at the end all ranks have all of them.

Replicas do not interact in training, so the ranks do not communicate until it is over.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyro_dropout.mathematics.errors import PyroDropoutError
from pyro_dropout.training.checkpoints.tensor_file import digest
from pyro_dropout.training.checkpoints.training_checkpoint import Checkpoint
from pyro_dropout.training.distributed.process_group import Group, join
from pyro_dropout.training.distributed.torchrun import local_device
from pyro_dropout.training.history import DivergedError, History


def train_apart(
    fleet: Any,
    train: Callable[..., History],
    x: Tensor,
    y: Tensor,
    progress: bool,
    checkpoint: str | Path | Checkpoint | None,
    options: dict[str, Any],
) -> History:
    """Train replicas r, r + R, r + 2R, ... on rank r of R, and return the history of all on all ranks.

    Args:
        fleet: all replicas, built alike on every rank.
        train: trains a fleet in one process: ``train(fleet, x, y, progress, checkpoint, options)``.
        x: inputs that all replicas draw from.
        y: targets.
        progress: whether the first rank shows a progress bar, of its own replicas.
        checkpoint: where checkpoints are written, in a folder for each rank.
        options: those of ``Fleet.prepare``.
    """
    device = local_device(options.get("device"), fleet.place())
    group = join(device)
    rows, rates = fleet.rows(x, options.get("indices")), fleet.rates(options.get("lr", 1e-3))
    told = {name: options.get(name) for name in ("steps", "epochs", "batch_size", "seed", "clip_norm")}
    data = {"x": digest(x), "y": digest(y), "indices": digest(rows), "lr": rates.tolist()}
    group.check_same({"the number of replicas": len(fleet), **told, **data, "checkpoint": str(checkpoint)})
    base = group.one_seed(options.get("seed"))
    own = list(range(group.rank, len(fleet), group.world))
    folder = None if checkpoint is None else _folder(group, checkpoint, len(fleet))
    mine = {**options, "device": device, "seed": group.seed(base), "indices": rows[own], "lr": rates[own]}
    fleet.to(device)
    history, lost = None, ""
    if own:
        try:
            history = train(fleet.select(own), x, y, progress and group.first, folder, mine)
        except DivergedError as stop:  # all of its replicas diverged; others' may not
            lost = str(stop)
    said = [each for each in group.gather_facts(lost) if each]
    if len(said) == min(group.world, len(fleet)):
        raise DivergedError(said[0])
    found = _joined(group, history, len(fleet))
    _exchange(group, fleet, device)
    return found


def _folder(group: Group, checkpoint: str | Path | Checkpoint, replicas: int) -> Checkpoint:
    """Return where this rank writes checkpoints; raise if the folder is from another number of ranks."""
    how = checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint(checkpoint)
    root = Path(how.folder)

    def look() -> tuple[dict[str, Tensor], None]:
        there = len(list(root.glob("rank-*"))) if root.is_dir() else 0
        if there and there != min(group.world, replicas):
            raise PyroDropoutError(
                f"{str(root)!r} holds checkpoints of a fleet on {there} processes, but these are {group.world}. Start"
                " as many as before to resume, or give another folder to start over."
            )
        return {}, None

    group.from_first(look)
    return dataclasses.replace(how, folder=root / f"rank-{group.rank:03d}")


def _joined(group: Group, own: History | None, replicas: int) -> History:
    """Return the history of all replicas, in order; NaN where a rank lost its replicas before the end."""
    steps, compiled = group.any(0 if own is None else own.steps, own is not None and own.compiled)
    times = torch.zeros(2, dtype=torch.float64)
    if own is not None:
        times = torch.tensor([own.seconds, own.compile_seconds], dtype=torch.float64)
    seconds, compiling = torch.stack(group.gather(times)).amax(0).tolist()
    losses = torch.full((steps, replicas), float("nan"))
    for rank in range(group.world):
        part = losses[:, rank :: group.world]
        if rank == group.rank and own is not None:
            part = own.losses.to(part.dtype)
        losses[:, rank :: group.world] = group.copied(part.contiguous(), rank)
    precision = torch.get_float32_matmul_precision()
    return History(losses, steps, seconds, compiling, bool(compiled), precision)


def _exchange(group: Group, fleet: Any, device: torch.device) -> None:
    """Give every rank what the others' replicas have learned, one stacked tensor at a time."""
    for rank in range(group.world):
        replicas = [fleet[k] for k in range(rank, len(fleet), group.world)]
        rows = [[t for part in pair for t in (*part.parameters(), *part.buffers())] for pair in replicas]
        for tensors in zip(*rows, strict=True):
            learned = group.copied(torch.stack([tensor.detach() for tensor in tensors]), rank)
            for tensor, value in zip(tensors, learned, strict=True):
                tensor.data = value.to(device)
