"""Fitting a guide to data: mini-batches, progress, early stopping, and a stop when the loss is no longer a number."""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pyro
import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from pyro_dropout.inference.elbo import ELBO
from pyro_dropout.inference.functional import Buffers, Parameters, make_gradients, make_step, quietly, unvalidated
from pyro_dropout.inference.history import DivergedError, History
from pyro_dropout.inference.runs import CHAIN, Batches, BesideRun, Run
from pyro_dropout.inference.svi import Compile, check_compile
from pyro_dropout.inference.updates import Schedule, Update, from_optimiser, named
from pyro_dropout.mathematics.errors import PyroDropoutError, RangeError, ShapeError, check_count, check_pairs


def fit(
    model: Any,
    guide: Any,
    x: Tensor,
    y: Tensor,
    *,
    steps: int | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    lr: float = 1e-3,
    optim: str | torch.optim.Optimizer | Update = "adam",
    schedule: Schedule | None = None,
    clip_norm: float | None = None,
    loss: Any = None,
    compile: Compile = "auto",
    progress: bool = True,
    seed: int | None = None,
    device: torch.device | str | None = None,
    validation: tuple[Tensor, Tensor] | None = None,
    patience: int = 10,
    check_every: int | None = None,
) -> History:
    """Train a guide (and a model's ordinary parameters) on data, and say how it went.

    Mini-batches are shuffled and without replacement within an epoch. The step is compiled, optimiser and mini-batch
    gather included; on a GPU many steps run in one CUDA graph, with the data resident there.

    Args:
        model: a Pyro model ``model(x, y, num_data)``.
        guide: its guide.
        x: inputs, (N, ...).
        y: targets, (N, D) or (N,).
        steps: how many steps to take; or give ``epochs``.
        epochs: how often to go through the data.
        batch_size: points in a mini-batch; all of them by default, and where there are fewer.
        lr: learning rate.
        optim: "adam", "adamw", "sgd" (momentum 0.9), an ``Update``, or a torch optimiser of the guide's parameters.
            Adam, AdamW and SGD join the compiled step, from zero state; any other runs beside it.
        schedule: multiplies ``lr``: a function of the number of steps done, such as ``inverse_decay()``.
        clip_norm: the largest norm of the gradient; None for any.
        loss: ``ELBO()`` by default.
        compile: "auto", True or False, as in ``SVI``.
        progress: show a progress bar with the loss and the speed.
        seed: of weight draws and mini-batches.
        device: where to train; model, guide and data are moved there. By default, where the model is.
        validation: (x, y) to watch; training stops when its log-likelihood has not improved ``patience`` times, and the
            best parameters are put back.
        patience: how many checks without improvement are borne.
        check_every: steps between checks; a fiftieth of all steps by default. On a GPU steps come in twenties, and a
            check comes after the twenty in which it falls. The last step is always checked.

    Returns:
        The history of the loss.

    Example:
        >>> import torch, pyro_dropout as pd
        >>> x = torch.linspace(-1, 1, 64).unsqueeze(-1)
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 20), torch.nn.ReLU(), torch.nn.Linear(20, 1))
        >>> model = pd.BayesianNet(net, likelihood=pd.Gaussian(tau=25.0))
        >>> guide = pd.AutoDropout(model, keep=0.95)
        >>> quiet = {"compile": False, "progress": False, "seed": 0}
        >>> history = pd.fit(model, guide, x, x**2, epochs=50, batch_size=32, lr=0.01, **quiet)
        >>> history.steps, bool(history.losses[-20:].mean() < history.losses[:20].mean())
        (100, True)
    """
    check_compile(compile)
    check_length(x, y, steps, epochs, batch_size)
    _check_watch(validation, patience, check_every)
    if clip_norm is not None and not clip_norm > 0:
        raise RangeError(f"clip_norm must be positive, or None for no limit; got {clip_norm!r}.")
    update = _update(optim, lr, schedule, clip_norm)
    if seed is not None:
        pyro.set_rng_seed(seed)
    place = move_to(device, [model, guide])
    x, y = x.to(place), y.to(place)
    count = len(x)
    batch = count if batch_size is None else min(batch_size, count)
    total = steps if steps is not None else int(epochs or 0) * max(1, count // batch)
    task = _Task(model, guide, ELBO() if loss is None else loss, x, y)
    run = task.run(update, batch, compile)
    watch = None
    if validation is not None:
        watch = _Watch(task, run, validation, patience, check_every or max(1, total // 50))
    return loop(run, total, progress, watch=watch, blame=task.blame)


def check_length(x: Any, y: Any, steps: Any, epochs: Any, batch_size: Any) -> None:
    """Raise an error unless there is data, and one way to say for how long to train on it."""
    if (steps is None) == (epochs is None):
        raise RangeError("give either steps or epochs, not both and not neither.")
    check_count("steps" if steps is not None else "epochs", steps if steps is not None else epochs)
    if batch_size is not None:
        check_count("batch_size", batch_size)
    check_pairs("x and y", x, y)


def move_to(device: torch.device | str | None, parts: Iterable[Any]) -> torch.device | str:
    """Move modules to ``device``; without one, return the device that they are on."""
    modules = [part for part in parts if isinstance(part, nn.Module)]
    if device is not None:
        for module in modules:
            module.to(device)
        return device
    return next((p.device for module in modules for p in module.parameters()), torch.device("cpu"))


def _check_watch(validation: Any, patience: Any, check_every: Any) -> None:
    if validation is None:
        return
    if not isinstance(validation, tuple | list) or len(validation) != 2:
        raise ShapeError(f"validation must be a pair (x, y); got {type(validation).__name__}.")
    check_pairs("validation", *validation)
    check_count("patience", patience)
    if check_every is not None:
        check_count("check_every", check_every)


def _update(
    optim: Any, lr: float, schedule: Schedule | None, clip_norm: float | None
) -> Update | torch.optim.Optimizer:
    if isinstance(optim, Update):
        if schedule is not None or clip_norm is not None:
            raise PyroDropoutError("an Update has a schedule and a clip_norm of its own; give them to it, not to fit.")
        return optim
    if not isinstance(optim, torch.optim.Optimizer):
        return named(optim, lr, schedule=schedule, clip_norm=clip_norm)
    found = from_optimiser(optim, schedule=schedule, clip_norm=clip_norm)
    if found is None and (schedule is not None or clip_norm is not None):
        raise PyroDropoutError(
            f"{type(optim).__name__} with these options runs beside the step, where schedule and clip_norm do not reach"
            " it; use Adam, AdamW or SGD with one group of parameters, or leave the two out."
        )
    return optim if found is None else found


@dataclass
class _Task:
    """What is fitted to what."""

    model: Any
    guide: Any
    loss: Any
    x: Tensor
    y: Tensor

    def run(self, update: Update | torch.optim.Optimizer, batch: int, compile: Compile) -> Run:
        """Return a training of the guide's and the model's parameters, ready to start."""
        parts = (self.model, self.guide, self.loss)
        first = (self.x[:batch], self.y[:batch], len(self.x))
        parameters = Parameters(*parts, first, {})
        batches = None
        if batch < len(self.x):
            batches = Batches(batch, torch.arange(len(self.x), device=self.x.device))
        buffers = (Buffers(self.model, self.guide).values,)
        with quietly(self.model, self.guide):  # compiling runs the model, whose buffers must not notice
            if isinstance(update, torch.optim.Optimizer):
                gradients_of = make_gradients(*parts, parameters, self._arguments)
                trained = list(parameters.by_name.values())
                return BesideRun(gradients_of, trained, update, inputs=buffers, batches=batches, compile=compile)
            step = make_step(*parts, parameters, update, self._arguments)
            options: Any = {"inputs": buffers, "batches": batches, "compile": compile}
            return Run(step, parameters.values, update, write=parameters.write, **options)

    def _arguments(self, *index: Tensor) -> tuple[Any, Any]:
        if not index:
            return (self.x, self.y, len(self.x)), {}
        return (self.x[index[0]], self.y[index[0]], len(self.x)), {}

    def blame(self) -> str:
        """Name a site whose term is not a number at the present parameters; "" where all are."""
        if not isinstance(self.loss, ELBO):
            return ""
        with torch.no_grad(), unvalidated():
            terms = self.loss.by_site(self.model, self.guide, self.x, self.y, len(self.x))
        sites = [name for name, term in terms.items() if not bool(torch.isfinite(term))]
        return f"the term of site {sites[0]!r} is not finite even at the last good parameters." if sites else ""


class _Watch:
    """Early stopping: keeps the parameters that were best on a validation set."""

    def __init__(self, task: _Task, run: Run, data: tuple[Tensor, Tensor], patience: int, every: int) -> None:
        self.task, self.run, self.patience, self.every = task, run, patience, every
        self.x, self.y = (t.to(task.x.device) for t in data)
        self.best, self.best_step, self.waited = float("inf"), 0, 0
        self.kept: list[Tensor] = []
        self.seen: list[tuple[int, float]] = []

    def stop(self, step: int) -> bool:
        """Evaluate the validation set at ``step``, and say whether to stop."""
        self.run.publish()
        model, guide = self.task.model, self.task.guide
        training = bool(getattr(model, "training", False))
        if training:
            model.eval()
        with torch.no_grad():
            parts = ELBO(num_particles=8).parts(model, guide, self.x, self.y)
        if training:
            model.train()
        value = parts["nll"].item() / len(self.x)
        self.seen.append((step, value))
        if value < self.best:
            self.best, self.best_step, self.waited = value, step, 0
            self.kept = self.run.snapshot()
        else:
            self.waited += 1
        return self.waited >= self.patience


def loop(
    run: Run, total: int, progress: bool, *, watch: _Watch | None = None, blame: Callable[[], str] = str
) -> History:
    """Take ``total`` steps of a run, with a progress bar; ``blame`` says what is wrong when the loss is no number."""
    losses: list[Tensor] = []
    good = run.snapshot()
    done, seen, shown, started = 0, 0, time.perf_counter(), time.perf_counter()
    with _published(run), tqdm(total=total, disable=not progress, unit="step", smoothing=0.1) as bar:
        while done < total:
            losses.append(run.advance(min(total - done, CHAIN if watch is None else watch.every)))
            taken = len(losses[-1])
            done += taken
            now = time.perf_counter()
            # Looking at a loss waits for the device, so it is done twice a second and not at every step.
            if now - shown > 0.5 or done >= total:
                losses = [torch.cat(losses)]
                _stop_if_diverged(run, losses[0], seen, good, blame)
                good, seen, shown = run.snapshot(), done, now
                bar.set_postfix(loss=f"{losses[-1][-1].nanmean().item():.4g}", refresh=False)
            bar.update(taken)
            if watch is None or (done // watch.every == (done - taken) // watch.every and done < total):
                continue
            if seen < done:  # parameters that are no numbers cannot be validated
                losses = [torch.cat(losses)]
                _stop_if_diverged(run, losses[0], seen, good, blame)
                good, seen = run.snapshot(), done
            if watch.stop(done):
                break
    seconds = time.perf_counter() - started
    if watch is not None and watch.kept:
        run.restore(watch.kept)
    run.publish()
    return History(
        torch.cat(losses).cpu(),
        done,
        seconds,
        run.compile_seconds,
        run.compiled,
        torch.get_float32_matmul_precision(),
        watch.seen if watch is not None else [],
        watch.best_step if watch is not None else None,
    )


@contextlib.contextmanager
def _published(run: Run) -> Iterator[None]:
    """Within this context, an interruption (Ctrl-C) leaves what was learned so far in the model and the guide."""
    try:
        yield
    except KeyboardInterrupt:
        run.publish()
        raise


def _stop_if_diverged(run: Run, losses: Tensor, seen: int, good: list[Tensor], blame: Callable[[], str]) -> None:
    """Raise an error if a loss since step ``seen`` is not a number; the parameters go back to ``good``.

    Where there are several losses a step, one for each replica, the others go on until all are lost.
    """
    finite = torch.isfinite(losses[seen:])
    bad = (~(finite if finite.dim() == 1 else finite.any(1))).nonzero()
    if not len(bad):
        return
    first = seen + int(bad[0])
    broken = sum(not bool(torch.isfinite(value).all()) for value in run.values)
    run.restore(good)
    run.publish()
    reason = blame() or f"that step broke {broken} of {len(run.values)} parameters."
    raise DivergedError(
        f"the loss is {losses[first].flatten()[0].item()} at step {first + 1}; {reason} The parameters are back where"
        f" they were at step {seen}. Lower the learning rate, clip gradients (clip_norm=...), or look for values in x"
        " and y that are not finite."
    )
