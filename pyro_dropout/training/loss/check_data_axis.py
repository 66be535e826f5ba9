"""Runs a Pyro model with another number of data points, to see which inputs of its layers have one row for each.

Networks check this themselves, wherever they are used (``generative/layers.py``).
"""

import weakref

import torch
from pyro import poutine

from pyro_dropout.generative.layers import misplaced, other_count
from pyro_dropout.generative.model_call import ModelCall, is_network
from pyro_dropout.generative.trial_run import aside, can_run, shapes_alone
from pyro_dropout.mathematics.errors import NotFollowedError
from pyro_dropout.mathematics.per_data_point import MisplacedPointsError
from pyro_dropout.protocols import PyroModel
from pyro_dropout.training.compile.functional import unvalidated
from pyro_dropout.training.loss.operations import Args, Kwargs
from pyro_dropout.training.loss.per_example import per_example

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
