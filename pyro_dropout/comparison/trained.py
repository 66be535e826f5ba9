"""Train the seeds of one guide: as one fleet, or one by one if they cannot form a fleet.

Programs that keep parameters in Pyro's param store share them by name: two guides of the same Pyro class, or two
training runs of a function that calls ``pyro.param``. Here each training run has its own param store.
"""

import copy
import math
import warnings
from collections.abc import Callable

import pyro
import torch
from pyro import poutine
from pyro.params.param_store import StateDict
from torch import nn

from pyro_dropout.errors import DivergedError, IgnoredInputsWarning, PyroDropoutError
from pyro_dropout.generative.model_call import ModelCall, is_network
from pyro_dropout.generative.trial_run import quietly
from pyro_dropout.guides.base import SiteGuide
from pyro_dropout.guides.ensemble import Ensemble
from pyro_dropout.protocols import PyroModel, Record
from pyro_dropout.training.fit import fit
from pyro_dropout.training.fleet.fleet import Fleet


def for_seed(model: PyroModel, seed: int) -> PyroModel:
    """Return a copy of a module with its layers reinitialised for a seed; any other model is the same for all."""
    if not isinstance(model, nn.Module):
        return model
    torch.manual_seed(seed)
    own = copy.deepcopy(model)
    for part in own.modules():
        if callable(reset := getattr(part, "reset_parameters", None)):
            reset()
    return own


Build = Callable[[int], tuple[PyroModel, PyroModel]]
Pairs = list[tuple[PyroModel, object]]  # models, each with its guide
Trained = tuple[Pairs, float, int]  # without those that diverged; µs a step of one network; how many diverged


def as_a_fleet(build: Build, seeds: list[int], call: ModelCall, options: Record) -> Trained:
    """Train networks side by side, with the training data as arguments and the options of ``fit``."""
    try:
        with warnings.catch_warnings(), pyro.get_param_store().scope():
            fleet = Fleet(build, {"seed": seeds})
            warnings.filterwarnings("ignore", message=".*were left behind.*")
            warnings.filterwarnings("ignore", category=IgnoredInputsWarning)  # the note of the row says it
            history = fleet.fit(*call.args, progress=False, seed=seeds[0], **options)
    except DivergedError:
        raise
    except PyroDropoutError:  # what cannot form a fleet, such as BatchNorm, is trained one by one
        return one_by_one(build, seeds, call, options)
    good: Pairs = [pair for pair, bad in zip(fleet, history.diverged.tolist(), strict=True) if not bad]
    return good, 1e6 * history.seconds / history.steps / len(seeds), len(seeds) - len(good)


def one_by_one(build: Build, seeds: list[int], call: ModelCall, options: Record) -> Trained:
    """Train any models one after another, each with its own param store; otherwise as ``as_a_fleet``."""
    good: Pairs = []
    spent = []
    for seed in seeds:
        with pyro.get_param_store().scope() as state:
            model, guide = build(seed)
            try:
                history = fit(model, guide, *call.args, progress=False, seed=seed, **options, **call.kwargs)
            except DivergedError:
                continue
            # Parameters of this package's networks and guides have unique names already.
            learned = False
            if not is_network(model):
                with torch.no_grad(), quietly(model), poutine.block():
                    trace = poutine.trace(model, param_only=True).get_trace(*call.args, **call.kwargs)
                learned = bool(trace.param_nodes)
        model = Owned(model, state) if learned else model
        guide = guide if isinstance(guide, SiteGuide | Ensemble) or not state["params"] else Owned(guide, state)
        good.append((model, guide))
        spent.append(1e6 * history.seconds / history.steps)
    return good, sum(spent) / len(spent) if spent else math.nan, len(seeds) - len(good)


class Owned(nn.Module):
    """A model or a guide that runs with the param store of its own training, in its state at the end."""

    def __init__(self, part: PyroModel, state: StateDict) -> None:
        super().__init__()
        if isinstance(part, nn.Module):
            self.part = part
        self._state = state
        self.__wrapped__ = (part,)  # in a tuple, so that it is not registered twice

    def forward(self, *args: object, **kwargs: object) -> object:
        """Run it, with its own parameters."""
        with pyro.get_param_store().scope(self._state):
            return self.__wrapped__[0](*args, **kwargs)

    def extra_repr(self) -> str:
        """Return the wrapped part's repr: a function has no submodule to show."""
        return repr(self.__wrapped__[0])
