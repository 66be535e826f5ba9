"""``pyro-dropout predict``: predictions of a fitted run for the rows of a table."""

import itertools
import math
import os
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pyro_dropout.cli import options
from pyro_dropout.cli.options import output_option, refusal
from pyro_dropout.cli.terminal import answer, figure, for_spreadsheet, percent, plain_warnings
from pyro_dropout.training.checkpoints.atomic_file import whole_file

if TYPE_CHECKING:
    import pandas

    from pyro_dropout.protocols import Figure
    from pyro_dropout.tables.table import Table
    from pyro_dropout.tabular.fitted import FittedTable

HELP = (
    "Predict the target for each row of a table with a fitted run, and write a CSV file."
    "\n\nColumns for a numeric target: mean, std (noise included), epistemic_std (without noise), and the ends of the"
    " central interval, lower and upper; q=LEVEL of --quantiles, p>NUMBER of --threshold."
    "\n\nColumns for classes: class (the most probable), its probability, entropy and mutual_information in nats, the"
    " probability of each class, p=NAME, and set: the classes that hold the target with the probability --level."
    "\n\nColumns for both: row, first, is the row of the table, or the line of a CSV file. beyond names the inputs"
    " outside their training range. unfamiliar is 1 for rows unlike the training rows, and unfamiliar_in names the"
    " inputs that make them so."
    "\n\nValues must be written as in the training table. Texts that a spreadsheet would run as a formula begin with an"
    " apostrophe."
    + options.examples("predict run new.csv --plot predictions.png", "predict run new.csv --with-inputs --level 0.9")
)

_PIECE = 2**22  # outputs in memory at once, over rows and draws
_PICTURED = 2000  # rows that the picture is about, and the chart of what predictions depend on


def predict(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder created by fit.")],
    data: Annotated[
        str, typer.Argument(metavar="DATA", help=f"{options.FILES[:-1]}, with the columns of the training table.")
    ],
    out: Annotated[Path, output_option(metavar="FILE", help="Where to write the predictions.")] = Path(
        "predictions.csv"
    ),
    plot: Annotated[
        Path | None, output_option(metavar="FILE", help="Where to save a plot of them (PNG, PDF, SVG).")
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
    samples: options.Samples = 500,
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
    from pyro_dropout.tables.files import arrived
    from pyro_dropout.tables.reading import read_input_pieces
    from pyro_dropout.tabular.fitted import FittedTable, Question
    from pyro_dropout.tabular.run_folder import Run, sha256_of

    run = Run.read(folder)
    data = str(arrived(data))
    limits, levels = options.numbers("--threshold", threshold), options.numbers("--quantiles", quantiles)
    asked = Question(level, levels, limits, samples, seed)
    asked.check(bool(run.encoding.classes))
    _check_files({"--out": out, "--plot": plot, "--explain": explain}, data, folder)
    how = {"text_encoding": encoding, "separator": separator}
    size = max(1, _PIECE // (samples * max(1, len(run.encoding.classes))))
    with plain_warnings():
        fitted = FittedTable.load(folder)
        fitted.model.to(where), fitted.guide.to(where)
        noticed, drawings, importance = _Noticed(fitted, level), [], None
        tables = read_input_pieces(data, run.encoding, size, **how)
        pieces = ((noticed.seen(fitted.answers(table, x, asked), table), table) for table, x in tables)
        _write(out, (_printed(frame, table if with_inputs else None, run) for frame, table in pieces), not quiet)
        count = noticed.rows
        if explain is not None or plot is not None:
            few = min(_PICTURED, max(2, 4 * size))  # less memory for many classes
            some = "" if count <= few else f" of the first {few:,} rows"
            table, _ = next(read_input_pieces(data, run.encoding, few, **how))
            if plot is not None:
                _save(fitted.plot(table, level, seed), plot)
                drawings.append(f"picture{some}: {os.path.relpath(plot)}")
            if explain is not None:
                importance = fitted.explain(table, seed=seed)
                _save(importance.plot(), explain)
                best = ", ".join(importance.names[:3])
                drawings.append(f"predictions{some} depend most on {best}: {os.path.relpath(explain)}")
    record = {"folder": str(folder), "target": run.encoding.target, "rows": count, "file": str(out)}
    record |= {"level": level, "samples": samples, "classes": list(run.encoding.classes)}
    record |= {"calibrated": fitted.calibrates(level), "unfamiliar": noticed.unfamiliar}
    record |= {"notes": noticed.notes, "beyond": {"rows": noticed.beyond, "inputs": dict(noticed.inputs)}}
    record |= {"scores": noticed.scores()} if noticed.compared else {}
    record |= {"plot": str(plot)} if plot is not None else {}
    record |= {"explained": importance.as_json()} if importance is not None else {}
    said = f"{count} predictions of {run.encoding.target!r}: {os.path.relpath(out)}"
    trained = sha256_of(Path(data)) == run.sha256
    answer(record, as_json, [said, *noticed.said(Path(data).name, trained), *drawings])


# --- the file ---------------------------------------------------------------------------------------------------------


def _printed(frame: "pandas.DataFrame", table: "Table | None", run: Any) -> "pandas.DataFrame":
    """Return answers as the file has them: the target's centre added, texts that are no formulas, inputs if asked."""
    import pandas

    from pyro_dropout.errors import PyroDropoutError
    from pyro_dropout.tables.table import number_text
    from pyro_dropout.tabular.fitted import is_shifted

    centre = Decimal(str(run.encoding.target_centre))
    for name in filter(is_shifted, frame if centre else ()):  # seven digits of what single precision knows
        frame[name] = [str(centre + Decimal(f"{value:.7g}")) for value in frame[name]]
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
    return frame


def _write(path: Path, pieces: "Iterator[pandas.DataFrame]", progress: bool) -> None:
    """Write the pieces one after another."""
    from tqdm.auto import tqdm

    first = next(pieces)  # an invalid table fails before the progress bar appears
    bar = tqdm(disable=not progress, unit="row", unit_scale=True, leave=False, delay=1)
    with whole_file(path) as beside, beside.open("w", newline="", encoding="utf-8") as file, bar:
        for frame in itertools.chain([first], pieces):
            how: Any = {"header": frame is first, "index": False, "lineterminator": "\r\n"}
            frame.to_csv(file, float_format="%.7g", na_rep="nan", **how)
            bar.update(len(frame))


def _save(figure: "Figure", path: Path) -> None:
    """Write a figure, all of it or nothing."""
    with whole_file(path) as beside:
        figure.savefig(beside, dpi=150, format=path.suffix[1:].lower())


def _check_files(given: dict[str, Path | None], data: str, run: Path) -> None:
    """Raise unless the files of a call can safely be written: checked before the work, not after it."""
    from pyro_dropout.tabular.run_folder import OWN
    from pyro_dropout.training.checkpoints.regular_file import check_name

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
            "is the input table and would be overwritten": path.exists()
            and Path(data).exists()
            and whole.samefile(data),
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


class _Noticed:
    """What is noticed about the table: how its file was read, and the rows that are unlike the training rows."""

    def __init__(self, fitted: "FittedTable", level: float) -> None:
        self.fitted, self.level = fitted, level
        self.rows = self.unfamiliar = self.beyond = 0
        self.compared, self.squares, self.held = 0, 0.0, 0  # rows with a target, errors, and targets that were foreseen
        self.far: list[int] = []  # rows whose mean is outside its interval
        self.inputs: Counter[str] = Counter()
        self.notes: list[str] = []

    def seen(self, frame: "pandas.DataFrame", table: "Table") -> "pandas.DataFrame":
        """Count more rows, and return their answers."""
        encoding, named = self.fitted.encoding, frame["beyond"][frame["beyond"] != ""]
        self.notes, self.rows, self.beyond = list(table.notes), self.rows + len(frame), self.beyond + len(named)
        self.inputs.update(itertools.chain.from_iterable(each.split("; ") for each in named))
        self.unfamiliar += int(frame["unfamiliar"].sum()) if "unfamiliar" in frame else 0
        kept, targets = encoding.known_targets(table)
        rows, y = frame.iloc[kept], targets.flatten().numpy()
        self.compared += len(kept)
        if encoding.classes:
            self.held += sum(encoding.classes[k] == name for k, name in zip(y, rows["class"], strict=True))
            return frame
        self.squares += float(((rows["mean"] - y) ** 2).sum())
        self.held += int(((rows["lower"] <= y) & (y <= rows["upper"])).sum())
        wrong = ~frame["mean"].between(frame["lower"], frame["upper"]) | frame["mean"].abs().eq(math.inf)
        self.far += frame["row"][wrong].tolist()
        return frame

    def scores(self) -> dict[str, float]:
        """Return the scores on the rows that have a target."""
        share = self.held / self.compared
        if self.fitted.encoding.classes:
            return {"rows": self.compared, "accuracy": share}
        return {"rows": self.compared, "rmse": math.sqrt(self.squares / self.compared), "coverage": share}

    def said(self, file: str, trained: bool) -> list[str]:
        """Return sentences about the file, the rows and the scores; ``trained``: these are the rows of training."""
        told = [f"{file}: {'; '.join(self.notes)}"] if self.notes else []
        if self.unfamiliar:
            told.append(f"rows unlike the training rows (unfamiliar): {self.unfamiliar}")
        if self.beyond:
            most = [f"{name} ({rows})" for name, rows in self.inputs.most_common(5)]
            where = ", ".join(most + ["..."] * (len(self.inputs) > len(most)))
            what = "rows outside the training range, or with a new category"
            told.append(f"{what}: {self.beyond}; inputs concerned: {where}")
        if self.far:
            which = ", ".join(map(str, self.far[:5])) + ", ..." * (len(self.far) > 5)
            told.append(f"the mean is infinite or outside its own interval in row {which}: do not use it there")
        if self.compared:
            scores, level = self.scores(), percent(self.level)
            good = f"accuracy {percent(scores['accuracy'])}" if "accuracy" in scores else ""
            if not good:
                inside = f"{percent(scores['coverage'])} of them in their {level} intervals"
                good = f"rmse {figure(scores['rmse'])}, {inside}"
            rows = "which it was trained on" if trained else "which have the target too"
            told.append(f"On {self.compared} rows, {rows}: {good}.")
        held = self.fitted.calibration.intervals
        if held is not None and not self.fitted.calibrates(self.level):
            classes = self.fitted.encoding.classes
            what = "there are no sets of classes" if classes else "intervals are the posterior's own"
            rows = f"{self.fitted.calibration.rows} held-back rows"
            told.append(f"{what}: {rows} calibrate levels up to {held.highest_level:.4g}.")
        return told
