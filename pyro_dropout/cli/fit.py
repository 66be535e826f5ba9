"""``pyro-dropout fit`` and ``resume``: train one guide on a table and save the run in a folder."""

import contextlib
import os
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pyro_dropout.cli import options
from pyro_dropout.cli.terminal import PROGRAM, answer, complain, plain_warnings
from pyro_dropout.registry import DEFAULT_GUIDE

if TYPE_CHECKING:
    import torch

    from pyro_dropout.cli.run_folder import Run
    from pyro_dropout.protocols import PyroModel
    from pyro_dropout.tables.dataset import Dataset

FIT_HELP = (
    "Fit one guide to a table and save the run in a folder."
    f"\n\nDATA is a CSV or Parquet file with named columns. {options.TABLES}"
    "\n\nCheckpoints are written into the folder during training;"
    f" after an interruption, continue with [bold]{PROGRAM} resume[/]."
    "\n\nFor distributed training, launch with torchrun; rank 0 writes the results:"
    "\n\n\b\n  torchrun --nproc-per-node 2 -m pyro_dropout fit houses.csv --target price --out run"
    + options.examples(
        "fit houses.csv --target price --out run",
        "fit iris.parquet --target species --guide mean-field --held-back 0.2 --out iris-run",
    )
)
RESUME_HELP = (
    "Continue an interrupted run as if it had never stopped, or train a finished run for longer."
    "\n\nThe data file must not have changed since the run started."
    + options.examples("resume run", "resume run --steps 10000", "resume run --data moved/houses.csv")
)

_WHY = (
    "The default guide: several networks with dropout predicted better than one on 7 of 9 test tables, and worse on"
    " none. --guide dropout trains one, in half the time."
)


def fit(
    data: Annotated[str, typer.Argument(metavar="DATA", help="A CSV or Parquet file.")],
    out: Annotated[Path, options.output_option(metavar="FOLDER", help="New folder for the run.")],
    target: options.Target = None,
    task: options.TaskName = "auto",
    missing: options.MissingName = "refuse",
    categorical: options.Categorical = None,
    drop: options.Drop = None,
    decimal: options.DecimalMark = None,
    encoding: options.TextEncoding = None,
    separator: options.Separator = None,
    held_back: options.HeldBack = 0.0,
    guide: options.Guide = DEFAULT_GUIDE,
    members: options.Members = None,
    width: options.Width = 50,
    steps: options.Steps = 2000,
    lr: options.LearningRate = 0.01,
    batch_size: options.BatchSize = None,
    seed: options.Seed = 0,
    device: options.Device = None,
    checkpoint_every: options.Every = None,
    no_compile: options.NoCompile = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Fit one guide to a table and save the run in a folder."""
    guide = options.checked_guide("--guide", guide)
    members = options.checked_members([guide], members)
    where = options.place(device)
    from pyro_dropout.cli.run_folder import Reading, Run, Training
    from pyro_dropout.datasets.bundled import BUNDLED
    from pyro_dropout.training.distributed.torchrun import rank_here

    if data in BUNDLED and not Path(data).exists():
        raise options.refusal("DATA", f"{data!r} is for compare only; fit takes a CSV or Parquet file.")
    columns = tuple(options.listed(categorical)), tuple(options.listed(drop))
    reading = Reading(target, task, missing, *columns, held_back, seed, decimal, encoding, separator)
    training = Training(steps, lr, batch_size, seed, False if no_compile else "auto")
    with _claimed(out, make=True):
        again = _check_new(out)
        run, table = Run.plan(data, reading, guide, width, training, members)
        if again and Run.read(out).identity != run.identity:
            raise _taken(out)
        with _resumable(out), _cleared(out):
            if rank_here() == 0:
                run.write(out)
            _train(run, table, out, where, checkpoint_every, as_json, quiet)


def resume(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder created by fit.")],
    data: Annotated[Path | None, typer.Option(metavar="FILE", help="The data file, if it has moved.")] = None,
    steps: Annotated[
        int | None,
        typer.Option(metavar="N", callback=options.count, help="New total number of steps; at least the old one."),
    ] = None,
    device: options.Device = None,
    checkpoint_every: options.Every = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Continue an interrupted run, or train a finished run for longer."""
    from pyro_dropout.cli.run_folder import Run

    where = options.place(device)
    if not folder.is_dir():
        Run.read(folder)  # says so
    with _claimed(folder):
        run = Run.read(folder)
        with heard():
            run.check_checkpoints(folder)
        if steps is not None and steps < run.training.steps:
            raise options.refusal("--steps", f"the run was planned for {run.training.steps} steps; {steps} is fewer.")
        table = run.data(data)
        if data is not None or steps is not None:
            run = run.changed(folder, data, steps)  # before training, so that the next resume uses the new settings
        with _resumable(folder):
            _train(run, table, folder, where, checkpoint_every, as_json, quiet)


def _train(
    run: "Run", data: "Dataset", folder: Path, device: "torch.device", every: int | None, as_json: bool, quiet: bool
) -> None:
    """Train from the last checkpoint or from the start, write the posterior and print the result."""
    from pyro_dropout.cli.run_folder import CHECKPOINTS
    from pyro_dropout.mathematics.errors import PyroDropoutError
    from pyro_dropout.training.checkpoints.training_checkpoint import Checkpoint
    from pyro_dropout.training.distributed.torchrun import rank_here, started_together
    from pyro_dropout.training.fit import fit as train

    model, guide = run.build(data)
    where = Checkpoint(folder / CHECKPOINTS, every=every, run=run.identity)
    how = asdict(run.training) | {"device": device, "distributed": started_together()}
    with heard():
        history = train(model, guide, *data.train, **how, checkpoint=where, progress=not quiet)
        if rank_here():
            return  # rank 0 saves and reports for all ranks
        scores = _scores(model, guide, data, run.training.seed)
    loss = float(history.losses[-1])
    record = {"steps": history.steps, "last_loss": loss, "scores": scores}
    try:
        run.save(folder, model, guide, record)
    except PyroDropoutError as cause:
        advice = f"to continue from the last checkpoint: {PROGRAM} resume {folder}"
        raise PyroDropoutError(f"{str(cause).rstrip('.')}; {advice}") from None
    shown = os.path.relpath(folder)
    ended = f"loss {loss:.4g} at the last step (not comparable between guides)"
    lines = [data.note, f"{run.guide}: {history.steps} steps, {ended}."]
    lines += [_WHY] if run.guide == DEFAULT_GUIDE else []
    if scores:
        lines.append(_told(scores, len(data.test[0])))
    lines.append(f"To predict: {PROGRAM} predict {shown} NEW.csv --out predictions.csv --plot predictions.png")
    named = {"folder": str(folder), "about": data.note, "guide": run.guide}
    answer({**named, **record, "seconds": round(history.seconds, 2)}, as_json, lines)


def _scores(model: "PyroModel", guide: object, data: "Dataset", seed: int) -> dict[str, float]:
    """Return the scores on the held-back rows; empty if there are none."""
    from pyro_dropout.judging.scores.calibration import coverage
    from pyro_dropout.judging.scores.errors import accuracy, rmse
    from pyro_dropout.prediction.predict import predict as ask

    x, y = data.test
    if not len(x):
        return {}
    found = ask(model, guide, x, samples=500, shared=True, seed=seed, keep_samples=True)
    y = y.to(found.mean.device)
    scores = {"log_lik": float(found.log_prob(y).mean())}
    if data.classes:
        commonest = data.train[1].mode().values.to(y)
        plainly = float((y == commonest).double().mean())
        return {**scores, "accuracy": accuracy(found, y), "accuracy_of_commonest": plainly}
    plainly = float((data.train[1].mean().to(y) - y).double().square().mean().sqrt())
    return {**scores, "rmse": rmse(found, y), "rmse_of_mean": plainly, "coverage_95": coverage(found, y, 0.95)}


def _told(scores: dict[str, float], rows: int) -> str:
    """Return the scores as a sentence, each next to that of a constant prediction."""
    from pyro_dropout.comparison.scores import off_level

    start = f"On {rows} held-back rows: log-likelihood {scores['log_lik']:.4g} per row, "
    if "accuracy" in scores:
        plainly = f"{scores['accuracy_of_commonest']:.0%} for always predicting the most common class"
        return f"{start}accuracy {scores['accuracy']:.0%} ({plainly})."
    plainly = f"{scores['rmse_of_mean']:.4g} for always predicting the mean"
    held = scores["coverage_95"]
    wrong = off_level(held, rows)
    verdict = f": they are too {wrong}; try other guides with {PROGRAM} compare" if wrong else ""
    return f"{start}rmse {scores['rmse']:.4g} ({plainly}); 95 % intervals contain {held:.0%} of them{verdict}."


def heard() -> AbstractContextManager[object]:
    """Print warnings as lines on stderr within this context; ranks other than 0 print none."""
    from pyro_dropout.training.distributed.torchrun import rank_here

    return warnings.catch_warnings(action="ignore") if rank_here() else plain_warnings()


@contextlib.contextmanager
def _resumable(folder: Path) -> Iterator[None]:
    """Say how to continue if training is interrupted, or ended by a signal after its checkpoint; rank 0 says it."""
    from pyro_dropout.training.distributed.torchrun import rank_here

    advice = f"to continue: {PROGRAM} resume {folder}"
    try:
        yield
    except KeyboardInterrupt:
        raise (typer.Exit(130) if rank_here() else KeyboardInterrupt(f"; {advice}")) from None
    except SystemExit:
        if rank_here() == 0:
            complain(advice)
        raise


# --- where things go --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _claimed(folder: Path, make: bool = False) -> Iterator[None]:
    """Hold a folder exclusively, and remove what a killed process left half-written; rank 0 does so for all ranks."""
    from pyro_dropout.cli.run_folder import POSTERIOR, RECORD
    from pyro_dropout.training.checkpoints.atomic_file import clear_unfinished
    from pyro_dropout.training.checkpoints.folder_claim import claimed
    from pyro_dropout.training.distributed.torchrun import rank_here

    if rank_here():
        yield
        return
    with contextlib.ExitStack() as held:
        with heard():
            held.enter_context(claimed(folder, make=make))
        clear_unfinished(folder, RECORD)
        clear_unfinished(folder, POSTERIOR)
        yield


def _check_new(folder: Path) -> bool:
    """Raise unless a folder for a run is new or empty; return whether torchrun has restarted a run in it."""
    from pyro_dropout.cli.run_folder import RECORD
    from pyro_dropout.training.checkpoints.folder_claim import LOCK
    from pyro_dropout.training.distributed.torchrun import rank_here, restarted

    if rank_here():
        return False
    if os.path.lexists(folder / RECORD):
        if restarted():
            return True
        raise _taken(folder)
    if any(each.name != LOCK for each in folder.iterdir()):
        raise options.refusal("--out", f"{str(folder)!r} is not empty; use a new folder.")
    return False


def _taken(folder: Path) -> typer.BadParameter:
    advice = f"continue it ({PROGRAM} resume {folder}) or use another folder"
    return options.refusal("--out", f"{str(folder)!r} already holds a run; {advice}.")


@contextlib.contextmanager
def _cleared(folder: Path) -> Iterator[None]:
    """If training diverges before its first checkpoint, remove what the run wrote: it would block the next attempt."""
    from pyro_dropout.cli.run_folder import CHECKPOINTS, RECORD, checkpoints_in
    from pyro_dropout.training.distributed.torchrun import rank_here
    from pyro_dropout.training.history import DivergedError

    try:
        yield
    except DivergedError as cause:
        if rank_here():
            raise
        if checkpoints_in(folder):
            kept = f"The last good checkpoint is kept in {folder}; to try again, use another --out."
            raise DivergedError(f"{cause} {kept}") from None
        (folder / RECORD).unlink(missing_ok=True)
        where = folder / CHECKPOINTS
        for each in (*where.glob("group-*"), where):  # those of an ensemble's groups
            with contextlib.suppress(OSError):  # not empty: what is in it is not ours
                each.rmdir()
        raise
