"""Checks of the arguments of training, before anything is moved, drawn or changed."""

import inspect
from collections.abc import Callable
from numbers import Real
from typing import Any

import torch
from pyro import poutine
from torch import Tensor, nn

from pyro_dropout.generative.likelihoods import Likelihood
from pyro_dropout.generative.model_call import ModelCall, is_network, name_of, takes
from pyro_dropout.generative.trial_run import quietly
from pyro_dropout.mathematics.checks import (
    check_count,
    check_dense,
    check_device,
    check_finite,
    check_number,
    check_pairs,
    check_seed,
    describe,
)
from pyro_dropout.mathematics.errors import PyroDropoutError, RangeError, ShapeError
from pyro_dropout.training.compile.functional import check_loss

_LARGEST_SEED = 2**32 - 1  # numpy's, which Pyro seeds as well


def check_length(x: Any, y: Any, steps: Any, epochs: Any, batch_size: Any) -> None:
    """Raise an error unless there is data, and either steps or epochs."""
    check_duration(steps, epochs, batch_size)
    check_pairs("x and y", x, y)


def check_duration(steps: Any, epochs: Any, batch_size: Any) -> None:
    """Raise an error unless exactly one of steps and epochs is given."""
    if (steps is None) == (epochs is None):
        raise RangeError("give either steps or epochs, not both and not neither.")
    check_count("steps" if steps is not None else "epochs", steps if steps is not None else epochs)
    if batch_size is not None:
        check_count("batch_size", batch_size)


def check_call(call: ModelCall, batch_size: int | None) -> None:
    """Raise an error unless a model takes its arguments, and mini-batches if they are requested."""
    call.check_bound()
    for leaf in call.leaves():
        check_dense("data", leaf)
    count = call.count
    if batch_size is not None and count is not None and batch_size < count and not takes(call.model, "num_data"):
        raise PyroDropoutError(
            f"batch_size must be at least {count}, the number of points, or left out; got {batch_size}:"
            f" {name_of(call.model)} takes no num_data, so a mini-batch would not be scaled up; give the model a"
            " num_data argument, or a subsampled pyro.plate and no batch_size."
        )


def check_how(
    clip_norm: Any, seed: Any, device: Any, *, lr: Any = None, schedule: Any = None, loss: Any = None
) -> None:
    """Raise an error unless these are valid; those that are None are not checked.

    Args:
        clip_norm: the largest norm of the gradient.
        seed: for weight draws and mini-batches.
        device: where to train.
        lr: a learning rate that must be one number.
        schedule: multiplies the learning rate; called once, at step 0.
        loss: what is minimised.
    """
    if isinstance(lr, Tensor) and lr.dim():
        raise ShapeError(f"lr must be one number; got shape {tuple(lr.shape)}.")
    if callable(schedule):
        _check_schedule(schedule)
    if loss is not None:
        check_loss(loss)
    if clip_norm is not None:
        check_number("clip_norm", clip_norm)
        if isinstance(clip_norm, Tensor) and clip_norm.numel() != 1:
            raise ShapeError(f"clip_norm must be one number; got shape {tuple(clip_norm.shape)}.")
        if not 0 < clip_norm < float("inf"):
            raise RangeError(f"clip_norm must be positive, or None for no limit; got {clip_norm!r}.")
    check_seed(seed, 0, _LARGEST_SEED)
    if device is not None:
        check_device("device", device)


def check_watch(validation: Any, patience: Any, check_every: Any) -> None:
    """Raise an error unless ``validation`` is a pair of data, and patience and check_every are valid."""
    if validation is None:
        return
    if not isinstance(validation, tuple | list) or len(validation) != 2:
        raise ShapeError(f"validation must be a pair (x, y); got {type(validation).__name__}.")
    check_pairs("validation", *validation)
    check_rhythm(patience, check_every)


def check_held_back(model: Any, validation: Any, patience: Any, check_every: Any) -> ModelCall:
    """Return the call of any Pyro model with held-out data; raise an error unless it is possible."""
    if not isinstance(validation, tuple | list | dict):
        raise ShapeError(
            "validation must be a tuple of the model's arguments, or a dict of its keyword arguments; got"
            f" {type(validation).__name__}."
        )
    named = isinstance(validation, dict)
    call = ModelCall(model, () if named else tuple(validation), dict(validation) if named else {})
    call = call.with_num_data(only_if_needed=True)
    call.check_bound()
    check_rhythm(patience, check_every)
    return call


def check_rhythm(patience: Any, check_every: Any) -> None:
    """Raise an error unless patience and check_every are valid."""
    check_count("patience", patience)
    if check_every is not None:
        check_count("check_every", check_every)


def check_shared(call: ModelCall) -> None:
    """Raise an error unless several processes can share the data of a call: x, y, and their number."""
    pair = len(call.args) == 3 and all(isinstance(arg, Tensor) for arg in call.args[:2]) and not call.kwargs
    if not pair or not takes(call.model, "num_data"):
        raise PyroDropoutError(
            f"distributed=True is for models that are called as model(x, y, num_data); {name_of(call.model)} is called"
            f" with {len(call.args)} arguments and {len(call.kwargs)} keyword arguments. Train it in one process."
        )


def check_targets(model: Any, x: Tensor, y: Tensor, watched: bool = False) -> None:
    """Raise an error unless a model takes targets, and these fit its outputs; a compiled step cannot check them.

    Training targets that only need to be finite are not checked here: the first step stops at those that are not, and
    names the site.

    Args:
        model: a model; if its likelihood is unknown here, only its signature is checked.
        x: inputs.
        y: targets.
        watched: whether these are the validation set, which no step sees.
    """
    _check_called(model)
    if not is_network(model):
        return
    likelihood: Likelihood = model.likelihood
    finite_will_do = type(likelihood).check_values is Likelihood.check_values
    if finite_will_do and not watched:
        return
    try:
        if watched and x.is_floating_point():
            check_finite("x", x)
        f = _outputs(model, x[:2])
        if f is not None:
            likelihood.check_values(f, likelihood.checked(f[:1].expand(len(y), -1), y))
    except PyroDropoutError as cause:
        if not watched:
            raise
        raise type(cause)(f"validation: {cause}") from None


def _outputs(model: Any, x: Tensor) -> Tensor | None:
    """Return a model's outputs with weights from the prior, for their shape; None if it does not return them."""
    place = next((p.device for p in model.parameters()), x.device)
    with torch.no_grad(), quietly(model), poutine.block():
        try:
            f = model(x.to(place))
        except TypeError:  # one that needs targets too: its first step checks them
            return None
    return f if isinstance(f, Tensor) and f.dim() == 2 else None


def _check_called(model: Any) -> None:
    """Raise unless a model can be called as in training."""
    try:
        known = inspect.signature(model.forward if isinstance(model, nn.Module) else model)
    except (TypeError, ValueError):  # written in C, or otherwise without a signature
        return
    try:
        known.bind("x", "y", "num_data")
    except TypeError:
        name = getattr(model, "__name__", type(model).__name__)
        remedy = " Write BayesianNet(net, likelihood=...)." if isinstance(model, nn.Module) else ""
        raise PyroDropoutError(
            f"model must be a Pyro program that takes (x, y, num_data); got {name}, which takes {known}.{remedy}"
        ) from None


def _check_schedule(schedule: Callable[[Tensor], Any]) -> None:
    found = schedule(torch.zeros(()))
    one = found.numel() == 1 and not found.is_complex() if isinstance(found, Tensor) else isinstance(found, Real)
    if not one:
        raise PyroDropoutError(
            f"schedule must return one number to multiply lr with, as inverse_decay() does; got {describe(found)}."
        )


def check_owned(optim: Any, model: Any, guide: Any) -> None:
    """Raise an error if an optimiser cannot take steps, or holds none of the trained parameters."""
    if isinstance(optim, torch.optim.LBFGS):
        raise PyroDropoutError(
            "optim must be an optimiser that takes one gradient per step; got LBFGS, which evaluates the loss"
            " repeatedly, while weight draws change it each time. Use 'adam'."
        )
    if not isinstance(optim, torch.optim.Optimizer) or not isinstance(guide, nn.Module):
        return
    own = {id(p) for part in (model, guide) if isinstance(part, nn.Module) for p in part.parameters()}
    held = {id(p) for group in optim.param_groups for p in group["params"]}
    if own and not own & held:
        raise PyroDropoutError(
            f"optim must be an optimiser of the guide's parameters; this {type(optim).__name__} holds none of"
            " them. Make it with guide.parameters()."
        )
