"""What a training is asked to do, looked at before anything is moved, drawn or changed."""

from typing import Any

import torch
from pyro import poutine
from torch import Tensor, nn

from pyro_dropout.generative.likelihoods import Categorical, Likelihood
from pyro_dropout.inference.functional import quietly
from pyro_dropout.mathematics.errors import (
    PyroDropoutError,
    RangeError,
    ShapeError,
    check_count,
    check_device,
    check_number,
    check_pairs,
    check_seed,
)

_LARGEST_SEED = 2**32 - 1  # numpy's, which Pyro seeds as well


def check_length(x: Any, y: Any, steps: Any, epochs: Any, batch_size: Any) -> None:
    """Raise an error unless there is data, and one way to say for how long to train on it."""
    if (steps is None) == (epochs is None):
        raise RangeError("give either steps or epochs, not both and not neither.")
    check_count("steps" if steps is not None else "epochs", steps if steps is not None else epochs)
    if batch_size is not None:
        check_count("batch_size", batch_size)
    check_pairs("x and y", x, y)


def check_how(clip_norm: Any, seed: Any, device: Any) -> None:
    """Raise an error unless these can be used."""
    if clip_norm is not None:
        check_number("clip_norm", clip_norm)
        if not 0 < clip_norm < float("inf"):
            raise RangeError(f"clip_norm must be positive, or None for no limit; got {clip_norm!r}.")
    check_seed(seed, 0, _LARGEST_SEED)
    if device is not None:
        check_device("device", device)


def check_watch(validation: Any, patience: Any, check_every: Any) -> None:
    """Raise an error unless ``validation`` is a pair of data, to be looked at now and then."""
    if validation is None:
        return
    if not isinstance(validation, tuple | list) or len(validation) != 2:
        raise ShapeError(f"validation must be a pair (x, y); got {type(validation).__name__}.")
    check_pairs("validation", *validation)
    check_count("patience", patience)
    if check_every is not None:
        check_count("check_every", check_every)


def check_targets(model: Any, x: Tensor, y: Tensor, watched: bool = False) -> None:
    """Raise an error if targets do not go with the outputs of a network; a compiled step cannot look at them.

    Args:
        model: a model; one whose likelihood is not known here is not looked at.
        x: inputs.
        y: targets.
        watched: whether these are the validation set, which no step meets.
    """
    likelihood = getattr(model, "likelihood", None)
    if not isinstance(likelihood, Likelihood) or not (watched or isinstance(likelihood, Categorical)):
        return
    place = next((p.device for p in model.parameters()), x.device)
    with torch.no_grad(), quietly(model), poutine.block():
        f = model(x[:2].to(place))  # with weights of the prior: only its shape counts
    if not isinstance(f, Tensor):
        return
    try:
        likelihood.checked(f, y[: len(f)].to(place))
        if isinstance(likelihood, Categorical):
            likelihood.check_values(f, y)
    except PyroDropoutError as cause:
        if not watched:
            raise
        raise type(cause)(f"validation: {cause}") from None


def check_owned(optim: Any, model: Any, guide: Any) -> None:
    """Raise an error if an optimiser holds none of the parameters that are to be trained."""
    if not isinstance(optim, torch.optim.Optimizer) or not isinstance(guide, nn.Module):
        return
    own = {id(p) for part in (model, guide) if isinstance(part, nn.Module) for p in part.parameters()}
    held = {id(p) for group in optim.param_groups for p in group["params"]}
    if own and not own & held:
        raise PyroDropoutError(
            f"optim must be an optimiser of the guide's parameters; this {type(optim).__name__} holds none of"
            " them. Make it with guide.parameters()."
        )
