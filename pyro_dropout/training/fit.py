"""Fitting a guide to data: mini-batches, progress, early stopping, and a stop when the loss is not finite."""

import functools
import itertools
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from pyro_dropout.engines.choose import HowCompiled, check_how_compiled, decided, left_out, step_size
from pyro_dropout.errors import IgnoredInputsWarning, PyroDropoutError, UnfinishedTrainingWarning, warn_caller
from pyro_dropout.generative.inputs import takes_all
from pyro_dropout.generative.model_call import ModelCall, call_of, check_keywords, check_programs, is_network
from pyro_dropout.generative.networks import BayesianNet
from pyro_dropout.generative.precision import Precision, check_precision, products_in
from pyro_dropout.generative.process_state import modules_stay, one_at_a_time, seeded
from pyro_dropout.generative.standardised import network_in
from pyro_dropout.generative.trial_run import holders_of, owner_of
from pyro_dropout.guides.ensemble import Ensemble
from pyro_dropout.guides.summary import note_training
from pyro_dropout.mathematics.checks import check_seed, describe
from pyro_dropout.protocols import PyroModel, Record
from pyro_dropout.training.batches import open_loader
from pyro_dropout.training.checkpoints.fingerprint import told_update
from pyro_dropout.training.checkpoints.training_checkpoint import Checkpoint, Keeper
from pyro_dropout.training.collapse import note_learned
from pyro_dropout.training.compile.functional import Loss
from pyro_dropout.training.early_stopping import EnsembleWatch, Watch
from pyro_dropout.training.ensemble.ensemble_training import check_members, enlisted, train_members
from pyro_dropout.training.history import History, explained, rise, still_falling
from pyro_dropout.training.laplace.laplace import as_points, finish_on
from pyro_dropout.training.loader import loader_of
from pyro_dropout.training.loop import loop
from pyro_dropout.training.loss.elbo import ELBO
from pyro_dropout.training.loss.learned_widths import best_widths_after, learned_sites
from pyro_dropout.training.loss.temperature import at_step
from pyro_dropout.training.optimisers import Schedule, Update, chosen
from pyro_dropout.training.preflight import (
    LARGEST_SEED,
    PATIENCE,
    check_data,
    check_duration,
    check_gradients,
    check_how,
    check_validation,
    held_out_share,
)
from pyro_dropout.training.processes import SharedTask, join
from pyro_dropout.training.settled import held_back
from pyro_dropout.training.training_run import TrainingTask


@one_at_a_time
@modules_stay
def fit(
    model: PyroModel,
    guide: PyroModel,
    *args: object,
    steps: int | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    lr: float | None = None,
    optim: str | torch.optim.Optimizer | Update = "adam",
    schedule: Schedule | None = None,
    clip_norm: float | None = None,
    loss: Loss | None = None,
    compile: HowCompiled = "auto",
    precision: Precision = "float32",
    progress: bool = True,
    seed: int | None = None,
    device: torch.device | str | None = None,
    validation: object = None,
    patience: int = PATIENCE,
    check_every: int | None = None,
    checkpoint: str | Path | Checkpoint | None = None,
    target: str | int | None = None,
    num_data: int | None = None,
    distributed: bool = False,
    **kwargs: object,
) -> History:
    """Train a guide (and a model's ordinary parameters) on data, and return the history of the loss.

    Warns if the loss ended above where it began, or was still falling when the steps were over, with how many more it
    would take; and if a ``schedule`` held back means of a posterior with learned widths before they had arrived.

    Mini-batches are shuffled and without replacement within an epoch. The step is compiled, optimiser and mini-batch
    gather included; on a GPU many steps run in one CUDA graph, with the data resident there. Other threads
    that train or predict wait until it ends.

    Args:
        model: any Pyro model. If it has a parameter ``num_data``, as networks of this package have, it is given N, the
            length of the first tensor among its arguments, and can be trained on mini-batches: rows of every tensor
            that has N of them. Any other model sees all of its data at every step.
        guide: its guide.
        args: the model's arguments; for a network (x, y): inputs, (N, ...), and targets, (N, D) or (N,). They may be
            tensors, numbers, and dicts, lists and tuples of them. A network is called with a dict as keyword
            arguments, and with a tuple as positional ones. Or a torch ``DataLoader`` alone, whose batches are pairs
            (x, y) or dicts (see ``target``): data need never be in memory at once. The last, smaller batch of an epoch
            is scaled as any other, and where steps are compiled it runs eagerly.
        steps: how many steps to take; or give ``epochs``.
        epochs: how often to go through the data.
        batch_size: points in a mini-batch; by default, or if there are fewer, all of them. It needs a model that takes
            ``num_data``.
        lr: learning rate of "adam", "adamw" and "sgd"; 1e-3 unless given. Other optimisers have their own.
        optim: "adam", "adamw", "sgd" (momentum 0.9), all without weight decay (the KL is the decay); an ``Update``; or
            a torch optimiser. That trains what it holds: give it ``guide.parameters()``, and those of the model that
            are to be trained. It runs beside the compiled step, from the state that it has; the others are part of it.
            A weight decay changes the objective, and a warning says so.
        schedule: multiplies ``lr``: a function of the number of steps done, such as ``inverse_decay()``.
        clip_norm: the largest norm of the gradient, of each member in an ensemble; None for no limit.
        loss: ``ELBO(per_example="auto")`` by default; for models that are no networks, without its warning.
        compile: False for eager steps; "traced" to record a step once and replay its tensor operations without Pyro;
            True to compile that, or raise. "auto" takes what is soonest done, by the number of steps and of weights:
            see :doc:`training`. On a GPU it compiles. What cannot be recorded runs eagerly, with a warning.
        precision: "bf16" for products of a ``BayesianNet`` in bfloat16, for wide networks on a GPU: see
            :doc:`training`. Parameters, moments, KL, outputs and loss stay in float32.
        progress: show a progress bar with the loss and the speed.
        seed: for weight draws and mini-batches; the random generators are left as they were.
        device: where to train; model, guide and data are moved there, where they are modules. By default, where the
            model is.
        validation: (x, y) to watch, or a DataLoader that is read once and kept, or the share of x and y to hold out,
            such as 0.2; training stops when its log-likelihood has not improved ``patience`` times, and the best
            parameters are restored. For networks.
        patience: how many checks without improvement are allowed.
        check_every: steps between checks; a fiftieth of all steps by default. On a GPU steps run in blocks of twenty,
            and a check waits for the end of its block. The last step is always checked. Checks use other random
            numbers, so that training does not depend on how many there are.
        checkpoint: a folder for checkpoints, or a ``Checkpoint`` that says how often to write them. If the folder holds
            one of the same run, training resumes from it and ends bitwise as if it had never stopped.
        target: the key of the targets in a ``DataLoader``'s batches that are dicts; the rest of them is x. Or their
            index in batches that are tuples; 1 in pairs.
        num_data: the number N of data that the batches of a ``DataLoader`` come from; by default the length of its
            dataset. Without a loader, it is an argument of the model.
        distributed: share this training among the processes that torchrun has started, all of which make this call: see
            :doc:`scaling`.
        kwargs: the model's own keyword arguments.

    Returns:
        The history of the loss.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> x = torch.linspace(-1, 1, 64).unsqueeze(-1)
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 20), torch.nn.ReLU(), torch.nn.Linear(20, 1))
        >>> model = pdrop.BayesianNet(net, likelihood=pdrop.Gaussian(tau=25.0))
        >>> guide = pdrop.AutoDropout(model, keep=0.95)
        >>> quiet = {"compile": False, "progress": False, "seed": 0}
        >>> history = pdrop.fit(model, guide, x, x**2, epochs=50, batch_size=32, lr=0.01, **quiet)
        >>> history.steps, bool(history.losses[-20:].mean() < history.losses[:20].mean())
        (100, True)
    """
    for label, value in (("model", model), ("guide", guide)):
        if not callable(value):
            raise PyroDropoutError(f"{label} must be a Pyro program, a function or a module; got {describe(value)}.")
    check_programs(model, guide)
    check_gradients(model, guide)
    check_how_compiled(compile)
    check_precision(precision, model, device)
    check_duration(steps, epochs, batch_size)
    check_seed(seed, 0, LARGEST_SEED)
    loader, stream = loader_of(args), None
    if isinstance(validation, float):
        args, validation = held_out_share(model, args, validation, seed)
    if loader is not None:
        check_keywords(fit, model, kwargs)
        own: Any = {"guide": guide, "batch_size": batch_size, "target": target, "num_data": num_data, "seed": seed}
        stream, call = open_loader(loader, model, kwargs, **own)
    else:
        if target is not None and not isinstance(validation, DataLoader):
            raise PyroDropoutError(f"target is for the batches of a DataLoader; got {target!r} with x and y.")
        named = kwargs if num_data is None else {**kwargs, "num_data": num_data}
        call = check_data(call_of(fit, model, args, named), batch_size)
    held_out = check_validation(model, validation, patience, check_every, target)
    if lr is not None and not isinstance(optim, str):
        raise PyroDropoutError(
            f"lr={lr!r} is for optim='adam', 'adamw' or 'sgd'; the {type(optim).__name__} that was given has its own"
            " learning rate. Leave lr out."
        )
    lr = 1e-3 if lr is None else lr
    check_how(clip_norm, device, lr=lr, schedule=schedule, loss=loss, optim=optim)
    if loss is not None and not isinstance(loss, ELBO) and learned_sites(model):
        raise PyroDropoutError(f"Prior(learn=...) needs the loss pyro_dropout.ELBO; got {type(loss).__name__}.")
    largest = None if isinstance(guide, Ensemble) else clip_norm  # each member's gradient is clipped by itself
    update = chosen(optim, lr, schedule, largest)
    if isinstance(guide, Ensemble):
        update, clip_norm = check_members(guide, update, clip_norm)
    place = place_of([model, guide], call) if device is None else torch.device(device)
    count = call.count or 1
    batch = count if batch_size is None else min(batch_size, count)
    processes = None
    if distributed:
        fixed = device is not None and place.index is not None
        never = {"a DataLoader": stream is not None, f"compile={compile!r}": compile not in ("auto", False)}
        processes = join(call, guide, batch, place, fixed, **never, **{"seed=None": seed is None})
        compile, progress, place = False, progress and not processes.rank, processes.place
    call = call.trainable().to(place)
    for module in holders_of(model, guide) if device is not None or distributed else ():
        module.to(place)
    net = network_in(model)
    if isinstance(net, BayesianNet) and isinstance(net.likelihood, nn.Module):
        net.likelihood.to(place)  # of BayesianNet(net.cuda()) it is on the CPU, where a replay on a GPU cannot fetch it
    per_epoch = max(1, count // batch) if stream is None or epochs is None else stream.length
    total = steps if steps is not None else int(epochs or 0) * per_epoch
    size = step_size(model.parameters(), batch) if isinstance(model, nn.Module) else 0
    how = decided(compile, total, size * (guide.members if isinstance(guide, Ensemble) else 1), place)
    where = Checkpoint(checkpoint) if isinstance(checkpoint, str | Path) else checkpoint

    def train(task: TrainingTask) -> History:
        with products_in(precision), explained(batch, task.less):
            run = task.start(update, batch, how)
            run.why += left_out(compile, how, run.engine)
            watch = keeper = None
            if held_out is not None:
                every = check_every or max(1, total // 50)
                kind = EnsembleWatch if isinstance(guide, Ensemble) else Watch
                watch = kind(held_out, guide, run, patience, every, seed)
            if where is not None or processes is not None:
                facts: Record = {"batch": batch, "seed": seed, "update": told_update(update)} | task.facts()
                facts |= {} if precision == "float32" else {"precision": precision}
                facts |= {} if watch is None else {"validation": watch.facts()}
                if processes is not None:
                    facts["processes"] = processes.count
                    asked = facts | {"steps": total}
                    run.ready = functools.partial(processes.check_same, run, model, task.guide, asked)
                if where is not None:
                    keeper = Keeper(where, run, model, task.guide, facts, watch)
                    keeper.writes = processes is None or not processes.rank
            return loop(run, total, progress, watch=watch, keeper=keeper, blame=task.blame)

    # Trial runs are no steps of the loss.
    with (
        seeded(seed, place),
        warnings.catch_warnings(),
        at_step(torch.ones(())),
        best_widths_after(model, guide, call),
    ):
        if loss is None and not is_network(model):  # a draw for each data point was not requested
            warnings.filterwarnings("ignore", message=".*cannot be drawn for each data point")
        told = ""
        if isinstance(guide, Ensemble):
            members = enlisted(guide, call, batch, loss=loss, clip_norm=clip_norm, checkpoint=where)
            history = train_members(members, train)
        else:
            chosen_loss = ELBO(per_example=False if takes_all(model) else "auto") if loss is None else loss
            if stream is not None:
                stream.device = place
            with as_points(model, guide, loss):
                task = TrainingTask(guide, chosen_loss, call, stream)
                if processes is not None:
                    task = SharedTask(guide, chosen_loss, call, processes=processes, seed=seed)
                history = train(task)
                if stream is None and processes is None:  # else there is but a part of the data here
                    told = held_back(update.schedule, history.steps, model, guide, chosen_loss, call, batch)
                finish_on(guide, call, loader, target, batch_size, held_out)
        if not callable(getattr(loss, "temperature", None)) and history.best_step in (None, history.steps):
            number = call.args[2] if len(call.args) > 2 else call.kwargs.get("num_data")
            points = number if isinstance(number, int) else count
            if rose := rise(history.losses, points):
                warn_caller(rose)
            else:
                history.unfinished = still_falling(history.losses, points)
                if history.unfinished is None and told:
                    warn_caller(told, UnfinishedTrainingWarning)
        return _noted(model, guide, call, history)


def _noted(model: PyroModel, guide: PyroModel, call: ModelCall, history: History) -> History:
    """Let a guide remember its training; warn if it has learned nothing from its inputs, or ended too soon."""
    note_training(guide, history.summary)
    history.learned, told = note_learned(model, guide, call)
    if history.unfinished is not None:
        net, ignores = network_in(model), history.learned is not None and bool(told)
        to_prior = ignores and isinstance(net, BayesianNet) and not net.prior.tempered
        warn_caller(history.unfinished.sentence(history.steps, to_prior), UnfinishedTrainingWarning)
    if told:
        warn_caller(told, UserWarning if history.learned is None else IgnoredInputsWarning)
    return history


def place_of(parts: Iterable[object], call: ModelCall | None = None) -> torch.device:
    """Return the device of the first parameter of modules or their methods; if there is none, that of the arguments."""
    parameters = (p for part in map(owner_of, parts) if isinstance(part, nn.Module) for p in part.parameters())
    leaves = () if call is None else call.leaves()
    return next((value.device for value in itertools.chain(parameters, leaves)), torch.device("cpu"))
