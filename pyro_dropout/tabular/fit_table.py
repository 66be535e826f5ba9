"""``fit_table``: from a raw table to predictions with intervals, in one call; the command line takes the same way."""

import hashlib
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.judging.support import Support
from pyro_dropout.prediction.prediction import Prediction
from pyro_dropout.tables.encoding import Dataset
from pyro_dropout.tables.files import read_file
from pyro_dropout.tables.reading import read
from pyro_dropout.tables.settings import Reading, Training, Wanted, settings_of
from pyro_dropout.tables.table import Table, table_of
from pyro_dropout.tabular.calibration import Calibration, calibrate
from pyro_dropout.tabular.choice import batch_for, choose_recipe, first_recipe
from pyro_dropout.tabular.fitted import FEWEST, FittedTable
from pyro_dropout.tabular.run_folder import Run, sha256_of
from pyro_dropout.training.fit import fit
from pyro_dropout.training.history import History

IN_MEMORY = "(a table in memory)"


def fit_table(
    data: object,
    target: str | None = None,
    *,
    device: torch.device | str | None = None,
    progress: bool = True,
    **options: Any,
) -> FittedTable:
    """Fit a posterior to a raw table, and calibrate it on rows that are held back.

    Texts, gaps, dates, identifiers and constants are dealt with as ``pyro-dropout fit`` does. Guide, scale of the
    target and noise are chosen on the held-back rows, unless they are given. Options are those of the command line:

    - of the table: ``task``, ``missing``, ``categorical``, ``drop``, ``keep``, ``held_back`` (the share of rows that is
      not trained on; 0 chooses and calibrates nothing), ``decimal``, ``encoding``, ``separator``;
    - of what is trained: ``guide`` (a name, or "auto"), ``scale`` ("plain", "log", "logit", "count" or "auto"),
      ``noise`` ("constant", "by-input" or "auto"), ``width`` (hidden units) and ``members`` (of an ensemble);
    - of its training: ``steps`` (by default 1200, and 2000 for a guide that is given), ``lr`` (0.05, falling to zero,
      and 0.01), ``batch_size`` (all rows, up to 2,048, and otherwise 1,024), ``seed`` (of the split, the training and
      the calibration), ``compile`` (as in ``fit``) and ``conformal`` (whether intervals are calibrated).

    Args:
        data: a data frame, or the path of a file.
        target: the column to predict; the last one by default.
        device: where to compute.
        progress: whether to show a bar.
        options: by name.

    Example:
        >>> import pandas, pyro_dropout as pdrop
        >>> frame = pandas.DataFrame({"age": range(40), "kind": ["oak", "elm"] * 20})
        >>> frame["height"] = 2.0 + 0.1 * frame["age"] + (frame["kind"] == "oak")
        >>> fitted = pdrop.fit_table(frame, "height", guide="mean-field", steps=50, compile=False, progress=False)
        >>> fitted.predict(frame.head(3))[["mean", "lower", "upper", "unfamiliar"]].shape
        (3, 4)
    """
    reading, wanted, training = settings_of(options | {"target": target})
    if isinstance(data, str | Path):
        table = read_file(data, encoding=reading.encoding, separator=reading.separator)
        file, digest = str(Path(data).resolve()), sha256_of(Path(data))
    else:
        table, file = data if isinstance(data, Table) else table_of(data), IN_MEMORY
        cells = {name: each.tolist() for name, each in table.columns.items()}
        digest = hashlib.sha256(repr((cells, table.rows.tolist())).encode()).hexdigest()
    dataset = read(table, reading)
    how: Any = {"device": device, "progress": progress}
    run, held = plan_table(dataset, file, digest, reading, training, wanted, **how)
    return train_run(run, dataset, held, **how)[0]


def plan_table(
    data: Dataset,
    file: str,
    digest: str,
    reading: Reading,
    training: Training,
    wanted: Wanted,
    *,
    checkpoint: Path | None = None,
    **how: Any,
) -> tuple[Run, Prediction | None]:
    """Return an untrained run on all rows of a table, and its prediction of the held-back rows.

    ``checkpoint`` is a folder in which the trainings that choose are kept, so that the same call continues.
    """
    wanted, training = suited(data, wanted, training)
    assert data.encoding is not None
    encoding = data.encoding.seen(data.rows[0])
    if not len(data.test[0]):
        wanted.check(bool(data.classes))
        first = first_recipe(data.train[0].shape[1], data.train[1], bool(data.classes), wanted)
        return Run(file, digest, reading, encoding, first, training), None
    if checkpoint is not None:  # what was kept of another table, command or version is of no use
        bound = [version("pyro-dropout"), digest, asdict(reading), asdict(training), asdict(wanted)]
        checkpoint = checkpoint / hashlib.sha256(repr(bound).encode()).hexdigest()[:16]
    choice = choose_recipe(data.train, data.test, data.classes, wanted, training, checkpoint=checkpoint, **how)
    held = calibrate(choice.prediction, data.test, data.train, data.classes, intervals=training.conformal)
    told = held.as_json() | {"said": choice.said}
    return Run(file, digest, reading, encoding, choice.recipe, training, told), choice.prediction


def train_run(run: Run, data: Dataset, held: Prediction | None = None, **how: Any) -> tuple[FittedTable, History]:
    """Train a run with further arguments of ``fit``; return it with what is known of the rows of its table."""
    model, guide = run.build(data)
    options = run.training.options() | run.recipe.how(run.training.steps) | how
    history = fit(model, guide, *run.rows_of(data), **options)
    x = run.rows_of(data)[0]
    support = Support.of(x, seed=run.training.seed) if len(x) >= FEWEST else None
    return FittedTable(run, model, guide, Calibration.from_json(run.held_back, support), data, held), history


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
