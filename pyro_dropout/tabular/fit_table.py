"""``fit_table``: from a raw table to predictions with intervals, in one call.

The command line takes the same way into a folder, where what is interrupted can be continued.
"""

import contextlib
import hashlib
import shutil
from collections.abc import Iterator
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from pandas.util import hash_pandas_object

from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.judging.support import Support
from pyro_dropout.prediction.prediction import Prediction
from pyro_dropout.protocols import Record
from pyro_dropout.tables.encoding import Dataset
from pyro_dropout.tables.files import read_file
from pyro_dropout.tables.reading import read
from pyro_dropout.tables.settings import Training, Wanted, settings_of
from pyro_dropout.tables.table import Table, table_of
from pyro_dropout.tabular.calibration import Calibration, calibrate
from pyro_dropout.tabular.choice import batch_for, choose_recipe, first_recipe
from pyro_dropout.tabular.fitted import FEWEST, FittedTable
from pyro_dropout.tabular.run_folder import (
    CHECKPOINTS,
    CHOOSING,
    Run,
    check_new,
    checkpoints_in,
    claimed_run,
    resuming,
    sha256_of,
)
from pyro_dropout.training.checkpoints.training_checkpoint import Checkpoint

IN_MEMORY = "(a table in memory)"


def fit_table(
    data: object,
    target: str | int | None = None,
    *,
    folder: str | Path | None = None,
    every: int | None = None,
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
        folder: new or empty, for the run and its checkpoints. If a signal ends the call, the same call continues, or,
            once it is known what to train, ``pyro-dropout resume``, which needs a file as data.
        every: steps between checkpoints; by default one per minute.
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
    into, how = None if folder is None else Path(folder), Record(device=device, progress=progress)
    with contextlib.nullcontext() if into is None else claimed_run(into, make=True):
        if into is not None:
            check_new(into)
        if isinstance(data, str | Path):
            table = read_file(data, encoding=reading.encoding, separator=reading.separator)
            file, digest = str(Path(data).resolve()), sha256_of(Path(data))
        else:
            table, file = data if isinstance(data, Table) else table_of(data), IN_MEMORY
            parts = [hash_pandas_object(cells, index=False).to_numpy() for cells in table.columns.values()]
            whole = b"".join([repr(list(table.columns)).encode(), *(each.tobytes() for each in (*parts, table.rows))])
            digest = hashlib.sha256(whole).hexdigest()
        dataset = read(table, reading)
        wanted, training = suited(dataset, wanted, training)
        classes, rows, held = dataset.classes, dataset.rows, None
        told: Record = {}
        if len(dataset.test[0]):
            # What was kept of another table, command or version is of no use.
            bound = [version("pyro-dropout"), digest, asdict(reading), asdict(training), asdict(wanted)]
            with _choosing(into, hashlib.sha256(repr(bound).encode()).hexdigest()[:16]) as kept:
                choice = choose_recipe(dataset.train, dataset.test, classes, wanted, training, checkpoint=kept, **how)
                recipe, held = choice.recipe, choice.prediction
                known = calibrate(held, dataset.test, dataset.train, classes, intervals=training.conformal)
                told = known.as_json() | {"said": choice.said}
        else:
            wanted.check(bool(classes))
            recipe = first_recipe(rows[0].shape[1], rows[1], bool(classes), wanted)
        assert dataset.encoding is not None
        run = Run(file, digest, reading, dataset.encoding.seen(rows[0]), recipe, training, told)
        if into is not None:
            run.write(into)
        return _trained(run, dataset, held, into, every, **how)


def resume(
    folder: str | Path,
    file: Path | None = None,
    *,
    every: int | None = None,
    device: torch.device | str | None = None,
    progress: bool = True,
) -> FittedTable:
    """Continue the run in a folder to the end that it would have had; ``file`` is its table, if it has moved."""
    folder = Path(folder)
    if not folder.is_dir():
        Run.read(folder)  # says so
    with claimed_run(folder):
        run = Run.read(folder)
        run.check_checkpoints(folder)
        data = run.data(file)
        if file is not None:  # before training, so that the next call knows it
            run = replace(run, file=str(file.resolve()))
            run.write(folder)
        return _trained(run, data, None, folder, every, device=device, progress=progress)


def _trained(
    run: Run, data: Dataset, held: Prediction | None, folder: Path | None, every: int | None, **how: Any
) -> FittedTable:
    """Train a run, from its last checkpoint if its folder has one, and write its posterior there."""
    if folder is not None:
        how["checkpoint"] = Checkpoint(folder / CHECKPOINTS, every=every, run=run.identity)
    rows = data.rows if run.held_back else data.train  # all of them, once the held-back ones have said what they can
    pair, history = run.recipe.train(rows, data.classes, run.training, **how)
    support = Support.of(rows[0], seed=run.training.seed) if len(rows[0]) >= FEWEST else None
    found = FittedTable(run, *pair, Calibration.from_json(run.held_back, support), data, held, history)
    if folder is not None:
        last = {"steps": history.steps, "last_loss": float(history.losses[-1]), "scores": found.scores}
        try:
            found.write(folder, last)
        except PyroDropoutError as cause:
            what = (
                "continue from the last checkpoint"
                if checkpoints_in(folder)
                else "train again (there is no checkpoint)"
            )
            raise PyroDropoutError(f"{str(cause).rstrip('.')}; to {what}: {resuming(folder)}") from None
    return found


@contextlib.contextmanager
def _choosing(folder: Path | None, name: str) -> Iterator[Path | None]:
    """Yield where the trainings are kept that choose what to train; only an interruption leaves them there."""
    where, kept = folder and folder / CHOOSING, False
    try:
        yield where and where / name
    except (KeyboardInterrupt, SystemExit):
        kept = where is not None and any(where.rglob("step-*.safetensors"))
        raise
    finally:
        if where is not None and not kept:
            shutil.rmtree(where, ignore_errors=True)


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
