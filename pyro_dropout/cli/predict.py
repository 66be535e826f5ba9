"""``pyro-dropout predict``: predictions of a fitted run for the rows of a table."""

import csv
import itertools
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pyro_dropout.cli import options
from pyro_dropout.cli.options import output_option, refusal
from pyro_dropout.cli.terminal import answer, figure, for_spreadsheet, percent, plain_warnings
from pyro_dropout.training.checkpoints.atomic_file import whole_file

if TYPE_CHECKING:
    from pyro_dropout.protocols import Figure
    from pyro_dropout.tables.encoding import Encoding
    from pyro_dropout.tables.table import Table
    from pyro_dropout.tabular.fitted import FittedTable

    Cell = str | float | None
    Columns = dict[str, list[Any]]

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

_OUT = Path("predictions.csv")
_PIECE = 2**22  # outputs in memory at once, over rows and draws
_PICTURED = 2000  # rows that the picture is about, and the chart of what predictions depend on


def predict(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder created by fit.")],
    data: Annotated[
        str, typer.Argument(metavar="DATA", help=f"{options.FILES[:-1]}, with the columns of the training table.")
    ],
    out: Annotated[Path, output_option(metavar="FILE", help="Where to write the predictions.")] = _OUT,
    plot: Annotated[
        Path | None, output_option(metavar="FILE", help="Where to save a plot of them (PNG, PDF, SVG).")
    ] = None,
    with_inputs: Annotated[
        bool, output_option("--with-inputs", help="Also write the columns of the input table.")
    ] = False,
    threshold: options.Thresholds = None,
    quantiles: options.Quantiles = None,
    explain: Annotated[
        Path | None,
        output_option(metavar="FILE", help="Where to save a chart of the inputs that matter most (PNG, PDF, SVG)."),
    ] = None,
    samples: options.Samples = options.SAMPLES,
    level: options.Level = 0.95,
    encoding: options.TextEncoding = None,
    separator: options.Separator = None,
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
    for each in levels:
        if not 0 < each < 1:
            raise refusal("--quantiles", f"each must lie strictly between 0 and 1, as in 0.1,0.9; got {each:g}.")
    asked.check(bool(run.encoding.classes))
    _check_files({"--out": out, "--plot": plot, "--explain": explain}, data, folder)
    with plain_warnings():
        fitted = FittedTable.load(folder)
    size = max(1, _PIECE // (samples * max(1, len(run.encoding.classes))))
    how = {"text_encoding": encoding, "separator": separator}
    fitted.model.to(where), fitted.guide.to(where)
    noticed = Noticed(run.encoding)
    with plain_warnings():
        pieces = (
            (noticed.seen(fitted.answers(table, x.to(where), asked), table), table)
            for table, x in read_input_pieces(data, run.encoding, size, **how)
        )
        told = (_with_inputs(columns, table) if with_inputs else columns for columns, table in pieces)
        count = _write(out, told, run.encoding.target_centre, progress=not quiet)
        drawings, importance = [], None
        if explain is not None or plot is not None:
            few = min(_PICTURED, max(2, 4 * size))  # less memory for many classes
            table, x = next(read_input_pieces(data, run.encoding, few, **how))
            some = "" if count <= few else f" of the first {few:,} rows"
            importance = fitted.explained(x.to(where), asked)
            if plot is not None:
                _save(fitted.drawn(table, x, asked, importance), plot)
                drawings.append(f"picture{some}: {os.path.relpath(plot)}")
            if explain is not None:
                _save(importance.plot(run.encoding.target), explain)
                best = ", ".join(importance.names[:3])
                drawings.append(f"predictions{some} depend most on {best}: {os.path.relpath(explain)}")
    record = {"folder": str(folder), "target": run.encoding.target, "rows": count, "file": str(out)}
    record |= {"level": level, "samples": samples, "classes": list(run.encoding.classes)}
    record |= {"calibrated": fitted.calibrates(level), "unfamiliar": noticed.unfamiliar}
    record |= {"notes": noticed.notes, "beyond": {"rows": noticed.rows, "inputs": dict(noticed.inputs)}}
    said = [f"{count} predictions of {run.encoding.target!r}: {os.path.relpath(out)}", *noticed.said(Path(data).name)]
    said += noticed.judged(level, sha256_of(Path(data)) == run.sha256) if noticed.compared else []
    said += _doubts(fitted, level)
    record |= {"scores": noticed.scores()} if noticed.compared else {}
    record |= {"plot": str(plot)} if plot is not None else {}
    record |= {"explained": importance.as_json()} if importance is not None and explain is not None else {}
    answer(record, as_json, [*said, *drawings])


def _doubts(fitted: "FittedTable", level: float) -> list[str]:
    """Return why intervals or sets are not calibrated, if they are not although rows were held back."""
    held = fitted.calibration.intervals
    if held is None or fitted.calibrates(level):
        return []
    what = "there are no sets of classes" if fitted.encoding.classes else "intervals are the posterior's own"
    return [f"{what}: {fitted.calibration.rows} held-back rows calibrate levels up to {held.highest_level:.4g}."]


def _with_inputs(columns: "Columns", table: "Table") -> "Columns":
    """Return answers with the table's columns inserted after the first one, the row."""
    from pyro_dropout.errors import PyroDropoutError
    from pyro_dropout.tables.table import number_text

    for name in table.columns:
        if name in columns:
            raise PyroDropoutError(
                f"{table.file}: the column {name!r} has the name of one of the predictions; rename it, or omit"
                " --with-inputs."
            )
    cells = {
        name: ["" if cell != cell else number_text(cell) if isinstance(cell, float) else cell for cell in each.tolist()]
        for name, each in table.columns.items()
    }
    return {"row": columns["row"]} | cells | columns


def _save(figure: "Figure", path: Path) -> None:
    """Write a figure, all of it or nothing."""
    with whole_file(path) as beside:
        figure.savefig(beside, dpi=150, format=path.suffix[1:].lower())


def _printed(name: str, values: "Sequence[Cell]", centre: float) -> "list[Cell]":
    """Return a column of the file: seven digits of what single precision knows, and texts that are no formulas."""
    from pyro_dropout.tabular.fitted import is_shifted

    start = Decimal(str(centre)) if centre and is_shifted(name) else None
    safe = {text: for_spreadsheet(text) for text in {value for value in values if isinstance(value, str)}}

    def cell(value: "Cell") -> "Cell":
        if isinstance(value, float):
            digits = f"{value:.7g}"
            return digits if start is None else str(start + Decimal(digits))
        return safe[value] if isinstance(value, str) else value

    return [cell(value) for value in values]


def _header(names: "Iterable[str]") -> list[str]:
    from pyro_dropout.errors import PyroDropoutError

    safe = [for_spreadsheet(name) for name in names]
    twice = next((name for name, count in Counter(safe).items() if count > 1), None)
    if twice is not None:
        raise PyroDropoutError(f"two columns of the predictions would be called {twice!r}; rename a class or a column.")
    return safe


def _write(path: Path, pieces: "Iterator[Columns]", centre: float, progress: bool) -> int:
    """Write the pieces one after another and return the number of rows; ``centre`` is added to what is predicted."""
    from tqdm.auto import tqdm

    done, first = 0, next(pieces)  # an invalid table fails before the progress bar appears
    bar = tqdm(disable=not progress, unit="row", unit_scale=True, leave=False, delay=1)
    with whole_file(path) as beside, beside.open("w", newline="", encoding="utf-8") as file, bar:
        writer = csv.writer(file)
        for columns in itertools.chain([first], pieces):
            if not done:
                writer.writerow(_header(columns))
            writer.writerows(zip(*(_printed(name, values, centre) for name, values in columns.items()), strict=True))
            done += len(columns["row"])
            bar.update(len(columns["row"]))
    return done


def _check_files(given: dict[str, Path | None], data: str, run: Path) -> None:
    """Raise unless the files of a call can safely be written: checked before the work, not after it."""
    from pyro_dropout.tabular.run_folder import OWN
    from pyro_dropout.training.checkpoints.regular_file import check_name

    seen: dict[Path, str] = {}
    for option, path in given.items():
        if path is None:
            continue
        check_name(path)
        folder = path.resolve().parent  # for a symbolic link, the folder of its target
        own = {run.resolve() / name for name in OWN} & {path.resolve(), *path.resolve().parents}
        reasons = {
            "is a folder; a file is needed": path.is_dir(),
            "is a device or a pipe; a file is needed": path.exists() and not path.is_file(),
            f"cannot be written: there is no folder {str(path.parent)!r}": not folder.is_dir(),
            f"cannot be written: the folder {str(path.parent)!r} is not writable": not os.access(folder, os.W_OK),
            "is the input table and would be overwritten": path.exists()
            and Path(data).exists()
            and path.samefile(data),
            "is a file of the run and would be overwritten": bool(own),
            f"is also the {seen.get(path.resolve())} file; use another": path.resolve() in seen,
            "must end in .png, .pdf or .svg": option != "--out" and path.suffix.lower() not in (".png", ".pdf", ".svg"),
        }
        for reason, wrong in reasons.items():
            if wrong:
                raise refusal(option, f"{str(path)!r} {reason}.")
        seen[path.resolve()] = option


class Noticed:
    """What is noticed about the table: how its file was read, and the rows that are unlike the training rows."""

    def __init__(self, encoding: "Encoding") -> None:
        self._encoding = encoding
        self.rows = self.unfamiliar = 0
        self.compared, self.squares, self.held = 0, 0.0, 0  # rows with a target, errors, and targets that were foreseen
        self.far: list[int] = []  # rows whose mean is outside its interval
        self.inputs: Counter[str] = Counter()
        self.notes: list[str] = []

    def seen(self, columns: "Columns", table: "Table") -> "Columns":
        """Count more rows, and return their answers."""
        self.notes = list(table.notes)
        beyond = [str(names).split("; ") for names in columns["beyond"] if names]
        self.rows += len(beyond)
        self.inputs.update(itertools.chain.from_iterable(beyond))
        self.unfamiliar += sum(map(bool, columns.get("unfamiliar", [])))
        self._compare(columns, table)
        if "mean" in columns:
            parts = (columns[name] for name in ("row", "mean", "lower", "upper"))
            self.far += [
                row for row, mean, low, high in zip(*parts, strict=True) if not low <= mean <= high or math.isinf(mean)
            ]
        return columns

    def _compare(self, columns: "Columns", table: "Table") -> None:
        """Compare the answers with the targets, where the table has them and they can be read."""
        kept, found = self._encoding.known_targets(table)
        targets = found.flatten().tolist()
        self.compared += len(kept)
        if self._encoding.classes:
            names = [columns["class"][row] for row in kept]
            self.held += sum(self._encoding.classes[k] == name for k, name in zip(targets, names, strict=True))
            return
        means, low, high = ([columns[name][row] for row in kept] for name in ("mean", "lower", "upper"))
        self.squares += sum((mean - y) ** 2 for mean, y in zip(means, targets, strict=True))
        self.held += sum(a <= y <= b for a, y, b in zip(low, targets, high, strict=True))

    def scores(self) -> "dict[str, float]":
        """Return the scores on the rows that have a target."""
        share = self.held / self.compared
        if self._encoding.classes:
            return {"rows": self.compared, "accuracy": share}
        return {"rows": self.compared, "rmse": math.sqrt(self.squares / self.compared), "coverage": share}

    def judged(self, level: float, trained: bool) -> list[str]:
        """Return a sentence about the scores; ``trained`` says that these are the rows of the training table."""
        scores = self.scores()
        good = f"accuracy {percent(scores['accuracy'])}" if "accuracy" in scores else f"rmse {figure(scores['rmse'])}"
        if "coverage" in scores:
            good += f", {percent(scores['coverage'])} of them in their {percent(level)} intervals"
        rows = "which it was trained on" if trained else "which have the target too"
        return [f"On {self.compared} rows, {rows}: {good}."]

    def said(self, file: str) -> list[str]:
        """Return a sentence about the file and one about the rows, if there is anything to say."""
        most = [f"{name} ({rows})" for name, rows in self.inputs.most_common(5)]
        where = ", ".join(most + ["..."] * (len(self.inputs) > len(most)))
        told = [f"{file}: {'; '.join(self.notes)}"] if self.notes else []
        if self.unfamiliar:
            told.append(f"rows unlike the training rows (unfamiliar): {self.unfamiliar}")
        if self.rows:
            what = "rows outside the training range, or with a new category"
            told.append(f"{what}: {self.rows}; inputs concerned: {where}")
        if self.far:
            which = ", ".join(map(str, self.far[:5])) + ", ..." * (len(self.far) > 5)
            told.append(f"the mean is infinite or outside its own interval in row {which}: do not use it there")
        return told
