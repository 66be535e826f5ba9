"""The loop around the training steps: progress, early stopping, checkpoints, and a stop when the loss is not finite."""

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from pyro_dropout.generative.random_state import seeded
from pyro_dropout.training.checkpoints.tensor_file import digest
from pyro_dropout.training.checkpoints.training_checkpoint import Keeper
from pyro_dropout.training.distributed.process_group import ALONE, Group
from pyro_dropout.training.history import DivergedError, History
from pyro_dropout.training.loss.elbo import ELBO
from pyro_dropout.training.loss_record import Ledger
from pyro_dropout.training.runner import CHAIN, TrainingRun


class Watch:
    """Early stopping: keeps the parameters that were best on a validation set."""

    def __init__(
        self,
        model: Any,
        guide: Any,
        run: TrainingRun,
        data: tuple[Tensor, Tensor],
        patience: int,
        every: int,
        seed: int | None = None,
        group: Group = ALONE,
    ) -> None:
        self.model, self.guide, self.run, self.patience, self.every = model, guide, run, patience, every
        self.group = group
        base = torch.initial_seed() % 2**62 if seed is None else seed
        self.seed = int(group.copied(torch.tensor(base)))
        self.x, self.y = (part.to(run.t.device) for part in data)
        self.best, self.best_step, self.waited = float("inf"), 0, 0
        self.kept: list[Tensor] = []
        self.seen: list[tuple[int, float]] = []

    def stop(self, step: int) -> bool:
        """Evaluate the validation set at ``step``, and return whether to stop; the training's draws do not change."""
        self.run.publish()
        model = self.model
        training = bool(getattr(model, "training", False))
        if training:
            model.eval()
        with torch.no_grad(), seeded(self.group.seed(self.seed + step), self.run.t.device):
            sums = self._surprise()
        if training:
            model.train()
        nll, points = self.group.mean(sums).tolist()
        value = nll / points
        self.seen.append((step, value))
        if value < self.best:
            self.best, self.best_step, self.waited = value, step, 0
            self.kept = self.run.snapshot()
        else:
            self.waited += 1
        return self.waited >= self.patience

    def _surprise(self) -> Tensor:
        """Return -log p(y|w) summed over the points, and their number, (2,)."""
        # Ranks share the points; if there are too few, every rank has all of them.
        share = self.group.share(len(self.x)) if len(self.x) >= self.group.world else slice(None)
        nll = ELBO(num_particles=8).parts(self.model, self.guide, self.x[share], self.y[share])["nll"]
        return torch.stack([nll.double(), nll.new_tensor(len(self.x[share])).double()])

    def ahead(self, done: int) -> int:
        """Return how many steps to take before the next check; steps in blocks of twenty do not stop for it."""
        return self.every if self.run.chained and self.every >= CHAIN else self.every - done % self.every

    def facts(self) -> dict[str, Any]:
        """Return what must be the same when the training is resumed."""
        return {"x": digest(self.x), "y": digest(self.y), "patience": self.patience, "every": self.every}

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return its state: tensors, and the rest."""
        rest = {"best": self.best, "best_step": self.best_step, "waited": self.waited, "seen": self.seen}
        rest["seed"] = self.seed
        return {f"kept.{k:04d}": value for k, value in enumerate(self.kept)}, rest

    def set_state(self, tensors: dict[str, Tensor], rest: dict[str, Any]) -> None:
        """Restore a state."""
        self.best, self.best_step, self.waited = rest["best"], rest["best_step"], rest["waited"]
        self.seen = [(int(step), float(value)) for step, value in rest["seen"]]
        self.seed = rest.get("seed", self.seed)
        self.kept = [tensors[name].to(self.run.t.device) for name in sorted(tensors) if name.startswith("kept.")]


def loop(
    run: TrainingRun,
    total: int,
    progress: bool,
    *,
    watch: Watch | None = None,
    blame: Callable[[], str] = str,
    keeper: Keeper | None = None,
    group: Group = ALONE,
) -> History:
    """Take ``total`` steps of a run, with a progress bar.

    Args:
        run: the training.
        total: how many steps it has.
        progress: whether to show the bar.
        watch: when to stop early.
        blame: names a site whose term is not finite at the parameters that were published last; "" if there is none.
        keeper: writes checkpoints, and knows the last one.
        group: the ranks that take these steps together. They agree on whatever depends on a clock or a signal, because
            the others would wait for a rank that left alone.
    """
    ledger = Ledger(total)
    if keeper is not None:
        for part in keeper.resume(total):
            ledger.enter(part)
    done = ledger.steps
    good = run.snapshot()
    seen, shown, started = done, time.perf_counter(), time.perf_counter()
    stopped = watch is not None and watch.waited >= watch.patience
    with (
        _published(run),
        _asked(keeper) as asked,
        tqdm(total=total, initial=done, disable=not (progress and group.first), unit="step", smoothing=0.1) as bar,
    ):
        while done < total and not stopped:
            ledger.enter(group.mean(run.advance(min(total - done, CHAIN if watch is None else watch.ahead(done)))))
            taken, done = ledger.steps - done, ledger.steps
            now = time.perf_counter()
            # Reading a loss waits for the device, so it is done twice a second and not at every step.
            late = keeper is not None and keeper.due(done)
            looks, due, number = group.any(now - shown > 0.5, late, asked.signal or 0)
            if looks or done >= total:
                _stop_if_diverged(run, ledger.losses, seen, good, blame)
                good, seen, shown = run.snapshot(), done, now
                bar.set_postfix(loss=f"{ledger.losses[-1].nanmean().item():.4g}", refresh=False)
            bar.update(taken)
            watched = watch is not None and done // watch.every != (done - taken) // watch.every
            writes = keeper is not None and (bool(due or number) or done >= total)
            if (watched or writes) and seen < done:  # parameters that are not finite are neither validated nor saved
                _stop_if_diverged(run, ledger.losses, seen, good, blame)
                good, seen = run.snapshot(), done
            if watched:
                assert watch is not None
                stopped = watch.stop(done)
            if keeper is not None and (writes or stopped):
                keeper.write(done, ledger.losses)
            asked.leave(number, run, done, group.first)
        # Not in the checkpoint: a longer run that resumes from it would not have made this check.
        if watch is not None and not stopped and (not watch.seen or watch.seen[-1][0] != done):
            watch.stop(done)
        asked.leave(asked.signal or 0, run, done, group.first)  # a signal after the last step
    seconds = time.perf_counter() - started
    if watch is not None and watch.kept:
        run.restore(watch.kept)
    run.publish()
    return History(
        ledger.losses.cpu(),
        done,
        seconds,
        run.compile_seconds,
        run.compiled,
        torch.get_float32_matmul_precision(),
        watch.seen if watch is not None else [],
        watch.best_step if watch is not None else None,
    )


@contextlib.contextmanager
def _published(run: TrainingRun) -> Iterator[None]:
    """Within this context, an interruption (Ctrl-C) leaves the parameters so far in the model and the guide."""
    try:
        yield
    except KeyboardInterrupt:
        run.publish()
        raise


def _stop_if_diverged(
    run: TrainingRun, losses: Tensor, seen: int, good: list[Tensor], blame: Callable[[], str]
) -> None:
    """Raise an error if a loss since step ``seen`` is not finite; the parameters return to ``good``.

    Where a step has several losses, one for each replica, the others continue until all are lost.
    """
    finite = torch.isfinite(losses[seen:])
    bad = (~(finite if finite.dim() == 1 else finite.any(1))).nonzero()
    if not len(bad):
        return
    first = seen + int(bad[0])
    broken = sum(not bool(torch.isfinite(value).all()) for value in run.values)
    run.publish()
    site = blame()
    run.restore(good)
    run.publish()
    before = blame()
    if before:
        reason = f"the term of site {before!r} is not finite even at the last good parameters."
    else:
        reason = f"that step broke {broken} of {len(run.values)} parameters."
        reason += f" At the parameters after it the term of site {site!r} is not finite." if site else ""
    raise DivergedError(
        f"the loss is {losses[first].flatten()[0].item()} at step {first + 1}; {reason} The parameters are back where"
        f" they were at step {seen}. Lower the learning rate, clip gradients (clip_norm=...), or look for values in x"
        " and y that are not finite."
    )


class _Asked:
    """Whether the process has received a signal to end; it is handled between steps, when the state is consistent."""

    def __init__(self, keeper: Keeper | None) -> None:
        self.keeper = keeper
        self.signal: int | None = None

    def note(self, number: int, frame: Any) -> None:
        """Remember the first signal; a second one interrupts immediately."""
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number

    def leave(self, number: int, run: TrainingRun, done: int, speaks: bool) -> None:
        """End the process, after the checkpoint, by a signal that it or another rank received; 0 is none."""
        if not number:
            return
        run.publish()
        if speaks and self.keeper is not None:
            print(f"\nstopped at step {done}; {_where(self.keeper, done)}", file=sys.stderr, flush=True)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)


def _where(keeper: Keeper, done: int) -> str:
    """Say where the training can resume, from what is on disk."""
    if not keeper.step:
        return f"no checkpoint could be written to {keeper.folder}, so nothing of this training is saved."
    if keeper.step == done:
        return f"training can resume from there (checkpoints in {keeper.folder})."
    return (
        f"its checkpoint could not be written; training can resume from step {keeper.step} (checkpoints in"
        f" {keeper.folder})."
    )


@contextlib.contextmanager
def _asked(keeper: Keeper | None) -> Iterator[_Asked]:
    """Within this context, SIGTERM and Ctrl-C wait until a checkpoint is written; without a keeper they do not."""
    asked = _Asked(keeper)
    if keeper is None or threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = {number: signal.signal(number, asked.note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
