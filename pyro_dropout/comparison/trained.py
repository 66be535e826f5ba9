"""Train the seeds of one guide: as one fleet, or one by one if they cannot form a fleet; with one progress bar for all.

Models are copies of a network, a Pyro model, or the results of a function of the seed. Programs that keep parameters in
Pyro's param store share them by name: two guides of the same Pyro class, or two training runs of a function that calls
``pyro.param``. Here each training run has its own param store.
"""

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import pyro
import torch
from pyro import poutine
from pyro.params.param_store import StateDict
from torch import nn
from tqdm.auto import tqdm

from pyro_dropout.errors import DivergedError, IgnoredInputsWarning, PyroDropoutError
from pyro_dropout.generative.model_call import ModelCall, is_network, name_of, signature_of
from pyro_dropout.generative.trial_run import quietly
from pyro_dropout.guides.base import SiteGuide
from pyro_dropout.guides.ensemble import Ensemble
from pyro_dropout.mathematics.checks import describe
from pyro_dropout.protocols import PyroModel, Record
from pyro_dropout.training.fit import fit
from pyro_dropout.training.fleet.fleet import Fleet
from pyro_dropout.training.loop import sharing_bar


def source_of(model: object, seed: int, train: object) -> tuple[Callable[[int], PyroModel], PyroModel]:
    """Return a function of the seed that returns models, and the model of the first seed.

    A function that returns a callable when called with a seed is taken to return models. Every other function that can
    be called with the training data, a tuple or a dict of arguments, is itself a Pyro model, the same for all seeds.

    Example:
        >>> source_of(lambda x, y: None, 0, (1.0, 2.0))[0](7)(1.0, 2.0) is None
        True
        >>> source_of(lambda seed: (lambda x, y: seed), 0, (1.0, 2.0))[0](7)(1.0, 2.0)
        7
    """
    if not callable(model):
        raise PyroDropoutError(
            f"model must be a model to copy, or a function of the seed that returns one; got {describe(model)}."
        )
    if isinstance(model, nn.Module):
        return lambda number: _copied(model, number), _copied(model, seed)

    def made(number: int) -> PyroModel:
        torch.manual_seed(number)
        found: PyroModel = model(number)
        return found

    try:
        with warnings.catch_warnings(), pyro.get_param_store().scope(), poutine.block():
            warnings.simplefilter("ignore")
            first: object = made(seed)
        failure = f"it returns {type(first).__name__}, which is not a model"
    except Exception as cause:  # a model that was called with a number instead of its data
        first, failure = None, f"it raises {type(cause).__name__}: {cause}"
    if callable(first):
        return made, first
    if not _takes(model, train):
        raise PyroDropoutError(
            "model must be a Pyro model that takes the arguments in train, or a function of the seed that returns one;"
            f" {name_of(model)} takes {signature_of(model)}; called with a seed, {failure}."
        )
    return lambda number: model, model


def _takes(model: PyroModel, train: object) -> bool:
    """Return whether a model's signature accepts these arguments; ``num_data`` may be missing."""
    known = signature_of(model)
    if known is None or not isinstance(train, tuple | list | Mapping):
        return True  # data of another kind are refused elsewhere
    args, kwargs = ((), dict(train)) if isinstance(train, Mapping) else (tuple(train), {})
    for more in ({}, {"num_data": 1}):
        try:
            known.bind(*args, **kwargs, **more)
            return True
        except TypeError:
            continue
    return False


def _copied(model: nn.Module, seed: int) -> nn.Module:
    """Return a copy of the model for a seed, with its layers reinitialised."""
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
            learned = not is_network(model) and _has_parameters(replace(call, model=model))
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


def _has_parameters(call: ModelCall) -> bool:
    """Return whether a model has parameters in Pyro's param store."""
    with torch.no_grad(), quietly(call.model), poutine.block():
        trace = poutine.trace(call.model, param_only=True).get_trace(*call.args, **call.kwargs)
    return bool(trace.param_nodes)


class WholeBar(tqdm):  # type: ignore[misc]
    """One progress bar for several trainings: each guide is as long as any other, however many ``steps`` it has.

    Example:
        >>> whole = WholeBar(guides=2, steps=100, shown=True)
        >>> with whole.part("dropout"):
        ...     whole.update(500)
        >>> whole.n
        100
        >>> whole.close()
    """

    def __init__(self, guides: int, steps: int, shown: bool) -> None:
        form = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"
        how: Record = {"desc": "compare", "leave": False, "smoothing": 0.0, "bar_format": form}
        super().__init__(total=guides * steps, disable=not shown, **how)
        self._each, self._end = steps, 0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Within this context trainings advance the bar by one guide, and show no bar of their own."""
        self._end += self._each
        self.set_description(name)
        with sharing_bar(self):
            yield
        self.update(self._each)

    def update(self, n: float = 1) -> None:
        """Advance by some steps, at most to the end of the guide; its scores are computed after that."""
        super().update(min(n, self._end - self.n))
