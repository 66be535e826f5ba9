"""``pyro-dropout fit`` and ``resume``: train one guide on a table and save the run in a folder."""

import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pyro_dropout.cli import options
from pyro_dropout.cli.terminal import PROGRAM, answer, complain, figure, percent

if TYPE_CHECKING:
    from pyro_dropout.protocols import Record
    from pyro_dropout.tabular.fitted import FittedTable

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
_OF, _SELDOM = "set_coverage_95 of ", 0.8  # of a class; below which it is named
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

    settings_of(settings)  # complains before torch is loaded
    how: Any = {"device": options.place(device), "every": checkpoint_every, "progress": not quiet}
    from pyro_dropout.datasets.bundled import BUNDLED
    from pyro_dropout.tabular.fit_table import fit_table

    if data in BUNDLED and not Path(data).exists():
        raise options.refusal("DATA", f"{data!r} is for compare only; fit takes a CSV, Parquet or Excel file.")
    _print(lambda: fit_table(data, folder=out, **how, **settings), out, as_json)


def resume(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder created by fit.")],
    data: Annotated[Path | None, typer.Option(metavar="FILE", help="The data file, if it has moved.")] = None,
    device: options.Device = None,
    checkpoint_every: options.Every = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Continue an interrupted run."""
    how: Any = {"device": options.place(device), "every": checkpoint_every, "progress": not quiet}
    from pyro_dropout.tabular import fit_table

    _print(lambda: fit_table.resume(folder, data, **how), folder, as_json)


def _print(train: Callable[[], "FittedTable"], folder: Path, as_json: bool) -> None:
    """Train, and print what the held-back rows say of it; say how to continue if a signal ends the training."""
    try:
        fitted = train()
    except (KeyboardInterrupt, SystemExit) as stop:
        from pyro_dropout.tabular.run_folder import CHOOSING, RECORD, resuming

        advice = "nothing was written. The same command starts again."
        if (folder / RECORD).exists():
            advice = f"to continue: {resuming(folder)}"
        elif (folder / CHOOSING).is_dir():
            kept = f"the trainings that choose what to train are kept in {folder / CHOOSING}"
            advice = f"{kept}. To continue, give the same command again."
        if isinstance(stop, KeyboardInterrupt):
            raise KeyboardInterrupt(f"; {advice}") from None
        complain(f"stopped; {advice}")
        raise SystemExit(stop.code) from None
    data, history, guide, scores = fitted.data, fitted.history, fitted.run.recipe.guide, fitted.scores
    assert data is not None
    assert history is not None
    shown, loss = shlex.quote(os.path.relpath(folder)), float(history.losses[-1])
    ended = f"loss {loss:.4g} at the last step (not comparable between guides)"
    lines = [data.note, *([fitted.said] if fitted.said else []), f"{guide}: {history.steps} steps, {ended}."]
    lines += _told(scores, len(data.test[0])) if scores else []
    lines.append(f"To predict: {PROGRAM} predict {shown} NEW.csv --out predictions.csv --plot predictions.png")
    record: Record = {"folder": str(folder), "about": data.note, "guide": guide, "chosen": fitted.said}
    record |= {"steps": history.steps, "last_loss": loss, "scores": scores, "seconds": round(history.seconds, 2)}
    answer(record, as_json, lines)


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
            of = {name.removeprefix(_OF): share for name, share in scores.items() if name.startswith(_OF)}
            rare = [f"{name!r} ({percent(share)})" for name, share in of.items() if share < _SELDOM]
            on_average = "95 % is a promise on average over all rows"
            told += [f"They often leave out the true class of rows of {', '.join(rare)}: {on_average}."] * bool(rare)
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
