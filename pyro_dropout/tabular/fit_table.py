"""``fit_table``: from a raw table to predictions with intervals, in one call."""

import hashlib
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch

from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.prediction.prediction import Prediction
from pyro_dropout.protocols import Record
from pyro_dropout.tables.encoding import Dataset
from pyro_dropout.tables.reading import Reading
from pyro_dropout.tables.table import Table, table_of
from pyro_dropout.tabular.calibration import calibrate
from pyro_dropout.tabular.choice import (
    LEARNING_RATE,
    STEPS,
    batch_for,
    choose_recipe,
    first_recipe,
    held_back_prediction,
    width_for,
)
from pyro_dropout.tabular.fitted import FittedTable, finished
from pyro_dropout.tabular.run_folder import Run, sha256_of
from pyro_dropout.tabular.run_record import Training
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
    how = Reading(target, held_back=held_back, seed=seed, **{k: _frozen(v) for k, v in reading.items()})
    table, file, digest = _opened(data, how)
    dataset = how.read(table)
    wanted = Wanted(guide, scale, noise, width, members)
    training = wanted.training(steps, lr, batch_size, seed, compile, conformal)
    run, said, held = plan_table(dataset, file, digest, how, training, wanted, device=device, progress=progress)
    model, posterior = run.build(dataset)
    options = run.training.options() | run.recipe.how(run.training.steps)
    fit(model, posterior, *run.rows_of(dataset), **options, device=device, progress=progress)
    return finished(run, model, posterior, dataset, said, held)


@dataclass(frozen=True)
class Wanted:
    """What is to be trained on a table; "auto" is chosen on the held-back rows.

    Attributes:
        guide: by its name.
        scale: of a numeric target.
        noise: of a numeric target.
        width: hidden units; None for as many as suit the inputs.
        members: of an ensemble; None for its default.
    """

    guide: str = "auto"
    scale: str = "auto"
    noise: str = "auto"
    width: int | None = None
    members: int | None = None

    def training(
        self,
        steps: int | None,
        lr: float | None,
        batch_size: int | None,
        seed: int,
        compile: bool | Literal["auto"],
        conformal: bool,
    ) -> Training:
        """Return how to train; steps and rate that are not given are those that suit the guide."""
        auto = self.guide == "auto"
        steps = (STEPS if auto else 2000) if steps is None else steps
        lr = (LEARNING_RATE if auto else 0.01) if lr is None else lr
        return Training(steps, lr, batch_size, seed, compile, conformal)


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
        first = first_recipe(data.train[1], bool(data.classes), **asdict(wanted))
        return Run.of(file, digest, reading, encoding, first, training), "", None
    settings: Any = asdict(wanted) | training.options() | {"device": device, "progress": progress}
    if checkpoint is not None:  # what was kept of another table, command or version is of no use
        bound = [version("pyro-dropout"), digest, asdict(reading), asdict(training), asdict(wanted)]
        settings["checkpoint"] = checkpoint / hashlib.sha256(repr(bound).encode()).hexdigest()[:16]
    choice = choose_recipe(data.train, data.test, data.classes, **settings)
    held = _held_back(choice.prediction, data, training)
    run = Run.of(file, digest, reading, encoding, choice.recipe, training, held)
    return run, choice.said, choice.prediction


def suited(data: Dataset, wanted: Wanted, training: Training) -> tuple[Wanted, Training]:
    """Return what to train on a table, and how, with the scale, the width and the batches that suit its rows."""
    x, encoding = data.rows[0], data.encoding
    if encoding is not None and encoding.target_centre:
        if wanted.scale not in ("auto", "plain"):
            raise PyroDropoutError(
                f"scale={wanted.scale!r} cannot be used: the values of {encoding.target!r} differ too little for their"
                f" size, and are counted from {encoding.target_centre}. Use scale='plain'."
            )
        wanted = replace(wanted, scale="plain")
    wanted = replace(wanted, width=width_for(x.shape[1], wanted.width))
    return wanted, replace(training, batch_size=batch_for(len(x), training.batch_size))


def held_back_after(
    run: Run,
    data: Dataset,
    steps: int,
    *,
    device: torch.device | str | None = None,
    progress: bool = True,
    checkpoint: Path | None = None,
) -> Record:
    """Return what the held-back rows of a run's table say after another number of steps, as JSON; {} if it has none.

    The training for it is kept in the folder ``checkpoint``, if there is one, so that the same call continues.
    """
    if not run.held_back:
        return {}
    batch = batch_for(len(data.train[0]), run.training.batch_size)
    how: Any = {"lr": run.training.lr, "batch_size": batch, "steps": steps, "progress": progress}
    how |= {"seed": run.training.seed, "device": device}
    how |= {"checkpoint": None if checkpoint is None else checkpoint / f"{run.identity[:16]}-{steps}"}
    found = held_back_prediction(run.recipe, data.train, data.test, data.classes, **how)
    return _held_back(found, data, run.training)


def _held_back(prediction: Prediction, data: Dataset, training: Training) -> Record:
    """Return scores and calibration by the held-back rows, as JSON."""
    return calibrate(prediction, data.test, data.train, data.classes, intervals=training.conformal).as_json()


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _opened(data: object, how: Reading) -> tuple[Table, str, str]:
    """Return a table, the path of its file and its SHA-256."""
    from pyro_dropout.tables.files import read_file

    if isinstance(data, str | Path):
        table = read_file(data, encoding=how.encoding, separator=how.separator)
        path = Path(data).resolve()
        return table, str(path), sha256_of(path)
    frame: Any = data
    table = data if isinstance(data, Table) else table_of(frame)
    if not len(table):
        raise PyroDropoutError("the table has no rows.")
    digest = hashlib.sha256(repr((table.columns, table.rows)).encode()).hexdigest()
    return replace(table, file=table.file or IN_MEMORY), IN_MEMORY, digest
