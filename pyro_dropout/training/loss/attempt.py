"""Runs of a model that leave no trace: one that may fail, and one with another number of data points.

The second shows which inputs of a Pyro model's layers have one row for each point. Networks check this themselves,
wherever they are used (``generative/draws.py``).
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pyro
import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger

from pyro_dropout.engines.torch_internals import disable_current_modes
from pyro_dropout.errors import NotFollowedError
from pyro_dropout.generative.layers import misplaced, other_count
from pyro_dropout.generative.model_call import ModelCall, is_network
from pyro_dropout.generative.random_state import random_state, set_random_state
from pyro_dropout.generative.trial_run import aside, can_run, holders_of, shapes_alone
from pyro_dropout.mathematics.per_data_point import MisplacedPointsError
from pyro_dropout.protocols import Message, PyroModel
from pyro_dropout.training.compile.functional import unvalidated
from pyro_dropout.training.loss.operations import Args, Kwargs
from pyro_dropout.training.loss.per_example import per_example


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


# The shapes of arguments that a model has been checked with.
_CHECKED: "weakref.WeakKeyDictionary[PyroModel, set[object]]" = weakref.WeakKeyDictionary()


def check_data_axis(model: PyroModel, guide: PyroModel, args: Args, kwargs: Kwargs) -> None:
    """Raise if draws for each data point do not follow the data when there are more or fewer of them.

    Only a model that has its data among its arguments can be run with other data.
    """
    call = ModelCall(model, args, dict(kwargs))
    leaves, count = list(call.leaves()), call.count
    if count is None or is_network(model) or not can_run(leaves[0]):
        return
    known, key = _CHECKED.setdefault(model, set()), tuple(leaf.shape for leaf in leaves)
    if key in known:
        return
    rows = torch.arange(other_count(count)) % count
    other = call.mapped(lambda leaf: leaf[rows.to(leaf.device)] if leaf.dim() and len(leaf) == count else leaf)
    on_gpu = any(leaf.is_cuda for leaf in leaves)
    with aside(model, guide), poutine.block(), per_example(), unvalidated(), shapes_alone(on_gpu):
        try:
            trace = other.of(poutine.trace(guide).get_trace)
            other.of(poutine.trace(poutine.replay(model, trace=trace)).get_trace)
        except MisplacedPointsError as cause:
            raise misplaced(cause) from None
        except NotFollowedError:
            raise
        except Exception:
            pass  # some of its data are elsewhere, or it reads values, which shapes do not have
    known.add(key)
