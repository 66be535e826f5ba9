"""How many threads a training uses on a CPU: as many as its steps have work for, and never more than torch is set to.

Two threads that share a short operation wait for each other longer than they work. The number depends on the sizes of
the operations alone, so that the same call always uses the same number.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from pyro_dropout.engines.torch_internals import TorchDispatchMode, tree_leaves

_SHARE = 2**25  # multiplications of a forward pass that are worth a thread, about a millisecond
_ELEMENT = 16  # as many as one element of any other operation, which memory and not arithmetic takes time for


class Work(TorchDispatchMode):
    """Counts the work of what runs within it, in multiplications."""

    only_counts = True  # nothing is recorded: what runs here runs as it does elsewhere

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.products, self.elements = 0, 0

    @property
    def total(self) -> int:
        """Products and elements together."""
        return self.products + _ELEMENT * self.elements

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        from torch.utils.flop_counter import flop_registry

        out, named = func(*args, **(kwargs or {})), kwargs or {}
        tensors = [each for each in tree_leaves((args, named, out)) if isinstance(each, Tensor)]
        operations = flop_registry.get(func._overloadpacket)
        if operations is not None:
            self.products += operations(*args, **named, out_val=out) // 2
        elif "rnn_layer" in str(func):  # every weight meets every position of every sequence
            x, *rest = tensors
            self.products += x.numel() // x.shape[-1] * sum(each.numel() for each in rest if each.dim() == 2)
        elif not func.is_view:
            self.elements += max((each.numel() for each in tensors), default=0)
        return out


def threads_for(work: int, most: int) -> int:
    """Return how many threads, ``most`` at most, a step is worth whose forward pass has so many multiplications."""
    return max(1, min(most, work // _SHARE))


@contextlib.contextmanager
def enough_threads(trial: Callable[[], object] | None) -> Iterator[None]:
    """Within this context torch uses as many threads as a step has work for, and afterwards as many as before."""
    most = torch.get_num_threads()
    if trial is None or most == 1:
        yield
        return
    with Work() as work:
        trial()
    try:
        torch.set_num_threads(threads_for(work.total, most))
        yield
    finally:
        torch.set_num_threads(most)
