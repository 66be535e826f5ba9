"""The models of a comparison: copies of a network, a Pyro model, or the results of a function of the seed."""

import copy
import warnings
from collections.abc import Callable, Mapping
from inspect import Parameter

import pyro
import torch
from pyro import poutine
from torch import nn

from pyro_dropout.generative.model_call import name_of, signature_of
from pyro_dropout.mathematics.checks import describe
from pyro_dropout.mathematics.errors import PyroDropoutError
from pyro_dropout.protocols import PyroModel


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
            first: PyroModel | None = made(seed)
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
    try:
        bound = known.bind_partial(**train) if isinstance(train, Mapping) else known.bind_partial(*train)
    except TypeError:
        return False
    missing = [name for name, each in known.parameters.items() if name not in bound.arguments and _needed(each)]
    return set(missing) <= {"num_data"}


def _needed(parameter: Parameter) -> bool:
    starred = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and not starred


def _copied(model: nn.Module, seed: int) -> nn.Module:
    """Return a copy of the model for a seed, with its layers reinitialised."""
    torch.manual_seed(seed)
    own = copy.deepcopy(model)
    for part in own.modules():
        reset = getattr(part, "reset_parameters", None)
        if callable(reset):
            reset()
    return own
