"""``fit_table``: from a raw table to predictions with intervals, in one call."""

import hashlib
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch

from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.prediction.prediction import Prediction
from pyro_dropout.tables.encoding import Dataset
from pyro_dropout.tables.files import read_file
from pyro_dropout.tables.reading import Reading
from pyro_dropout.tables.table import Table, table_of
from pyro_dropout.tabular.calibration import calibrate
from pyro_dropout.tabular.choice import batch_for, choose_recipe, first_recipe
from pyro_dropout.tabular.fitted import FittedTable, finished
from pyro_dropout.tabular.recipe import Training, Wanted
from pyro_dropout.tabular.run_folder import Run, sha256_of
from pyro_dropout.training.fit import fit

IN_MEMORY = "(a table in memory)"


def fit_table(
    data: object,
    target: str | None = None,
    *,
    guide: str = "auto",
    scale: str = "auto",
    noise: str = "auto",
    held_back: float = 0.2,
    conformal: bool = True,
    width: int | None = None,
    members: int | None = None,
    steps: int | None = None,
    lr: float | None = None,
    batch_size: int | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    compile: bool | Literal["auto"] = "auto",
    progress: bool = True,
    **reading: Any,
) -> FittedTable:
    """Fit a posterior to a raw table, and calibrate it on rows that are held back.

    Texts, gaps, dates, identifiers and constants are dealt with as ``pyro-dropout fit`` does. Guide, scale of the
    target and noise are chosen on the held-back rows, unless they are given.

    Args:
        data: a data frame, or the path of a file.
        target: the column to predict; the last one by default.
        guide: a guide by its name, or "auto".
        scale: of a numeric target: "plain", "log", "logit", "count", or "auto".
        noise: of a numeric target: "constant", "by-input", or "auto".
        held_back: the share of rows that is not trained on; 0 chooses and calibrates nothing.
        conformal: whether intervals are calibrated on the held-back rows.
        width: hidden units; by default 50, and fewer, down to 10, for more than 500 inputs.
        members: of an ensemble.
        steps: of training; by default 1200, and 2000 for a guide that is given.
        lr: learning rate; by default 0.05, falling to zero, and 0.01 for a guide that is given.
        batch_size: rows in a step; by default all, up to 2,048, and otherwise 1,024.
        seed: of the split, the training and the calibration.
        device: where to compute.
        compile: as in ``fit``.
        progress: whether to show a bar.
        reading: further arguments of ``read_table``, such as drop=["id"].

    Example:
        >>> import pandas, pyro_dropout as pdrop
        >>> frame = pandas.DataFrame({"age": range(40), "kind": ["oak", "elm"] * 20})
        >>> frame["height"] = 2.0 + 0.1 * frame["age"] + (frame["kind"] == "oak")
        >>> fitted = pdrop.fit_table(frame, "height", guide="mean-field", steps=50, compile=False, progress=False)
        >>> fitted.predict(frame.head(3))[["mean", "lower", "upper", "unfamiliar"]].shape
        (3, 4)
    """
    given: Any = {name: tuple(value) if isinstance(value, list) else value for name, value in reading.items()}
    how = Reading(target, held_back=held_back, seed=seed, **given)
    if isinstance(data, str | Path):
        table = read_file(data, encoding=how.encoding, separator=how.separator)
        file, digest = str(Path(data).resolve()), sha256_of(Path(data))
    else:
        table, file = data if isinstance(data, Table) else table_of(data), IN_MEMORY
        cells = {name: each.tolist() for name, each in table.columns.items()}
        digest = hashlib.sha256(repr((cells, table.rows.tolist())).encode()).hexdigest()
    dataset = how.read(table)
    wanted = Wanted(guide, scale, noise, width, members)
    others: Any = {"batch_size": batch_size, "seed": seed, "compile": compile, "conformal": conformal}
    training = wanted.training(steps, lr, **others)
    run, said, held = plan_table(dataset, file, digest, how, training, wanted, device=device, progress=progress)
    model, posterior = run.build(dataset)
    options = run.training.options() | run.recipe.how(run.training.steps)
    fit(model, posterior, *run.rows_of(dataset), **options, device=device, progress=progress)
    return finished(run, model, posterior, dataset, said, held)


def plan_table(
    data: Dataset,
    file: str,
    digest: str,
    reading: Reading,
    training: Training,
    wanted: Wanted,
    *,
    device: torch.device | str | None = None,
    progress: bool = True,
    checkpoint: Path | None = None,
) -> tuple[Run, str, Prediction | None]:
    """Return an untrained run on all rows of a table, how it was chosen, and its prediction of the held-back rows.

    Args:
        data: the table.
        file: its path.
        digest: its SHA-256.
        reading: how it was read.
        training: how to train.
        wanted: what to train.
        device: where to compute.
        progress: whether to show bars.
        checkpoint: a folder in which the trainings that choose are kept, so that the same call continues.
    """
    wanted, training = suited(data, wanted, training)
    assert data.encoding is not None
    encoding = data.encoding.seen(data.rows[0])
    if not len(data.test[0]):
        wanted.check(bool(data.classes))
        first = first_recipe(data.train[0].shape[1], data.train[1], bool(data.classes), wanted)
        return Run.of(file, digest, reading, encoding, first, training), "", None
    if checkpoint is not None:  # what was kept of another table, command or version is of no use
        bound = [version("pyro-dropout"), digest, asdict(reading), asdict(training), asdict(wanted)]
        checkpoint = checkpoint / hashlib.sha256(repr(bound).encode()).hexdigest()[:16]
    settings: Any = {"device": device, "progress": progress, "checkpoint": checkpoint}
    choice = choose_recipe(data.train, data.test, data.classes, wanted, training, **settings)
    held = calibrate(choice.prediction, data.test, data.train, data.classes, intervals=training.conformal)
    run = Run.of(file, digest, reading, encoding, choice.recipe, training, held.as_json())
    return run, choice.said, choice.prediction


def suited(data: Dataset, wanted: Wanted, training: Training) -> tuple[Wanted, Training]:
    """Return what to train on a table, and how, with the scale and the batches that suit its rows."""
    encoding = data.encoding
    if encoding is not None and encoding.target_centre:
        if wanted.scale not in ("auto", "plain"):
            raise PyroDropoutError(
                f"scale={wanted.scale!r} cannot be used: the values of {encoding.target!r} differ too little for their"
                f" size, and are counted from {encoding.target_centre}. Use scale='plain'."
            )
        wanted = replace(wanted, scale="plain")
    return wanted, replace(training, batch_size=batch_for(len(data.rows[0]), training.batch_size))
