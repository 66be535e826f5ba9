"""``pyro-dropout fit`` and ``resume``: train one guide on a table and save the run in a folder."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pyro_dropout.cli import options
from pyro_dropout.cli.terminal import PROGRAM, answer, complain, figure, percent

if TYPE_CHECKING:
    import torch

    from pyro_dropout.tables.encoding import Dataset
    from pyro_dropout.tabular.run_folder import Run

FIT_HELP = (
    "Fit a posterior to a table and save the run in a folder."
    f"\n\nDATA is a CSV, Parquet or Excel file with named columns. {options.TABLES}"
    "\n\nA fifth of the rows is held back. On them the guide, the scale of the target and the noise are chosen, the"
    " intervals are calibrated, and the scores are computed. All of that is printed."
    "\n\nCheckpoints are written into the folder during training;"
    f" after an interruption, continue with [bold]{PROGRAM} resume[/]."
    + options.examples(
        "fit houses.csv --target price --out run",
        "fit iris.parquet --target species --guide mean-field --out iris-run",
    )
)
RESUME_HELP = (
    "Continue an interrupted run as if it had never stopped."
    "\n\nThe data file must not have changed since the run started."
    + options.examples("resume run", "resume run --data moved/houses.csv")
)


@options.with_settings()
def fit(
    data: Annotated[str, typer.Argument(metavar="DATA", help="A CSV, Parquet or Excel file.")],
    out: Annotated[Path, options.output_option(metavar="FOLDER", help="New or empty folder for the run.")],
    settings: dict[str, Any],
    device: options.Device = None,
    checkpoint_every: options.Every = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Fit one guide to a table and save the run in a folder."""
    from pyro_dropout.tables.settings import settings_of

    reading, wanted, training = settings_of(settings)
    where = options.place(device)
    from pyro_dropout.datasets.bundled import BUNDLED
    from pyro_dropout.tables.reading import read
    from pyro_dropout.tabular.fit_table import plan_table
    from pyro_dropout.tabular.run_folder import sha256_of

    if data in BUNDLED and not Path(data).exists():
        raise options.refusal("DATA", f"{data!r} is for compare only; fit takes a CSV, Parquet or Excel file.")
    path = Path(data)
    with _claimed(out, make=True):
        _check_new(out)
        table = read(path, reading)
        facts = table, str(path.resolve()), sha256_of(path), reading, training, wanted
        with _choosing(out) as before:
            run, _ = plan_table(*facts, device=where, progress=not quiet, checkpoint=before)
        run.write(out)
        _train(run, table, out, where, checkpoint_every, as_json, quiet)


def resume(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder created by fit.")],
    data: Annotated[Path | None, typer.Option(metavar="FILE", help="The data file, if it has moved.")] = None,
    device: options.Device = None,
    checkpoint_every: options.Every = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Continue an interrupted run."""
    from pyro_dropout.tabular.run_folder import Run

    where = options.place(device)
    if not folder.is_dir():
        Run.read(folder)  # says so
    with _claimed(folder):
        run = Run.read(folder)
        run.check_checkpoints(folder)
        table = run.data(data)
        if data is not None:  # before training, so that the next resume knows it
            run = replace(run, file=str(data.resolve()))
            run.write(folder)
        _train(run, table, folder, where, checkpoint_every, as_json, quiet)


def _train(
    run: "Run",
    data: "Dataset",
    folder: Path,
    device: "torch.device",
    every: int | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Train from the last checkpoint or from the start, write the posterior and print the result."""
    from pyro_dropout.errors import PyroDropoutError
    from pyro_dropout.tabular.fit_table import train_run
    from pyro_dropout.tabular.run_folder import CHECKPOINTS, checkpoints_in
    from pyro_dropout.training.checkpoints.training_checkpoint import Checkpoint

    advice = f"to continue: {PROGRAM} resume {folder}"
    how: Any = {"device": device, "progress": not quiet}
    how["checkpoint"] = Checkpoint(folder / CHECKPOINTS, every=every, run=run.identity)
    with _advised(lambda: advice):
        fitted, history = train_run(run, data, **how)
    scores, loss = fitted.scores, float(history.losses[-1])
    record = {"steps": history.steps, "last_loss": loss, "scores": scores}
    try:
        fitted.write(folder, record)
    except PyroDropoutError as cause:
        what = "continue from the last checkpoint" if checkpoints_in(folder) else "train again (there is no checkpoint)"
        raise PyroDropoutError(f"{str(cause).rstrip('.')}; {advice.replace('continue', what)}") from None
    shown = os.path.relpath(folder)
    ended = f"loss {loss:.4g} at the last step (not comparable between guides)"
    lines = [data.note, *([fitted.said] if fitted.said else []), f"{run.recipe.guide}: {history.steps} steps, {ended}."]
    lines += _told(scores, len(data.test[0])) if scores else []
    lines.append(f"To predict: {PROGRAM} predict {shown} NEW.csv --out predictions.csv --plot predictions.png")
    named = {"folder": str(folder), "about": data.note, "guide": run.recipe.guide, "chosen": fitted.said}
    answer({**named, **record, "seconds": round(history.seconds, 2)}, as_json, lines)


def _told(scores: dict[str, float], rows: int) -> list[str]:
    """Return the scores as sentences: each next to that of a constant prediction, and what calibration has changed."""
    from pyro_dropout.comparison.exams import off_level

    start = f"On {rows} held-back rows, without training on them: log-likelihood {figure(scores['log_lik'])} per row, "
    if "accuracy" in scores:
        plainly = f"{percent(scores['accuracy_of_commonest'])} for always predicting the most common class"
        told = [f"{start}accuracy {percent(scores['accuracy'])} ({plainly})."]
        if "set_coverage_95" in scores:
            size = f"{scores['set_size_95']:.2f} classes on average"
            told.append(f"Sets of classes are calibrated on these rows: 95 % sets hold {size}.")
        return told
    told = [f"{start}rmse {figure(scores['rmse'])} ({figure(scores['rmse_of_mean'])} for always predicting the mean)."]
    held = scores["coverage_95"]
    before = f"the posterior's own 95 % intervals contain {percent(held)} of them"
    if "calibrated_coverage_95" in scores:
        after = f"calibrated ones {percent(scores['calibrated_coverage_95'])}"
        pair = [figure(scores[name]) for name in ("interval_score_95", "calibrated_interval_score_95")]
        return [*told, f"Intervals: {before}, {after}; interval scores {pair[0]} and {pair[1]} (lower is better)."]
    wrong = off_level(held, rows)
    verdict = f": they are too {wrong}" if wrong else ""
    return [*told, f"Intervals are not calibrated: {before}{verdict}."]


@contextlib.contextmanager
def _advised(advice: Callable[[], str]) -> Iterator[None]:
    """Say how to continue if a signal ends a training."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"; {advice()}") from None
    except SystemExit as stop:
        complain(f"stopped; {advice()}")
        raise SystemExit(stop.code) from None


@contextlib.contextmanager
def _choosing(folder: Path) -> Iterator[Path]:
    """Yield where the trainings are kept that choose what to train; only an interruption leaves them there."""
    from pyro_dropout.tabular.run_folder import CHOOSING

    where, kept = folder / CHOOSING, False

    def advice() -> str:
        nonlocal kept
        kept = any(where.rglob("step-*.safetensors"))
        told = f"the trainings that choose what to train are kept in {where}. To continue, give the same command again."
        return told if kept else "nothing was written. The same command starts again."

    try:
        with _advised(advice):
            yield where
    finally:
        if not kept:
            shutil.rmtree(where, ignore_errors=True)


# --- where things go --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _claimed(folder: Path, make: bool = False) -> Iterator[None]:
    """Hold a folder exclusively, and remove what a killed process left half-written."""
    from pyro_dropout.tabular.run_folder import POSTERIOR, RECORD
    from pyro_dropout.training.checkpoints.safe_files import claimed, clear_unfinished

    with claimed(folder, make=make):
        clear_unfinished(folder, RECORD)
        clear_unfinished(folder, POSTERIOR)
        yield


def _check_new(folder: Path) -> None:
    """Raise if a folder holds a run that has come further than its record, or other things."""
    from pyro_dropout.tabular.run_folder import CHECKPOINTS, OWN, POSTERIOR
    from pyro_dropout.training.checkpoints.safe_files import LOCK, check_no_links

    check_no_links(folder, *OWN)
    if (folder / POSTERIOR).exists() or any((folder / CHECKPOINTS).rglob("*.*")):
        advice = f"continue it ({PROGRAM} resume {folder}) or use another folder"
        raise options.refusal("--out", f"{str(folder)!r} already holds a run; {advice}.")
    if any(each.name not in (LOCK, *OWN) for each in folder.iterdir()):
        raise options.refusal("--out", f"{str(folder)!r} is not empty; use a new folder.")
