"""A network whose class has a ``forward`` of its own: at given weights it computes what that returns.

Predictions, curvatures and ensembles ask ``evaluate`` for the outputs at given weights. A class that changes
``forward`` alone, to scale its inputs for instance, would otherwise be trained as one function and asked as another.
"""

import functools
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor, nn

from pyro_dropout.errors import PyroDropoutError, ShapeError
from pyro_dropout.generative.layers import sample_dimensions
from pyro_dropout.mathematics.shapes import broadcast_shape
from pyro_dropout.protocols import Weights

_INSIDE: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()  # networks whose forward runs now


def running(net: nn.Module) -> AbstractContextManager[None]:
    """Within this context ``forward`` of a network runs, and so have the hooks that were put on it."""
    return _noted(net) if net._forward_hooks or net._forward_pre_hooks else nullcontext()


@contextmanager
def _noted(net: nn.Module) -> Iterator[None]:
    outer = net in _INSIDE
    _INSIDE.add(net)
    try:
        yield
    finally:
        if not outer:
            _INSIDE.discard(net)


def check_no_hooks(net: nn.Module) -> None:
    """Raise if hooks on the model itself would be left out: they run with its ``forward``, and with nothing else."""
    if (net._forward_hooks or net._forward_pre_hooks) and net not in _INSIDE:
        raise PyroDropoutError(
            f"{type(net).__name__} has forward hooks, which do not run at given weights, as in shared draws: answers"
            " would be of another network. Put them on the network inside, model.net.register_forward_hook(...)."
        )


class NothingFromThePrior(Messenger):
    """Skips the draw of ``y``, which is not needed here, and raises if a weight would come from the prior."""

    def _pyro_sample(self, msg: Any) -> None:
        if msg["is_observed"] or msg["done"] or site_is_subsample(msg):
            return
        if msg["name"] == "y":
            msg["value"], msg["done"] = torch.zeros(msg["fn"].shape()), True
        # Sites in the plate "data" are drawn by the model at new points.
        elif not any(frame.name == "data" for frame in msg["cond_indep_stack"]):
            raise PyroDropoutError(
                f"the posterior has no site {msg['name']!r}, which the model samples: is it for this model?"
            )


def follow_forward(kind: Any) -> None:
    """Let ``evaluate`` of a class run its ``forward``, with each draw by itself; asked from there, it is inherited.

    A class whose ``evaluate`` is defined where its ``forward`` is, or below, stays as it is.
    """
    if "evaluate" in vars(next(each for each in kind.__mro__ if {"forward", "evaluate"} & vars(each).keys())):
        return
    forward, inherited = kind.forward, kind.evaluate

    @functools.wraps(forward)
    def noted(self: Any, *args: object, **kwargs: object) -> object:
        with _noted(self):
            return forward(self, *args, **kwargs)

    @functools.wraps(inherited)
    def evaluate(self: Any, weights: Weights, x: Any) -> Tensor:
        if self in _INSIDE:
            return cast(Tensor, inherited(self, weights, x))
        self._check_sites(weights)
        own = {name: self._parameter(name) for name in self.sites}
        leads = {name: value.shape[: value.dim() - own[name].dim()] for name, value in weights.items()}
        batch = broadcast_shape(*(sample_dimensions(lead) for lead in leads.values()))
        if not batch:
            plain = {name: value.reshape(own[name].shape) for name, value in weights.items()}
            return _returned(self, own | plain, x)
        flat = {}
        for name, value in weights.items():
            drawn = value.reshape(sample_dimensions(leads[name]) + own[name].shape)
            flat[name] = drawn.expand(batch + own[name].shape).flatten(0, len(batch) - 1)
        draws = ({name: value[k] for name, value in flat.items()} for k in range(batch.numel()))
        each = torch.stack([_returned(self, own | draw, x) for draw in draws])
        return each.reshape(*batch, *each.shape[1:])

    kind.forward, kind.evaluate = noted, evaluate


def _returned(net: Any, weights: Weights, x: Any) -> Tensor:
    """Return what a network returns at x, (N, D), with these weights."""
    with poutine.block(expose_types=["param"]), NothingFromThePrior(), poutine.condition(data=weights):
        f = net(x)
    if not isinstance(f, Tensor) or f.dim() != 2:
        got = tuple(f.shape) if isinstance(f, Tensor) else type(f).__name__
        raise ShapeError(
            f"forward of {type(net).__name__} must return the outputs f, (N, D); it gave {got}. Or define in it"
            " evaluate(self, weights, x), which returns them."
        )
    return f
