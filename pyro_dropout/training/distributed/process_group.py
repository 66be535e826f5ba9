"""A process group for training: how the processes find each other, their ranks, and their messages.

They are started by torchrun, and communicate through PyTorch's process group. They exchange only tensors, as bytes, and
JSON; nothing that could run as code. Everything here is called by all of them, in the same order.
"""

import atexit
import hashlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pyro_dropout.errors import PyroDropoutError, RangeError
from pyro_dropout.protocols import Record

Facts = TypeVar("Facts")  # anything that JSON can hold

_SEEDS = 2**32  # the range of numpy, which Pyro seeds too


@dataclass(frozen=True)
class Group:
    """The processes of a training run, as seen by one of them; a single process is a group of one.

    Attributes:
        rank: the number of this process, from 0.
        world: how many there are.
        place: where tensors are while they are sent.

    Example:
        >>> from pyro_dropout.training.distributed.process_group import Group
        >>> [Group(rank, 3).share(10) for rank in range(3)]
        [slice(0, 4, None), slice(4, 7, None), slice(7, 10, None)]
        >>> Group().any(False, True), Group().first
        ([0, 1], True)
    """

    rank: int = 0
    world: int = 1
    place: torch.device = torch.device("cpu")  # noqa: RUF009 (it is not mutable)

    @property
    def first(self) -> bool:
        """Whether this is the process that shows progress and writes files."""
        return self.rank == 0

    def share(self, count: int) -> slice:
        """Return which of ``count`` items are this rank's: each item has one rank, and shares differ by one at most."""
        size, more = divmod(count, self.world)
        start = self.rank * size + min(self.rank, more)
        return slice(start, start + size + (self.rank < more))

    def seed(self, base: int) -> int:
        """Return a seed for this rank."""
        return int.from_bytes(hashlib.sha256(f"{base}:{self.rank}".encode()).digest()[:8]) % _SEEDS

    # --- from all ranks to all ----------------------------------------------------------------------------------------

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return every rank's tensor, in order; all of one shape and type."""
        if self.world == 1:
            return [tensor]
        sent = _bytes(tensor).to(self.place)
        found = [torch.empty_like(sent) for _ in range(self.world)]
        if len(sent):
            dist.all_gather(found, sent)
        return [_of_bytes(each.to(tensor.device), tensor.dtype, tensor.shape) for each in found]

    def mean(self, tensor: Tensor) -> Tensor:
        """Return the mean over ranks, summed in rank order, so that it is bitwise equal on all of them."""
        return tensor if self.world == 1 else torch.stack(self.gather(tensor)).mean(0)

    def any(self, *numbers: float) -> list[int]:
        """Return the maximum over ranks of each whole number; of flags, whether any rank has it set."""
        told = torch.tensor([int(number) for number in numbers])
        found: list[int] = torch.stack(self.gather(told)).amax(0).tolist()
        return found

    def gather_facts(self, facts: Facts) -> list[Facts]:
        """Return every rank's facts, which JSON can hold, in order."""
        if self.world == 1:
            return [facts]
        text = _text(facts)
        longest = self.any(len(text))[0]
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(text)] = text
        return [json.loads(bytes(each.tolist()).rstrip(b"\0")) for each in self.gather(padded)]

    def check_same(self, facts: Mapping[str, object]) -> None:
        """Raise an error on all ranks unless all were given the same; they would wait for each other forever."""
        told = self.gather_facts(facts)
        wrong = [name for name in facts if any(each.get(name) != told[0].get(name) for each in told)]
        if wrong:
            raise PyroDropoutError(
                f"the {self.world} processes were not given the same: {', '.join(wrong)} differ between them. Each must"
                " make the same call, with the same data (seed whatever is random before it)."
            )

    # --- from one rank to all -----------------------------------------------------------------------------------------

    def from_first(self, make: Callable[[], tuple[Mapping[str, Tensor], Facts]]) -> tuple[dict[str, Tensor], Facts]:
        """Let the first rank make tensors and facts, and return them on all; its errors are raised on all."""
        if self.world == 1:
            tensors, facts = make()
            return dict(tensors), facts
        header, tensors = {}, {}
        if self.first:
            try:
                tensors, facts = make()
            except PyroDropoutError as mistake:
                self._send(_text({"mistake": str(mistake)}))
                raise
            kinds = [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()]
            header = {"kinds": kinds, "facts": facts}
        header = json.loads(bytes(self._send(_text(header)).tolist()))
        if "mistake" in header:
            raise PyroDropoutError(header["mistake"])
        found = {}
        for name, kind, shape in header["kinds"]:
            like = torch.empty(shape, dtype=getattr(torch, kind))
            found[name] = self.copied(tensors[name].cpu() if self.first else like)
        return found, header["facts"]

    def copied(self, tensor: Tensor, owner: int = 0) -> Tensor:
        """Return the owner's tensor; the other ranks pass one of the same shape and type."""
        if self.world == 1 or not tensor.numel():
            return tensor
        sent = _bytes(tensor).to(self.place).clone()
        dist.broadcast(sent, owner)
        return _of_bytes(sent.to(tensor.device), tensor.dtype, tensor.shape)

    def copy_from_first(self, tensors: list[Tensor]) -> None:
        """Overwrite tensors with those of the first rank."""
        with torch.no_grad():
            for tensor in tensors if self.world > 1 else []:
                tensor.copy_(self.copied(tensor.detach()))

    def one_seed(self, seed: int | None) -> int:
        """Return a seed that all ranks share: the given one, or one drawn by the first rank."""
        drawn = torch.randint(_SEEDS, ())
        return int(self.copied(drawn)) if seed is None else seed

    def _send(self, text: Tensor) -> Tensor:
        length = int(self.copied(torch.tensor(len(text))))
        return self.copied(text if self.first else torch.zeros(length, dtype=torch.uint8))


ALONE = Group()


def join(device: torch.device | str) -> Group:
    """Return the group that this process belongs to; join it first if needed. An existing process group is reused.

    Args:
        device: where tensors are computed: gloo sends those of a CPU, nccl those of a CUDA device.
    """
    kind = torch.device(device).type
    if kind not in ("cpu", "cuda"):
        raise PyroDropoutError(f"distributed=True is for the CPU and for CUDA devices; the device is {str(device)!r}.")
    if not dist.is_available():
        raise PyroDropoutError("distributed=True needs torch.distributed, but this PyTorch was built without it.")
    if not dist.is_initialized():
        _initialise(torch.device(device))
    backend = dist.get_backend()
    if backend == "nccl" and kind == "cpu":
        raise PyroDropoutError(
            "this process group has only nccl, which cannot send CPU tensors; create it with"
            " init_process_group() without a backend, or train on CUDA devices (device='cuda')."
        )
    place = torch.device(device) if backend == "nccl" else torch.device("cpu")
    return Group(dist.get_rank(), dist.get_world_size(), place)


def _initialise(device: torch.device) -> None:
    missing = [name for name in NEEDED if not os.environ.get(name)]
    if missing:
        raise PyroDropoutError(
            f"distributed=True needs processes that know each other, but the environment lacks {', '.join(missing)}:"
            f" {HOW}."
        )
    rank, world = number("RANK", 0), number("WORLD_SIZE", 1)
    if not 0 <= rank < world:
        raise RangeError(f"RANK must lie between 0 and WORLD_SIZE - 1 = {world - 1}; got {rank}: {HOW}.")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        # With both, short messages go from CPU to CPU, and no GPU waits for them.
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, **_restart_options(rank, world))
    except (RuntimeError, ValueError) as cause:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise PyroDropoutError(
            f"the {world} processes could not connect at {where} (MASTER_ADDR, MASTER_PORT):"
            f" {str(cause).splitlines()[0]} Are all of them started, and can this machine reach that address?"
        ) from cause

    atexit.register(_leave)


def _restart_options(rank: int, world: int) -> Record:
    """Return options for a restart: a store that is separate from what earlier processes have left in it.

    torchrun keeps one store for all restarts, which still holds the addresses of processes that are gone. On one
    machine all processes know how often they restarted; on several they may not, so each restart needs a new store.
    """
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not restarted() or not shared or os.environ.get("GROUP_WORLD_SIZE") != "1":
        return {}
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    store = TCPStore(os.environ["MASTER_ADDR"], number("MASTER_PORT", 0), world, is_master=False)
    own = PrefixStore(f"restart {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    return {"store": own, "rank": rank, "world_size": world}


def _leave() -> None:
    """Leave the group when the process ends, but not after an error: that could wait for the other processes."""
    if dist.is_initialized() and getattr(sys, "last_value", None) is None:
        dist.destroy_process_group()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _of_bytes(sent: Tensor, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    return sent.view(dtype).reshape(shape)


def _text(facts: object) -> Tensor:
    return torch.tensor(list(json.dumps(facts, sort_keys=True).encode()), dtype=torch.uint8)


# --- torchrun ---------------------------------------------------------------------------------------------------------

NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
HOW = "start the script with torchrun, for example: torchrun --nproc-per-node 2 script.py"


def local_device(device: torch.device | str | None, default: torch.device | str) -> torch.device:
    """Return the device of this process: the CUDA device of its local rank, unless one was given by number.

    Args:
        device: the requested device.
        default: where the model and data are now.
    """
    found = torch.device(default if device is None else device)
    if found.type != "cuda" or (device is not None and found.index is not None):
        return found
    local, there = number("LOCAL_RANK", 0), torch.cuda.device_count()
    if local >= there:
        raise PyroDropoutError(
            f"this is process {local} of its machine, counted from 0, but the machine has {there} CUDA devices: start"
            f" at most {there} processes on it (torchrun --nproc-per-node {max(1, there)})."
        )
    return torch.device("cuda", local)


def started_together() -> bool:
    """Whether this process was started as one of several, by torchrun or in the same way."""
    return number("WORLD_SIZE", 1) > 1


def rank_here() -> int:
    """Return the rank of this process; 0 for a single process."""
    return number("RANK", 0) if started_together() else 0


def restarted() -> bool:
    """Whether torchrun has started this process to replace one that failed."""
    return number("TORCHELASTIC_RESTART_COUNT", 0) > 0


def number(name: str, default: int) -> int:
    """Return a whole number from the environment; raise if it is not one."""
    text = os.environ.get(name, "")
    try:
        return int(text) if text else default
    except ValueError:
        raise RangeError(f"{name} in the environment must be a whole number; got {text!r}: {HOW}.") from None
