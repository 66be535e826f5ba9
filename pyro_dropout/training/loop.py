"""The loop around the training steps: progress, early stopping, checkpoints, and a stop when the loss is not finite."""

import contextlib
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from pyro_dropout.errors import DivergedError
from pyro_dropout.training.checkpoints.training_checkpoint import Keeper
from pyro_dropout.training.distributed.process_group import ALONE, Group
from pyro_dropout.training.early_stopping import Watch
from pyro_dropout.training.history import REMEDY, History, all_finite
from pyro_dropout.training.runner import TrainingRun


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

    ``blame`` names a site whose term is not finite at the parameters that were published last; "" if there is none.
    The ranks of a group agree on whatever depends on a clock or a signal, because the others would wait for a rank that
    left alone.
    """
    ledger = _Ledger(total)
    if keeper is not None:
        for part in keeper.resume(total):
            ledger.enter(part)
    done = ledger.steps
    good = [] if run.guarded else run.snapshot()
    seen, shown, started = done, time.perf_counter(), time.perf_counter()
    stopped = watch is not None and watch.waited >= watch.patience
    shown_bar = progress_bar(total, progress and group.first, done)
    with _Interruption(run, keeper, group is ALONE, total, progress) as interruption, shown_bar as bar:
        while done < total and not stopped:
            losses = run.advance(min(total - done, run.together if watch is None else watch.ahead(done)))
            if run.failed is not None:  # ranks that wait for this one are ended by torchrun
                if group is ALONE:
                    ledger.enter(losses)
                _stop_if_diverged(run, ledger.losses, seen, good, blame)
            ledger.enter(group.mean(losses))
            taken, done = ledger.steps - done, ledger.steps
            now = time.perf_counter()
            # Reading a loss waits for the device, so it is done twice a second and not at every step.
            late = keeper is not None and keeper.due(done)
            looks, due, number = group.any(now - shown > 0.5, late, interruption.number)
            if looks or done >= total or run.refused:
                _stop_if_diverged(run, ledger.losses, seen, good, blame)
                good, seen, shown = [] if run.guarded else run.snapshot(good), done, now
                bar.set_postfix(loss=f"{ledger.losses[-1].nanmean().item():.4g}", refresh=False)
            bar.update(taken)
            watched = watch is not None and done // watch.every != (done - taken) // watch.every
            writes = keeper is not None and (bool(due or number) or done >= total)
            if (watched or writes) and seen < done:  # parameters that are not finite are neither validated nor saved
                _stop_if_diverged(run, ledger.losses, seen, good, blame)
                good, seen = [] if run.guarded else run.snapshot(good), done
            if watched:
                assert watch is not None
                stopped = watch.stop(done)
            if keeper is not None and (writes or stopped):
                keeper.write(done, ledger.losses)
            interruption.leave(number, done, group.first)
        # Not in the checkpoint: a longer run that resumes from it would not have made this check.
        if watch is not None and not stopped and (not watch.seen or watch.seen[-1][0] != done):
            watch.stop(done)
        interruption.leave(interruption.number, done, group.first)  # a signal after the last step
    seconds = time.perf_counter() - started
    if watch is not None and watch.kept:
        run.restore(watch.kept)
    run.publish()
    found = History(
        ledger.losses.cpu(),
        done,
        seconds,
        run.compile_seconds,
        matmul_precision=torch.get_float32_matmul_precision(),
        engine=run.engine,
        why="; ".join(run.why),
    )
    return found if watch is None else replace(found, validation=watch.seen, best_step=watch.best_step)


class _Ledger:
    """The losses of all steps; all memory is taken at the beginning, so that it does not grow during training."""

    def __init__(self, total: int) -> None:
        self._total, self._pages, self.steps = total, torch.empty(0), 0

    def enter(self, losses: Tensor) -> None:
        """Append the losses of the next steps, (steps,) or (steps, replicas)."""
        if not len(losses):
            return
        if not self.steps:
            # Filled, not only reserved: an operating system counts memory when it is first written to.
            self._pages = losses.new_full((self._total, *losses.shape[1:]), torch.nan)
        self._pages[self.steps : self.steps + len(losses)] = losses
        self.steps += len(losses)

    @property
    def losses(self) -> Tensor:
        """The losses so far."""
        return self._pages[: self.steps]


_shared: ContextVar[Any] = ContextVar("shared progress bar", default=None)


@contextlib.contextmanager
def sharing_bar(bar: Any) -> Iterator[None]:
    """Within this context trainings count their steps in this bar, and show none of their own."""
    before = _shared.set(bar)
    try:
        yield
    finally:
        _shared.reset(before)


def progress_bar(total: int, shown: bool, done: int = 0) -> contextlib.AbstractContextManager[Any]:
    """Return a bar of ``total`` steps, of which some are done already; it disappears at the end.

    One that others use too counts those steps as done before, and leaving it does not close it.
    """
    bar = _shared.get()
    if bar is None:
        how: Any = {"unit": "step", "smoothing": 0.1, "leave": False}
        own: contextlib.AbstractContextManager[Any] = tqdm(total=total, initial=done, disable=not shown, **how)
        return own
    if done and not bar.disable:
        bar.initial, bar.n, bar.last_print_n = bar.initial + done, bar.n + done, bar.last_print_n + done
    return contextlib.nullcontext(bar)


def _stop_if_diverged(
    run: TrainingRun, losses: Tensor, seen: int, good: list[Tensor], blame: Callable[[], str]
) -> None:
    """Raise an error if a step failed, or a loss since step ``seen`` is not finite; parameters return to ``good``.

    Where a step has several losses, one for each replica, the others continue until all are lost.
    """
    if run.refused:
        site, value = blame(), losses[-1].item()
        gradient = " and its gradient not finite" if math.isfinite(value) else ""
        where = f" The term of site {site!r} is not finite." if site else ""
        raise DivergedError(
            f"the loss is {value}{gradient} at step {len(losses)}; that step was not taken.{where} The parameters are"
            f" those after step {len(losses) - 1}. {REMEDY}"
        )
    if run.guarded and run.failed is None:
        return
    finite = torch.isfinite(losses[seen:])
    bad = (~(finite if finite.dim() == 1 else finite.any(1))).nonzero()
    lost = losses.dim() == 1 and not all_finite(run.values)  # by the last step, whose loss was before it
    if not len(bad) and run.failed is None and not lost:
        return
    broken = sum(not all_finite([value]) for value in run.values)
    if len(bad) or run.failed is None:
        first = seen + int(bad[0]) if len(bad) else len(losses) - 1
        what = f"the loss is {losses[first].flatten()[0].item()} at step {first + 1}"
    else:
        said = str(run.failed).splitlines()[0].rstrip(".")
        what = f"after step {len(losses)} no other can be computed ({said})"
    run.publish()
    site = blame()
    if good:
        run.restore(good)
        run.publish()
    before = blame()
    reason = f"that step broke {broken} of {len(run.values)} parameters."
    reason += f" At the parameters after it the term of site {site!r} is not finite." if site else ""
    reason = f"the term of site {before!r} is not finite even at the last good parameters." if before else reason
    back = f"back where they were at step {seen}" if good else f"those after step {len(losses)}"
    raise DivergedError(f"{what}; {reason} The parameters are {back}. {REMEDY}") from run.failed


class _Interruption:
    """Within this context, SIGTERM and Ctrl-C wait until a checkpoint is written.

    Without a keeper, Ctrl-C waits for the end of the step: an exception in the middle of one could leave torch, Pyro or
    the parameters half changed. Either way an interruption leaves the parameters so far in the model and the guide.
    """

    def __init__(self, run: TrainingRun, keeper: Keeper | None, alone: bool, total: int, progress: bool) -> None:
        self.run, self.keeper, self._alone = run, keeper, alone
        self._total, self._progress = total, progress
        self.number = 0  # the signal that was received

    def __enter__(self) -> "_Interruption":
        numbers: tuple[signal.Signals, ...] = ()
        if threading.current_thread() is threading.main_thread():
            if self.keeper is not None:
                numbers = (signal.SIGTERM, signal.SIGINT)
            elif self._alone and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                numbers = (signal.SIGINT,)
        self._before = {number: signal.signal(number, self._note) for number in numbers}
        if self._alone and self.keeper is None:  # ranks take the same steps, and a checkpoint is after whole batches
            self.run.break_off = lambda: bool(self.number)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if kind is not None and issubclass(kind, KeyboardInterrupt | SystemExit):
            self.run.publish()

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Remember the first signal; a second one interrupts immediately."""
        if self.number:
            raise KeyboardInterrupt
        self.number = number

    def leave(self, number: int, done: int, speaks: bool) -> None:
        """End the process, after the checkpoint, by a signal that it or another rank received; 0 is none."""
        if not number:
            return
        kept = f"stopped after {done} of {self._total} steps; the guide keeps what it has learned."
        if self.keeper is not None:
            step, folder = self.keeper.step, self.keeper.folder
            written = "" if step == done else "its checkpoint could not be written; "
            there = "there" if step == done else f"step {step}"
            where = f"{written}training can resume from {there} (checkpoints in {folder})."
            lost = f"no checkpoint could be written to {folder}, so nothing of this training is saved."
            kept = f"stopped at step {done}; {where if step else lost}"
        if speaks and (self.keeper is not None or self._progress):
            print(f"\n{kept}", file=sys.stderr, flush=True)
        if number == signal.SIGINT:
            stop = KeyboardInterrupt()
            stop.add_note(kept)
            raise stop
        raise SystemExit(128 + number)
