"""Checks of the arguments of training, before anything is moved, drawn or changed."""

import inspect
from collections.abc import Callable, Collection
from numbers import Real

import torch
from pyro import poutine
from pyro.optim.optim import PyroOptim
from torch import Tensor, nn
from torch.utils.data import DataLoader

from pyro_dropout.errors import PyroDropoutError, RangeError, ShapeError, warn_caller
from pyro_dropout.generative.inputs import AnyInputs, check_inputs, check_pairs, inputs_of, takes_all
from pyro_dropout.generative.likelihoods import Gaussian, Likelihood, likelihood_of
from pyro_dropout.generative.misfits import check_call_finite, warn_of_probabilities
from pyro_dropout.generative.model_call import ModelCall, is_network, name_of, takes
from pyro_dropout.generative.observed_sites import check_samples
from pyro_dropout.generative.trial_run import quietly
from pyro_dropout.mathematics.checks import (
    check_count,
    check_data_finite,
    check_dense,
    check_device,
    check_held,
    check_positive,
    describe,
)
from pyro_dropout.training.loader import Target, all_of
from pyro_dropout.training.optimisers import Update

LARGEST_SEED = 2**32 - 1  # numpy's, which Pyro seeds as well
PATIENCE = 10  # checks without improvement, by default


def check_gradients(model: object = None, guide: object = None, doing: str = "training") -> None:
    """Raise an error where gradients cannot be taken: in inference mode, or of tensors that were made in it."""
    if torch.is_inference_mode_enabled():
        raise PyroDropoutError(f"{doing} needs gradients, which torch.inference_mode() switches off; do it outside.")
    for label, part in (("model", model), ("guide", guide)):
        for name, value in part.named_parameters() if isinstance(part, nn.Module) else ():
            check_held(f"{name!r} of the {label}", value)
        named = (*part.named_parameters(), *part.named_buffers()) if isinstance(part, nn.Module) else ()
        made = next((name for name, value in named if value.is_inference()), None)
        if made is not None:
            raise PyroDropoutError(
                f"{made!r} of the {label} was made in torch.inference_mode(), so it cannot be trained. Make the {label}"
                " outside it."
            )


def check_trained(names: Collection[str], guide: object) -> None:
    """Raise an error if no parameter would be trained."""
    if not names:
        raise PyroDropoutError(
            f"there is nothing to train: {name_of(guide)} and the model have no parameters, or all are frozen. Thaw"
            " them, as in guide.requires_grad_(True)."
        )


def check_duration(steps: object, epochs: object, batch_size: object) -> None:
    """Raise an error unless exactly one of steps and epochs is given."""
    if (steps is None) == (epochs is None):
        raise RangeError("give either steps or epochs, not both and not neither.")
    for name, value in (("steps", steps), ("epochs", epochs), ("batch_size", batch_size)):
        if value is not None:
            check_count(name, value)


def check_how(
    clip_norm: object,
    device: object,
    *,
    lr: object = None,
    schedule: object = None,
    loss: object = None,
    optim: object = None,
) -> None:
    """Raise an error unless these are valid; None is not checked. Warn of a weight decay in ``optim``."""
    warn_of_decay(optim, loss)
    if isinstance(optim, torch.optim.Optimizer) and _asks_for_loss(optim):
        raise PyroDropoutError(
            f"optim must be an optimiser that takes one gradient per step; got {type(optim).__name__}, which evaluates"
            " the loss repeatedly, while weight draws change it each time. Use 'adam'."
        )
    for name, value in (("lr", lr), ("clip_norm", clip_norm)):
        if isinstance(value, Tensor) and (value.numel() != 1 or (name == "lr" and value.dim())):
            raise ShapeError(f"{name} must be one number; got shape {tuple(value.shape)}.")
    if clip_norm is not None:
        check_positive("clip_norm", clip_norm)
    if callable(schedule):
        found = schedule(torch.zeros(()))
        if isinstance(found, Tensor) and found.numel() == 1 and not found.is_complex():
            found = found.item()
        if not isinstance(found, Real):
            raise PyroDropoutError(
                f"schedule must return one number to multiply lr with, as inverse_decay() does; got {describe(found)}."
            )
    if loss is not None and (isinstance(loss, type) or not hasattr(loss, "differentiable_loss")):
        raise PyroDropoutError(f"loss must be pyro_dropout.ELBO() or a loss of Pyro's; got {describe(loss)}.")
    if device is not None:
        check_device("device", device)


def _asks_for_loss(optim: torch.optim.Optimizer) -> bool:
    """Whether an optimiser must be given a closure, as LBFGS must."""
    closure = inspect.signature(optim.step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


def warn_of_decay(optim: object, loss: object = None) -> None:
    """Warn if an optimiser shrinks the weights beside the KL, which is their decay already.

    ``ELBO(temperature=0)`` has no KL: there the decay of the optimiser is the only one.
    """
    made = optim.optim_objs.values() if isinstance(optim, PyroOptim) else [optim]
    torchs = [getattr(each, "optimizer", each) for each in made]  # one with a schedule is inside it
    groups = [group for each in torchs if isinstance(each, torch.optim.Optimizer) for group in each.param_groups]
    groups += [dict(optim.options)] if isinstance(optim, Update) else []
    decay = max((float(group.get("weight_decay") or 0.0) for group in groups), default=0.0)
    if decay and getattr(loss, "temperature", 1.0) != 0:
        warn_caller(
            f"the optimiser's weight_decay={decay:g} changes the objective: it is no longer the ELBO, whose KL shrinks"
            " the weights already. Set weight_decay=0 and choose the prior; or, for dropout with scale=0, leave the KL"
            " out with loss=ELBO(temperature=0), so that this decay is the only one.",
        )


# --- data -------------------------------------------------------------------------------------------------------------


def check_data(call: ModelCall, batch_size: int | None) -> ModelCall:
    """Return the call of a training run, with ``num_data``; raise an error unless the model can be trained with it."""
    if is_network(call.model):
        call = call.as_pair()
        x, y = call.args
        check_pairs("x and y", x, y)
        check_inputs(x, whole=takes_all(call.model))
        check_targets(call.model, x, y)
        if takes_all(call.model) and batch_size is not None and batch_size < len(x):
            raise PyroDropoutError(
                f"batch_size must be left out: {name_of(call.model)} takes all its points at once (whole_batch=True);"
                f" got {batch_size} of {len(x)}."
            )
        return call.with_num_data()
    call = call.with_num_data()
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
    check_call_finite(call)
    check_samples(call)
    return call


def held_out_share(
    model: object, args: tuple[object, ...], share: float, seed: object
) -> tuple[tuple[object, ...], tuple[object, Tensor]]:
    """Return x and y of a training without a share of them, and that share, chosen at random by the seed."""
    if not is_network(model) or takes_all(model) or len(args) != 2 or not isinstance(args[1], Tensor):
        raise PyroDropoutError(
            f"validation={share} holds out a share of x and y, for a network whose points are independent; for"
            " anything else, and for a DataLoader, give the held-out data themselves."
        )
    x, y = inputs_of(args[0]), args[1]
    check_pairs("x and y", x, y)
    count = round(share * len(y))
    if not 0 < count < len(y):
        raise RangeError(f"validation must hold out some of the {len(y)} points, and not all; got the share {share}.")
    generator = torch.Generator().manual_seed(seed if isinstance(seed, int) else 0)
    order = torch.randperm(len(y), generator=generator, device="cpu").to(y.device)
    held, kept = order[:count].sort().values, order[count:].sort().values
    return (x[kept], y[kept]), (x[held], y[held])


def check_validation(
    model: Callable[..., object], validation: object, patience: object, every: object, target: Target = None
) -> ModelCall | None:
    """Return the call of a model with held-out data, if there are any; raise an error unless it is possible."""
    if validation is None:
        if every is not None or patience != PATIENCE:
            given = f"patience={patience!r}" if every is None else f"check_every={every!r}"
            raise PyroDropoutError(
                f"{given} is for a training that held-out data can stop. Give validation=0.2 or validation=(x, y) as"
                " well, or leave it out."
            )
        return None
    check_count("patience", patience)
    if every is not None:
        check_count("check_every", every)
    if not is_network(model):
        raise PyroDropoutError(
            f"validation is for networks; {name_of(model)} is another Pyro model. Leave it out, and compare"
            " predict(...).log_prob on held-out data after trainings of different lengths."
        )
    if isinstance(validation, DataLoader):
        validation = all_of(validation, target)
    if not isinstance(validation, tuple | list) or len(validation) != 2:
        raise ShapeError(f"validation must be a pair (x, y), or a DataLoader; got {type(validation).__name__}.")
    x, y = inputs_of(validation[0], "validation: x", takes_all(model)), validation[1]
    check_pairs("validation", x, y)
    check_targets(model, x, y, watched=True)
    return ModelCall(model, (x, y))


def check_targets(model: Callable[..., object], x: AnyInputs, y: Tensor, watched: bool = False) -> None:
    """Raise an error unless a model takes targets, and these fit its outputs; a compiled step cannot check them.

    If the model's likelihood is unknown here, only its signature is checked. Training targets that only need to be
    finite do not need the model's outputs. No step sees the validation set, which is ``watched``.
    """
    ModelCall(model, (x, y, len(x))).check_bound()
    if not is_network(model):
        return
    likelihood = likelihood_of(model)
    if isinstance(likelihood, Gaussian) and not watched:
        likelihood.warn_of_classes(y)
    only_finite = (Likelihood.check_values, Gaussian.check_values)
    if getattr(type(likelihood), "check_values", None) in only_finite and not watched:
        check_data_finite("y", y)
        return
    try:
        if watched:
            check_inputs(x)
        f = outputs_at(model, x if takes_all(model) else x[:2])
        if f is not None:
            warn_of_probabilities(model, f)
            likelihood.check_values(f, likelihood.checked(f[:1].expand(len(y), -1), y))
    except PyroDropoutError as cause:
        if not watched:
            raise
        raise type(cause)(f"validation: {cause}") from None


def outputs_at(model: Callable[..., object], x: AnyInputs) -> Tensor | None:
    """Return a model's outputs with weights from the prior, for their shape; None if it does not return them."""
    place = next((p.device for p in model.parameters()), x.device) if isinstance(model, nn.Module) else x.device
    with torch.no_grad(), quietly(model), poutine.block():
        try:
            f = model(x.to(place))
        except TypeError:  # one that needs targets too: its first step checks them
            return None
    return f if isinstance(f, Tensor) and f.dim() == 2 else None
