"""Where the models of a comparison come from: a network that is copied, a Pyro model, or a function that makes one."""

import copy
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pyro
import torch
from pyro import poutine
from torch import nn

from pyro_dropout.generative.model_call import name_of, signature_of
from pyro_dropout.mathematics.errors import PyroDropoutError, describe


def source_of(model: Any, seed: int, train: Any) -> tuple[Callable[[int], Any], Any]:
    """Return a function of the seed that makes models, and the model that it makes of the first seed.

    A function that returns something callable when it is called with a seed makes models. Any other that can be called
    with the training data is a Pyro model itself, the same for all seeds.

    Args:
        model: what ``compare`` was given.
        seed: the first seed.
        train: the model's arguments, a tuple or a dict.

    Example:
        >>> source_of(lambda x, y: None, 0, (1.0, 2.0))[0](7)(1.0, 2.0) is None
        True
        >>> source_of(lambda seed: (lambda x, y: seed), 0, (1.0, 2.0))[0](7)(1.0, 2.0)
        7
    """
    if not callable(model):
        raise PyroDropoutError(
            f"model must be a model to copy, or a function of the seed that makes one; got {describe(model)}."
        )
    if isinstance(model, nn.Module):
        return lambda number: _copied(model, number), _copied(model, seed)

    def made(number: int) -> Any:
        torch.manual_seed(number)
        return model(number)

    try:
        with warnings.catch_warnings(), pyro.get_param_store().scope(), poutine.block():
            warnings.simplefilter("ignore")
            first: Any = made(seed)
        failure = f"it returns {type(first).__name__}, which is not a model"
    except Exception as cause:  # of a model that was called with a number in the place of its data
        first, failure = None, f"it raises {type(cause).__name__}: {cause}"
    if callable(first):
        return made, first
    if not _takes(model, train):
        raise PyroDropoutError(
            "model must be a Pyro model that takes the arguments in train, or a function of the seed that makes one;"
            f" {name_of(model)} takes {signature_of(model)}, and called with a seed {failure}."
        )
    return lambda number: model, model


def _takes(model: Any, train: Any) -> bool:
    """Whether a model can be called with these arguments, as far as its signature tells; ``num_data`` is not missed."""
    known = signature_of(model)
    if known is None:
        return True
    if not isinstance(train, tuple | list | Mapping):
        return True  # which is a mistake of another kind, and told elsewhere
    try:
        bound = known.bind_partial(**train) if isinstance(train, Mapping) else known.bind_partial(*train)
    except TypeError:
        return False
    missing = [name for name, each in known.parameters.items() if name not in bound.arguments and _needed(each)]
    return set(missing) <= {"num_data"}


def _needed(parameter: Any) -> bool:
    return parameter.default is parameter.empty and parameter.kind not in (
        parameter.VAR_POSITIONAL,
        parameter.VAR_KEYWORD,
    )


def _copied(model: nn.Module, seed: int) -> Any:
    """Return a model of its own for a seed, its layers initialised anew."""
    torch.manual_seed(seed)
    own = copy.deepcopy(model)
    for part in own.modules():
        reset = getattr(part, "reset_parameters", None)
        if callable(reset):
            reset()
    return own
