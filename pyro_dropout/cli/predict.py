"""``pyro-dropout predict``: predictions of a fitted run for the rows of a table."""

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pyro_dropout.cli import options
from pyro_dropout.cli.options import output_option, refusal
from pyro_dropout.cli.terminal import answer, figure, for_spreadsheet, percent
from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.tables.settings import SAMPLES
from pyro_dropout.training.checkpoints.safe_files import whole_file

if TYPE_CHECKING:
    import pandas

    from pyro_dropout.protocols import Figure
    from pyro_dropout.tables.table import Table
    from pyro_dropout.tabular.fitted import FittedTable

HELP = (
    "Predict the target for each row of a table with a fitted run, and write a CSV file."
    "\n\nColumns for a numeric target: mean, std (noise included), epistemic_std (without noise), and the ends of the"
    " central interval, lower and upper; q=LEVEL of --quantiles, p>NUMBER of --threshold, both"
    " from calibrated intervals if there are, without a guarantee for each side."
    "\n\nColumns for classes: class (the most probable), its probability, entropy and mutual_information in nats, the"
    " probability of each class, p=NAME, and set: the classes that hold the target with the probability --level."
    "\n\nColumns for both: row, first, is the row of the table, or the line of a CSV file. beyond names the inputs"
    " outside their training range, however little, or with a new category or gap. unfamiliar is 1 for rows unlike"
    " the training rows, those with a new category or gap among them, and unfamiliar_in names the inputs that make"
    " them so."
    "\n\nValues must be written as in the training table. Texts that a spreadsheet would run as a formula begin with an"
    " apostrophe."
    + options.examples("predict run new.csv --plot predictions.png", "predict run new.csv --with-inputs --level 0.9")
)

_PICTURED = 2000  # rows that the picture is about, and the chart of what predictions depend on


def predict(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder created by fit.")],
    data: Annotated[
        str, typer.Argument(metavar="DATA", help="A CSV, Parquet or Excel file with the columns of the training table.")
    ],
    out: Annotated[Path, output_option(metavar="FILE", help="Where to write the predictions.")] = Path(
        "predictions.csv"
    ),
    plot: Annotated[
        Path | None,
        output_option(
            metavar="FILE",
            help="Where to save a plot (PNG, PDF, SVG): predictions beside targets or, without targets, which columns"
            " matter.",
        ),
    ] = None,
    with_inputs: Annotated[
        bool, output_option("--with-inputs", help="Also write the columns of the input table.")
    ] = False,
    threshold: Annotated[
        list[str] | None, output_option(metavar="NUMBERS", help="Also write P(target > t) for each: 100,200.")
    ] = None,
    quantiles: Annotated[
        list[str] | None,
        output_option(metavar="LEVELS", help="Also write these quantiles of the target: 0.1,0.5,0.9."),
    ] = None,
    explain: Annotated[
        Path | None,
        output_option(metavar="FILE", help="Where to save a chart of the inputs that matter most (PNG, PDF, SVG)."),
    ] = None,
    samples: Annotated[int, options.number_option(help="Weight draws per prediction.")] = SAMPLES,
    level: Annotated[float, output_option(metavar="P", help="Probability of the interval.")] = 0.95,
    encoding: Annotated[
        str | None, typer.Option(metavar="NAME", help="Encoding of a CSV file that is not Unicode.")
    ] = None,
    separator: Annotated[str | None, typer.Option(metavar="NAME", help="Separator of a CSV file, as for fit.")] = None,
    seed: options.Seed = 0,
    device: options.Device = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Predict the rows of a table with a fitted run."""
    where = options.place(device)
    from pyro_dropout.tables.files import read_file
    from pyro_dropout.tables.table import unlisted
    from pyro_dropout.tabular.fitted import FittedTable
    from pyro_dropout.tabular.run_folder import Run, sha256_of

    run = Run.read(folder)
    path = Path(data)
    limits, levels = options.numbers("--threshold", threshold), options.numbers("--quantiles", quantiles)
    _check_files({"--out": out, "--plot": plot, "--explain": explain}, path, folder)
    fitted = FittedTable.load(folder)
    fitted.model.to(where), fitted.guide.to(where)
    table = read_file(path, encoding=encoding, separator=separator)
    frame = fitted.predict(table, level, levels, limits, samples, seed, progress=not quiet)
    beyond = frame["beyond"][frame["beyond"] != ""].map(unlisted)
    record: dict[str, Any] = {"folder": str(folder), "target": run.encoding.target, "rows": len(frame)}
    record |= {"file": str(out), "level": level, "samples": samples, "classes": list(run.encoding.classes)}
    record |= {"calibrated": fitted.calibration.calibrates(level), "notes": list(frame.attrs["notes"])}
    record |= {"unfamiliar": int(frame["unfamiliar"].sum()) if "unfamiliar" in frame else 0}
    record |= {"beyond": {"rows": len(beyond), "inputs": beyond.explode().value_counts().to_dict()}}
    record |= {"scores": scores} if (scores := _scores(fitted, frame, table)) else {}
    said = [f"{len(frame)} predictions of {run.encoding.target!r}: {os.path.relpath(out)}"]
    said += _told(fitted, frame, record, table.file, sha256_of(path) == run.sha256)
    _write(out, frame, table if with_inputs else None, run.encoding.target_centre)
    few = table.only(range(min(_PICTURED, len(table))))
    some = "" if len(few) == len(table) else f" of the first {len(few):,} rows"
    if plot is not None and len(few) < 2:
        said.append("no picture: it needs at least 2 rows")
    elif plot is not None:
        _save(fitted.plot(few, level, seed), plot)
        record["plot"] = str(plot)
        said.append(f"picture{some}: {os.path.relpath(plot)}")
    if explain is not None and len(few) < 2:
        said.append("no chart of the inputs: it shuffles rows, and needs at least 2")
    elif explain is not None:
        importance = fitted.explain(few, seed=seed)
        _save(importance.plot(), explain)
        record["explained"] = importance.as_json()
        best = ", ".join(importance.names[:3])
        said.append(f"predictions{some} depend most on {best}: {os.path.relpath(explain)}")
    answer(record, as_json, said)


# --- the file ---------------------------------------------------------------------------------------------------------


def _write(path: Path, frame: "pandas.DataFrame", table: "Table | None", centre: float) -> None:
    """Write answers, with texts that are no formulas and the inputs of a table; many digits of a centred target."""
    import pandas

    from pyro_dropout.tables.table import number_text

    frame = frame.reset_index().astype({name: int for name in ("unfamiliar",) if name in frame})
    if table is not None:
        for name in filter(frame.__contains__, table.columns):
            raise PyroDropoutError(
                f"{table.file}: the column {name!r} has the name of one of the predictions; rename it, or omit"
                " --with-inputs."
            )
        cells = {name: each.map(number_text) if each.dtype == float else each for name, each in table.columns.items()}
        inputs = pandas.DataFrame(cells).where(lambda each: each.notna(), "").replace("nan", "")
        frame = pandas.concat([frame[["row"]], inputs, frame.drop(columns="row")], axis=1)
    for name in frame.select_dtypes(["object", "str"]):
        frame[name] = frame[name].map({text: for_spreadsheet(text) for text in frame[name].unique()})
    frame.columns = [for_spreadsheet(name) for name in frame]
    twice = frame.columns[frame.columns.duplicated()]
    if len(twice):
        raise PyroDropoutError(
            f"two columns of the predictions would be called {twice[0]!r}; rename a class or a column."
        )
    with whole_file(path) as beside:
        frame.to_csv(
            beside, float_format="%.15g" if centre else "%.7g", na_rep="nan", index=False, lineterminator="\r\n"
        )


def _save(figure: "Figure", path: Path) -> None:
    """Write a figure, all of it or nothing."""
    with whole_file(path) as beside:
        figure.savefig(beside, dpi=150, format=path.suffix[1:].lower())


def _check_files(given: dict[str, Path | None], data: Path, run: Path) -> None:
    """Raise unless the files of a call can safely be written: checked before the work, not after it."""
    from pyro_dropout.tabular.run_folder import OWN
    from pyro_dropout.training.checkpoints.safe_files import check_name

    seen: dict[Path, str] = {}
    for option, path in given.items():
        if path is None:
            continue
        check_name(path)
        whole = path.resolve()  # of a symbolic link, its target
        reasons = {
            "is a folder; a file is needed": path.is_dir(),
            "is a device or a pipe; a file is needed": path.exists() and not path.is_file(),
            f"cannot be written: there is no folder {str(path.parent)!r}": not whole.parent.is_dir(),
            "cannot be written: its folder is not writable": not os.access(whole.parent, os.W_OK),
            "is the input table and would be overwritten": path.exists() and data.exists() and whole.samefile(data),
            "is a file of the run and would be overwritten": any(
                run.resolve() / name in (whole, *whole.parents) for name in OWN
            ),
            f"is also the {seen.get(whole)} file; use another": whole in seen,
            "must end in .png, .pdf or .svg": option != "--out" and path.suffix.lower() not in (".png", ".pdf", ".svg"),
        }
        for reason in (reason for reason, wrong in reasons.items() if wrong):
            raise refusal(option, f"{str(path)!r} {reason}.")
        seen[whole] = option


# --- what is said of it -----------------------------------------------------------------------------------------------


def _scores(fitted: "FittedTable", frame: "pandas.DataFrame", table: "Table") -> dict[str, Any]:
    """Return the scores on the rows that have a target; {} if none has."""
    import pandas

    from pyro_dropout.tables.table import unlisted

    kept, targets = fitted.encoding.known_targets(table)
    if not kept:
        return {}
    rows, y = frame.iloc[kept], targets.flatten().numpy()  # of a number, less the centre
    if classes := fitted.encoding.classes:
        actual = [classes[k] for k in y]
        found = {"rows": len(kept), "accuracy": float((rows["class"] == actual).mean())}
        probable = [rows[f"p={name}"].iloc[k] for k, name in enumerate(actual)]
        found["log_lik"] = sum(math.log(p) if p > 0 else -math.inf for p in probable) / len(kept)
        if "set" in rows:
            held = [name in unlisted(one) for name, one in zip(actual, rows["set"], strict=True)]
            found["coverage"] = sum(held) / len(kept)
            found["coverage_by_class"] = pandas.Series(held).groupby(actual).mean().to_dict()
        return found
    y = y.astype(float) + fitted.encoding.target_centre
    rmse, inside = math.sqrt(((rows["mean"] - y) ** 2).mean()), (rows["lower"] <= y) & (y <= rows["upper"])
    return {"rows": len(kept), "rmse": rmse, "coverage": float(inside.mean())}


def _told(
    fitted: "FittedTable", frame: "pandas.DataFrame", record: dict[str, Any], file: str, trained: bool
) -> list[str]:
    """Return sentences about the file, the rows and the scores; ``trained``: these are the rows of training."""
    told = [f"{file}: {'; '.join(record['notes'])}"] if record["notes"] else []
    if record["unfamiliar"]:
        told.append(f"rows unlike the training rows (unfamiliar): {record['unfamiliar']}")
    if record["beyond"]["rows"]:
        inputs = [f"{name} ({rows})" for name, rows in record["beyond"]["inputs"].items()]
        most = inputs[:5] + ["..."] * (len(inputs) > 5)
        what = "rows outside the training range, or with a new category or gap"
        told.append(f"{what}: {record['beyond']['rows']}; inputs concerned: {', '.join(most)}")
    if scores := record.get("scores"):
        if record["classes"]:
            good = f"accuracy {percent(scores['accuracy'])}, log-likelihood {figure(scores['log_lik'])} per row"
            if "coverage" in scores:
                good += f", {percent(scores['coverage'])} of them in their {percent(record['level'])} sets"
                least = min(scores["coverage_by_class"].items(), key=lambda item: item[1])
                good += f" ({percent(least[1])} of {least[0]!r}, the least)" * (len(scores["coverage_by_class"]) > 1)
        else:
            inside = f"{percent(scores['coverage'])} of them in their {percent(record['level'])} intervals"
            good = f"rmse {figure(scores['rmse'])}, {inside}"
        rows = "which it was trained on" if trained else "which have the target too"
        told.append(f"On {scores['rows']} rows, {rows}: {good}.")
    held = fitted.calibration.intervals
    if held is not None and not record["calibrated"]:
        what = "there are no sets of classes" if record["classes"] else "intervals are the posterior's own"
        rows = f"{fitted.calibration.rows} held-back rows"
        told.append(f"{what}: {rows} calibrate levels up to {held.highest_level:.4g}.")
    return told
