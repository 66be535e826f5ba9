"""The loop around the training steps: progress, early stopping, checkpoints, and a stop when the loss is not finite."""

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from pyro_dropout.engines.engine import copied, copy_into
from pyro_dropout.errors import DivergedError
from pyro_dropout.generative.process_state import bound
from pyro_dropout.training.checkpoints.training_checkpoint import Keeper
from pyro_dropout.training.early_stopping import Watch
from pyro_dropout.training.history import REMEDY, History, all_finite
from pyro_dropout.training.training_run import TrainingRun


def loop(
    run: TrainingRun,
    total: int,
    progress: bool,
    *,
    watch: Watch | None = None,
    blame: Callable[[], str] = str,
    keeper: Keeper | None = None,
) -> History:
    """Take ``total`` steps of a run, with a progress bar.

    ``blame`` names a site whose term is not finite at the parameters that were published last; "" if there is none.
    """
    ledger = _Ledger(run, total, blame)
    for part in [] if keeper is None else keeper.resume(total):
        ledger.enter(part)
    ledger.settle()
    run.ready()
    done, shown, started = ledger.steps, time.perf_counter(), time.perf_counter()
    stopped = watch is not None and watch.waited >= watch.patience
    with _Interruption(run, keeper, total, progress) as interruption, progress_bar(total, progress, done) as bar:
        while done < total and not stopped:
            ledger.enter(run.advance(min(total - done, run.together if watch is None else watch.ahead(done))))
            taken, done = ledger.steps - done, ledger.steps
            slow, due = time.perf_counter() - shown > 0.5, keeper is not None and keeper.due(done)
            number, slow, due = run.agreed(interruption.number, slow, due)  # a later signal is for the next round
            watched = watch is not None and done // watch.every != (done - taken) // watch.every
            writes = keeper is not None and (due or number or done >= total)
            # Reading a loss waits for the device, so it is done twice a second and not at every step.
            looks = slow or done >= total or run.refused or run.failed is not None
            if looks or watched or writes:  # parameters that are not finite are neither validated nor saved
                ledger.check()
            if looks:
                shown = time.perf_counter()
                bar.set_postfix(loss=f"{ledger.losses[-1].nanmean().item():.4g}", refresh=False)
            bar.update(taken)
            if watch is not None and watched:
                stopped = watch.stop(done)
            if keeper is not None and (writes or stopped):
                keeper.write(done, ledger.losses)
            interruption.leave(int(number), done)
        # Not in the checkpoint: a longer run that resumes from it would not have made this check.
        if watch is not None and not stopped and (not watch.seen or watch.seen[-1][0] != done):
            watch.stop(done)
        interruption.leave(interruption.number, done)  # a signal after the last step
    seconds = time.perf_counter() - started
    if watch is not None and watch.kept:
        run.restore(watch.kept)
    run.publish()
    rounding, why = torch.get_float32_matmul_precision(), "; ".join(run.why)
    found = History(ledger.losses.cpu(), done, seconds, run.compile_seconds, rounding, engine=run.engine, why=why)
    return found if watch is None else replace(found, validation=watch.seen, best_step=watch.best_step)


class _Ledger:
    """The losses of all steps, and the last parameters and buffers that are known to be good."""

    def __init__(self, run: TrainingRun, total: int, blame: Callable[[], str]) -> None:
        self._run, self._total, self._blame, self.steps = run, total, blame, 0
        self._pages, self._good, self._seen = torch.empty(0), list[Tensor](), 0

    def enter(self, losses: Tensor) -> None:
        """Append the losses of the next steps, (steps,) or (steps, replicas)."""
        if not len(losses):
            return
        if not self.steps:  # all memory, filled so that the system counts it: it does not grow during training
            self._pages = losses.new_full((self._total, *losses.shape[1:]), torch.nan)
        self._pages[self.steps : self.steps + len(losses)] = losses
        self.steps += len(losses)

    @property
    def losses(self) -> Tensor:
        """The losses so far."""
        return self._pages[: self.steps]

    def settle(self) -> None:
        """Remember what is good now."""
        self._good, self._seen = copied(self._kept(), self._good), self.steps

    def _kept(self) -> list[Tensor]:
        """Return what a divergence may spoil: buffers, and parameters unless the run itself keeps them good."""
        return [*self._run.buffers.values()] if self._run.guarded else self._run.held

    def _spoiled(self) -> list[str]:
        """Return the names of buffers that are not finite, and were when they were remembered last."""
        buffers = self._run.buffers
        pairs = zip(buffers.items(), self._good[-len(buffers) :], strict=True) if buffers else ()
        wide = ((name, now, was) for (name, now), was in pairs if now.element_size() > 1)  # bytes are no sums
        return [name for name, now, was in wide if not all_finite([now]) and all_finite([was])]

    def _go_back(self) -> str:
        """Restore what was remembered last; return what parameters and buffers are now, in words."""
        run, kept = self._run, self._kept()
        moved = not all(map(torch.equal, kept, self._good))
        copy_into(kept, self._good)
        run.publish()
        if not run.guarded:
            return f"The parameters and buffers are back where they were at step {self._seen}."
        buffers = f", and the buffers are those at step {self._seen}" if moved else ""
        return f"The parameters are those after step {self.steps - run.refused}{buffers}."

    def check(self) -> None:
        """Raise an error if a step failed, or something since the last check is not finite; then all goes back.

        Where a step has several losses, one for each replica, the others continue until all are lost.
        """
        wrong = self._wrong()
        if not wrong:
            self.settle()
            return
        self._run.publish()
        after, back = self._blame(), self._go_back()
        site = self._blame() or after
        where = f" The term of site {site!r} is not finite." if site else ""
        raise DivergedError(f"{wrong}.{where} {back} {REMEDY}") from self._run.failed

    def _wrong(self) -> str:
        """Say what is not finite since the last check; "" if all is."""
        run, losses = self._run, self.losses
        spoiled = self._spoiled() if losses.dim() == 1 else []
        if run.refused:
            gradient = " and its gradient not finite" if losses[-1].isfinite() else ""
            return f"the loss is {losses[-1].item()}{gradient} at step {self.steps}; that step was not taken"
        if run.failed is not None or not run.guarded:
            finite = torch.isfinite(losses[self._seen :])
            bad = (~(finite if finite.dim() == 1 else finite.any(1))).nonzero()
            if len(bad):
                first = self._seen + int(bad[0])
                return f"the loss is {losses[first].flatten()[0].item()} at step {first + 1}"
        if run.failed is not None:
            return f"after step {self.steps} no other can be computed ({str(run.failed).splitlines()[0].rstrip('.')})"
        broken = 0 if run.guarded or losses.dim() > 1 else sum(not all_finite([value]) for value in run.values)
        if broken:  # by the last step, whose loss was before it
            return f"{broken} of {len(run.values)} parameters are not finite after step {self.steps}"
        if spoiled:
            return (
                f"the buffer {spoiled[0]!r} is not finite after step {self.steps}, though the loss is: numbers that it"
                " sums up are too large. Standardise x"
            )
        return ""


_shared: ContextVar[Any] = ContextVar("shared progress bar", default=None)


def sharing_bar(bar: Any) -> contextlib.AbstractContextManager[None]:
    """Within this context trainings count their steps in this bar, and show none of their own."""
    return bound(_shared, bar)


def progress_bar(total: int, shown: bool, done: int = 0) -> contextlib.AbstractContextManager[Any]:
    """Return a bar of ``total`` steps, of which some are done already; it disappears at the end.

    One that others use too counts those steps as done before, and leaving it does not close it. It grows by a training
    that it was not made for, such as that of the second best where the best has diverged.
    """
    bar = _shared.get()
    if bar is None:
        how: Any = {"unit": "step", "smoothing": 0.1, "leave": False}
        own: contextlib.AbstractContextManager[Any] = tqdm(total=total, initial=done, disable=not shown, **how)
        return own
    bar.total = max(bar.total, bar.n + total)
    if done and not bar.disable:
        bar.initial, bar.n, bar.last_print_n = bar.initial + done, bar.n + done, bar.last_print_n + done
    return contextlib.nullcontext(bar)


class _Interruption:
    """Within this context, SIGTERM and Ctrl-C wait until a checkpoint is written.

    Without a keeper, Ctrl-C waits for the end of the step: an exception in the middle of one could leave torch, Pyro or
    the parameters half changed. Either way an interruption leaves the parameters so far in the model and the guide.
    """

    def __init__(self, run: TrainingRun, keeper: Keeper | None, total: int, progress: bool) -> None:
        self._run, self._keeper, self._total, self._progress = run, keeper, total, progress
        self.number = 0  # the signal that was received

    def __enter__(self) -> "_Interruption":
        numbers = [signal.SIGTERM, signal.SIGINT]
        if self._keeper is None:
            ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
            numbers = [signal.SIGINT] if ours else []
            if not self._run.shared:  # processes that share a run stop between the same steps
                self._run.break_off = lambda: bool(self.number)  # a checkpoint is after whole batches
        main = threading.current_thread() is threading.main_thread()
        self._before = {number: signal.signal(number, self._note) for number in numbers if main}
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if kind is not None and issubclass(kind, KeyboardInterrupt | SystemExit):
            self._run.publish()

    def _note(self, number: int, _: object) -> None:
        """Remember the first signal; a second one interrupts immediately."""
        if self.number:
            raise KeyboardInterrupt
        self.number = number

    def leave(self, number: int, done: int) -> None:
        """End the process, after the checkpoint, by a signal that was received; 0 is none."""
        if not number:
            return
        kept = f"stopped after {done} of {self._total} steps; the guide keeps what it has learned."
        if self._keeper is not None:
            step, folder = self._keeper.step, self._keeper.folder
            kept = f"stopped at step {done}; training can resume from step {step} (checkpoints in {folder})."
            if not step:
                kept = f"stopped at step {done}; no checkpoint could be written to {folder}, so nothing is saved."
        if self._progress or (self._keeper is not None and self._keeper.writes):
            print(f"\n{kept}", file=sys.stderr, flush=True)
        if number == signal.SIGINT:
            stop = KeyboardInterrupt()
            stop.add_note(kept)
            raise stop
        raise SystemExit(128 + number)
