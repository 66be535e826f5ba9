"""A run that may fail without side effects: random states, buffers and new parameters are restored."""

from collections.abc import Iterator
from contextlib import contextmanager

import pyro
import torch
from pyro.poutine.messenger import Messenger

from pyro_dropout.engines.torch_internals import disable_current_modes
from pyro_dropout.generative.random_state import random_state, set_random_state
from pyro_dropout.generative.trial_run import holders_of
from pyro_dropout.protocols import Message, PyroModel


class Attempt(Messenger):
    """The state before a run of a model and a guide; as a context around the guide, it sees when draws begin.

    A guide that first has to read its model draws random numbers on the way, once. A second run does not, so it starts
    from the random state of the first run's first draw, and gives what one run would have given.
    """

    def __init__(self, model: PyroModel, guide: PyroModel) -> None:
        super().__init__()
        self._random = random_state()
        self._buffers = [
            (module._buffers, key, buffer, buffer.detach().clone())
            for module in holders_of(model, guide)
            for key, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._parameters = set(pyro.get_param_store().keys())
        self._reads_its_model = getattr(guide, "prototype_trace", self) is None

    def _pyro_sample(self, msg: Message) -> None:
        if self._reads_its_model:
            self._random, self._reads_its_model = random_state(), False

    def undo(self) -> None:
        """Restore everything."""
        set_random_state(self._random)
        with torch.no_grad():
            for holder, key, buffer, value in self._buffers:
                holder[key] = buffer
                buffer.copy_(value)
        store = pyro.get_param_store()
        for name in set(store.keys()) - self._parameters:
            del store[name]


@contextmanager
def untraced() -> Iterator[None]:
    """Within this context, operations run without being recorded."""
    with disable_current_modes(), torch.no_grad():
        yield
