"""Training the seeds of one guide: as one fleet, or one by one where they cannot be a fleet.

Programs that keep parameters in Pyro's store share them by name: two guides of one class of Pyro's, or two trainings of
a function that says ``pyro.param``. Here each training has a store of its own.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pyro
import torch
from pyro import poutine
from torch import nn

from pyro_dropout.generative.model_call import ModelCall
from pyro_dropout.generative.trial_run import quietly
from pyro_dropout.guides.base import SiteGuide
from pyro_dropout.mathematics.errors import PyroDropoutError
from pyro_dropout.training.fit import fit
from pyro_dropout.training.fleet.fleet import Fleet
from pyro_dropout.training.history import DivergedError

Build = Callable[[int], tuple[Any, Any]]
Trained = tuple[list[tuple[Any, Any]], float, int]


def as_a_fleet(build: Build, seeds: list[int], call: ModelCall, options: Any, progress: bool) -> Trained:
    """Train networks side by side.

    Args:
        build: returns model and guide of a seed.
        seeds: which.
        call: the training data as arguments, of any model.
        options: of ``fit``.
        progress: show how far it is.

    Returns:
        What was trained without diverging, the microseconds of a step of one network, and how many diverged.
    """
    try:
        fleet = Fleet(build, {"seed": seeds})
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*were left behind.*")
            history = fleet.fit(*call.args, progress=progress, seed=seeds[0], **options)
    except DivergedError:
        raise
    except PyroDropoutError:  # what cannot be a fleet, such as BatchNorm, is trained one by one
        return one_by_one(build, seeds, call, options, progress)
    good = [pair for pair, bad in zip(fleet, history.diverged.tolist(), strict=True) if not bad]
    return good, 1e6 * history.seconds / history.steps / len(seeds), len(seeds) - len(good)


def one_by_one(build: Build, seeds: list[int], call: ModelCall, options: Any, progress: bool) -> Trained:
    """Train any models one after another; arguments and results are those of ``as_a_fleet``."""
    good, spent = [], []
    for seed in seeds:
        model, guide = build(seed)
        try:
            history = fit(model, guide, *call.args, progress=progress, seed=seed, **options, **call.kwargs)
        except DivergedError:
            continue
        good.append((model, guide))
        spent.append(1e6 * history.seconds / history.steps)
    return good, sum(spent) / len(spent) if spent else math.nan, len(seeds) - len(good)


def each_in_its_store(build: Build, seeds: list[int], call: ModelCall, options: Any, progress: bool) -> Trained:
    """Train any Pyro models, each with a parameter store of its own; the rest is as in ``as_a_fleet``."""
    good: list[tuple[Any, Any]] = []
    spent: list[float] = []
    for seed in seeds:
        with pyro.get_param_store().scope() as state:
            pairs, each, _ = one_by_one(build, [seed], call, options, progress)
            said = [_says_parameters(replace(call, model=model)) for model, _ in pairs]
        good += [
            (Owned(model, state) if own else model, owned(guide, state))
            for (model, guide), own in zip(pairs, said, strict=True)
        ]
        spent += [each] * len(pairs)
    return good, sum(spent) / len(spent) if spent else math.nan, len(seeds) - len(good)


class Owned(nn.Module):
    """A model or a guide that is run with the parameters of its own training in Pyro's store.

    Args:
        part: the model or the guide.
        state: the store's state at the end of its training.
    """

    def __init__(self, part: Any, state: Any) -> None:
        super().__init__()
        if isinstance(part, nn.Module):
            self.part = part
        self._state = state
        self.__wrapped__ = (part,)  # in a tuple, so that it is no module of this one twice

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run it, with its own parameters."""
        with pyro.get_param_store().scope(self._state):
            return self.__wrapped__[0](*args, **kwargs)

    def extra_repr(self) -> str:
        """Return what it is, for a function has no module to show."""
        return repr(self.__wrapped__[0])


def owned(guide: Any, state: Any) -> Any:
    """Return a guide with its own parameters; those of this package have names of their own already."""
    ours = isinstance(guide, SiteGuide)
    return guide if ours or not state["params"] else Owned(guide, state)


def _says_parameters(call: ModelCall) -> bool:
    """Whether a model has parameters in Pyro's store."""
    with torch.no_grad(), quietly(call.model), poutine.block():
        trace = poutine.trace(call.model, param_only=True).get_trace(*call.args, **call.kwargs)
    return bool(trace.param_nodes)
