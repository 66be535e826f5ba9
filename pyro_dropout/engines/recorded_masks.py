"""Random masks in a recorded step, drawn where the compiler cannot move them."""

from typing import Any

import torch

from pyro_dropout.engines.torch_internals import TorchDispatchMode


class RecordedMasks(TorchDispatchMode):
    """Where operations are recorded, draws masks into new tensors, with the same random numbers.

    torch's dropout fills an empty tensor in place. On a CPU, inductor may move what reads it before what fills it.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether torch is to keep its compiler away from this mode, for which it would load it: two seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        if func is not torch.ops.aten.bernoulli_.float or args[0].is_cuda or kwargs:
            return func(*args, **(kwargs or {}))
        mask, keep = args[0], args[1] if len(args) > 1 else 0.5
        return mask.copy_(torch.ops.aten.native_dropout(torch.ones_like(mask), 1 - keep, True)[1])
