"""``pyro-dropout predict``: what a fitted run says of the rows of a table."""

import csv
import itertools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pyro_dropout.faces import cli_options as options
from pyro_dropout.faces.cli_runs import heard
from pyro_dropout.faces.terminal import answer
from pyro_dropout.inference.whole_file import whole_file

if TYPE_CHECKING:
    from torch import Tensor

    from pyro_dropout.faces.runs_on_disk import Run
    from pyro_dropout.faces.table_files import Table

HELP = (
    "Predict with a fitted run for the rows of a table, into a CSV file."
    "\n\nFor numbers: mean, std (noise included), epistemic_std, and the ends of the central interval, lower and upper."
    " For classes: the most probable class, its probability, entropy and mutual information in nats, and the"
    " probability of each class, p=NAME. The first column is the row of the table."
    + options.examples("predict run new.csv --out predictions.csv", "predict run new.csv --level 0.9 --samples 2000")
)

_PIECE = 2**22  # outputs in memory at once, over rows and draws


def predict(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder that fit made.")],
    data: Annotated[str, typer.Argument(metavar="DATA", help="A CSV or Parquet file with the same columns.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="For the predictions.", rich_help_panel="Output")] = Path(
        "predictions.csv"
    ),
    samples: options.Samples = 500,
    level: options.Level = 0.95,
    ignore_extra: Annotated[
        bool, typer.Option("--ignore-extra", help="Leave out columns that were not there in training.")
    ] = False,
    seed: options.Seed = 0,
    device: options.Device = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Predict with a fitted run for the rows of a table."""
    where = options.place(device)
    from pyro_dropout.faces.runs_on_disk import Run
    from pyro_dropout.faces.tables import read_input_pieces
    from pyro_dropout.inference.torchrun import local_device, rank_here, started_together

    run = Run.read(folder)
    _check_file(out, data)
    model, guide = run.trained(folder)
    size = max(1, _PIECE // (samples * max(1, len(run.encoding.classes))))
    pieces = read_input_pieces(data, run.encoding, size, ignore_extra=ignore_extra)
    together = started_together()
    where = local_device(where, where) if together else where
    model.to(where), guide.to(where)
    asked = {"samples": samples, "seed": seed, "progress": False, "distributed": together}
    with heard():
        found = _answers(run, model, guide, pieces, level, asked)
        if rank_here():
            for _ in found:  # its share of each piece; the first process writes
                pass
            return
        count = _write(out, found, progress=not quiet)
    record = {"folder": str(folder), "target": run.encoding.target, "rows": count, "file": str(out)}
    record |= {"level": level, "samples": samples, "classes": list(run.encoding.classes)}
    answer(record, as_json, [f"{count} predictions of {run.encoding.target!r}: {os.path.relpath(out)}"])


def _answers(
    run: "Run", model: Any, guide: Any, pieces: "Iterable[tuple[Table, Tensor]]", level: float, asked: dict[str, Any]
) -> Iterator[dict[str, list[Any]]]:
    """Yield a dict of columns for one piece of the rows after the other; all of them from the same draws."""
    from pyro_dropout.answers.predictive import predict as ask

    classes = run.encoding.classes
    for table, x in pieces:
        found = ask(model, guide, x, shared=True, keep_samples=True, **asked)
        if not classes:
            low, high = found.interval(level)
            parts = {"mean": found.mean, "std": found.std, "epistemic_std": found.epistemic.sqrt()}
            columns = {name: part[:, 0].tolist() for name, part in (parts | {"lower": low, "upper": high}).items()}
        else:
            best = found.probs.max(-1)
            columns = {"class": [classes[k] for k in best.indices.tolist()], "probability": best.values.tolist()}
            columns |= {"entropy": found.entropy.tolist(), "mutual_information": found.mutual_information.tolist()}
            columns |= {f"p={name}": found.probs[:, k].tolist() for k, name in enumerate(classes)}
        yield {"row": table.rows} | columns


def _write(path: Path, pieces: Iterator[dict[str, list[Any]]], progress: bool) -> int:
    """Write the pieces one after the other and return how many rows they had."""
    from tqdm.auto import tqdm

    done, first = 0, next(pieces)  # a table that is refused from the start is refused without a bar
    bar = tqdm(disable=not progress, unit="row", unit_scale=True, leave=False)
    with whole_file(path) as beside, beside.open("w", newline="", encoding="utf-8") as file, bar:
        writer = csv.writer(file)
        for columns in itertools.chain([first], pieces):
            if not done:
                writer.writerow(columns)
            for values in zip(*columns.values(), strict=True):
                writer.writerow([f"{value:.7g}" if isinstance(value, float) else value for value in values])
            done += len(columns["row"])
            bar.update(len(columns["row"]))
    return done


def _check_file(path: Path, data: str) -> None:
    hint = "'--out'"
    if path.is_dir():
        raise typer.BadParameter(f"{str(path)!r} is a folder; a file is needed.", param_hint=hint)
    if not path.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {str(path.parent)!r}.", param_hint=hint)
    if path.exists() and Path(data).exists() and path.samefile(data):
        raise typer.BadParameter(f"{str(path)!r} is the table itself, and would be written over.", param_hint=hint)
