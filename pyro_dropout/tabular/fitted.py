"""A posterior trained on a table: it predicts raw rows, and says of each how far to trust the answer."""

import base64
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from pyro_dropout.errors import PyroDropoutError, warn_caller
from pyro_dropout.generative.standardised import Standardised
from pyro_dropout.judging.support import Support
from pyro_dropout.mathematics.checks import check_count, check_finite, check_level
from pyro_dropout.prediction.prediction import Prediction
from pyro_dropout.protocols import Figure, Record
from pyro_dropout.tables.encoding import Dataset, Encoding
from pyro_dropout.tables.reading import read_inputs
from pyro_dropout.tables.settings import SAMPLES
from pyro_dropout.tables.table import Table, listed, table_of
from pyro_dropout.tabular.calibration import Calibration
from pyro_dropout.tabular.explain import Importance, explain
from pyro_dropout.tabular.pictures import picture
from pyro_dropout.tabular.run_folder import Run, check_new, claimed_run
from pyro_dropout.training.history import History

_SHUFFLED = 200  # weight draws of each shuffle of a column
_ROWS = 2**14  # of which it is said at once whether they are like the training rows
FEWEST = 10  # rows of which it can be said what rows like them are
_TYPES = {"float32": torch.float32, "float64": torch.float64, "int64": torch.int64}


@dataclass(frozen=True, eq=False)
class FittedTable:
    """A posterior trained on a table; made by ``fit_table``, or read from the folder that ``pyro-dropout fit`` wrote.

    Attributes:
        run: the table, how it was read, what was trained and how.
        model: in the units of the target.
        guide: its posterior.
        calibration: what the held-back rows say.
        data: the training rows and the held-back rows, if they are known.
        held: the prediction of the held-back rows by a network that was not trained on them.
        history: of the training.

    Example:
        >>> import pandas, pyro_dropout as pdrop
        >>> frame = pandas.DataFrame({"age": range(60), "kind": ["oak", "elm"] * 30})
        >>> frame["height"] = 2.0 + 0.1 * frame["age"] + (frame["kind"] == "oak")
        >>> fitted = pdrop.fit_table(frame, "height", guide="mean-field", steps=50, progress=False)
        >>> fitted
        FittedTable('height', ..., mean-field, 12 rows held back)
        >>> [column["column"] for column in fitted.explain(frame).as_json()]
        [...]
    """

    run: Run
    model: Standardised
    guide: nn.Module
    calibration: Calibration = field(default_factory=Calibration)
    data: Dataset | None = None
    held: Prediction | None = None
    history: History | None = None

    @property
    def encoding(self) -> Encoding:
        """How the columns of the table become numbers."""
        return self.run.encoding

    @property
    def said(self) -> str:
        """How the recipe was chosen, in a line."""
        return str(self.run.held_back.get("said", ""))

    @property
    def scores(self) -> dict[str, float]:
        """Scores on the held-back rows."""
        return dict(self.calibration.scores)

    def __repr__(self) -> str:
        target, recipe = self.encoding.target, self.run.recipe
        kind = f"one of {len(self.encoding.classes)} classes" if self.encoding.classes else f"{recipe.scale} scale"
        return f"FittedTable({target!r}, {kind}, {recipe.guide}, {self.calibration.rows} rows held back)"

    # --- on disk ------------------------------------------------------------------------------------------------------

    @classmethod
    def load(cls, folder: str | Path) -> "FittedTable":
        """Return the run in a folder that ``pyro-dropout fit`` or ``save`` has written."""
        run = Run.read(folder)
        model, guide, extra = run.loaded(folder)
        try:
            packed = extra["support"]
            support = None if packed is None else Support.from_state({k: _unpacked(v) for k, v in packed.items()})
            if support is not None and support.rows.shape[1] != len(run.encoding.features):
                raise TypeError("what rows of the table are like")
            calibration = Calibration.from_json(run.held_back, support)
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as cause:
            raise PyroDropoutError(f"{folder} is damaged: {cause} is missing or wrong. Fit the run again.") from None
        return cls(run, model, guide, calibration)

    def save(self, folder: str | Path) -> None:
        """Write the run into a new or empty folder, for ``pyro-dropout predict`` and ``FittedTable.load``."""
        folder = Path(folder)
        with claimed_run(folder, make=True):
            check_new(folder)
            self.run.write(folder)
            self.write(folder, {"steps": self.run.training.steps})

    def write(self, folder: Path, extra: dict[str, Any]) -> None:
        """Write the posterior beside the record of the run, and with it what rows of the table are like."""
        support = self.calibration.support
        packed = None if support is None else {k: _packed(v) for k, v in support.state().items()}
        self.run.save(folder, self.model, self.guide, extra | {"support": packed})

    # --- answers ------------------------------------------------------------------------------------------------------

    def prediction(self, x: Tensor, samples: int = SAMPLES, seed: int = 0) -> Prediction:
        """Return the prediction for encoded rows, (N, Q), by draws that no other row changes. The target is centred."""
        return self.run.recipe.predict((self.model, self.guide), x, samples, seed)

    def predict(
        self,
        data: object,
        level: float = 0.95,
        quantiles: float | Sequence[float] = (),
        above: float | Sequence[float] = (),
        samples: int = SAMPLES,
        seed: int = 0,
        progress: bool = False,
    ) -> pandas.DataFrame:
        """Return a data frame with a row for each row of a table: mean, interval, and whether to trust it.

        Columns are those of ``pyro-dropout predict``; a data frame keeps its index. What is said of a row does not
        depend on the rows beside it. ``attrs["notes"]`` says what was noticed about the table. Warnings name rows whose
        mean is not to be used, and columns that are outside their training range in most rows.

        Args:
            data: a data frame, or the path of a file; it need not have the target.
            level: the probability of the interval, or of the set of classes.
            quantiles: levels whose quantiles are wanted as well, such as [0.1, 0.9]: ends of calibrated intervals,
                without a guarantee for each side.
            above: numbers t for which P(y > t) is wanted: from the same intervals, but for whole numbers; without a
                guarantee for each side.
            samples: weight draws.
            seed: of these draws.
            progress: whether to show a bar.
        """
        levels, limits = (tuple(np.atleast_1d(each).astype(float).tolist()) for each in (quantiles, above))
        check_level("level", level)
        check_count("samples", samples)
        for each in levels:
            check_level("quantiles", each)
        for each in limits:
            check_finite("above", torch.tensor(each))
        classes = self.encoding.classes
        if classes and (levels or limits):
            raise PyroDropoutError(
                "quantiles and thresholds are for numbers; the target is a class, and every class has a probability."
            )
        table, x = self._read(data)
        frames: list[pandas.DataFrame] = []
        with tqdm(total=len(x), disable=not progress, unit="row", unit_scale=True, leave=False, delay=1) as bar:
            for found in self.run.recipe.in_pieces((self.model, self.guide), x, samples, seed, len(classes)):
                said = self._classes(found, level) if classes else self._numbers(found, level, levels, limits)
                frames.append(pandas.DataFrame(said))
                bar.update(len(frames[-1]))
        beyond = [listed(names) for names in self.encoding.beyond(x, table)]
        frame = pandas.concat(frames, ignore_index=True).assign(**self._familiar(x, table), beyond=beyond)
        frame.attrs["notes"] = table.notes
        frame = frame.set_axis(
            data.index if isinstance(data, pandas.DataFrame) else pandas.Index(table.rows, name="row")
        )
        outside = pandas.Series(list(itertools.chain(*self.encoding.beyond(x))), dtype="str").value_counts()
        for doubt in _doubts(frame, outside):
            warn_caller(doubt)
        return frame

    def _classes(self, found: Prediction, level: float) -> Record:
        classes, best = self.encoding.classes, found.probs.max(-1)
        parts = {"probability": best.values, "entropy": found.entropy, "mutual_information": found.mutual_information}
        parts |= {f"p={name}": found.probs[:, k] for k, name in enumerate(classes)}
        said = {"class": [classes[k] for k in best.indices.tolist()]} | _columns(parts)
        if (sets := self.calibration.sets(found, level)) is not None:
            said["set"] = [listed(itertools.compress(classes, held)) for held in sets.tolist()]
        return said

    def _numbers(self, found: Prediction, level: float, quantiles: Sequence[float], above: Sequence[float]) -> Record:
        known, centre = self.calibration, self.encoding.target_centre
        mean, lower, upper = (part.double() + centre for part in (found.mean, *known.interval(found, level)))
        parts = {"mean": mean, "std": found.std, "epistemic_std": found.epistemic.sqrt()}
        parts |= {"lower": lower, "upper": upper}
        parts |= {f"q={each:.12g}": known.quantile(found, each).double() + centre for each in quantiles}
        return _columns(parts | {f"p>{each:.12g}": known.probability_above(found, each - centre) for each in above})

    def _familiar(self, x: Tensor, table: Table) -> Record:
        """Return which rows are unlike the training rows, and the columns that set them apart.

        A category or a gap that training did not have is one: filled in, such a row may look like many.
        """
        support = self.calibration.support
        if support is None:
            return {}
        apart = self.encoding.unseen(table)
        names = [name for name, places in self.encoding.places.items() for _ in places]
        for start in range(0, len(x), _ROWS):
            part = x[start : start + _ROWS]
            flags = support.flag(part)
            for row, inputs in zip(flags.nonzero()[:, 0].tolist(), support.inputs(part[flags]), strict=True):
                found = [*apart[start + row], *(names[k] for k in inputs)]
                apart[start + row] = list(dict.fromkeys(found)) or ["all inputs together"]
        return {"unfamiliar": [bool(each) for each in apart], "unfamiliar_in": [listed(each) for each in apart]}

    # --- pictures -----------------------------------------------------------------------------------------------------

    def explain(self, data: object, rows: int = 500, seed: int = 0) -> Importance:
        """Return how much predictions of a table depend on each of its columns: the mean, and the doubt.

        Args:
            data: a data frame, or the path of a file.
            rows: how many rows are used, at most; rows outside the training range, which would drown the others, are
                not.
            seed: of the draws and the shuffles.
        """
        x = self._read(data)[1]
        near = self._within(x)
        where = "" if near.all() else " within the training range"
        how: Any = {"rows": rows, "seed": seed, "where": where}
        return explain(lambda x: self.prediction(x, _SHUFFLED, seed), x[near], self.encoding.places, **how)

    def plot(self, data: object = None, level: float = 0.95, seed: int = 0) -> Figure:
        """Draw predictions beside targets and how often intervals hold; without targets, which columns matter.

        Args:
            data: rows to predict, a data frame or the path of a file; by default the held-back rows, as they were
                predicted before they were trained on too.
            level: of the intervals.
            seed: of the draws.
        """
        target, classes = self.encoding.target, self.encoding.classes
        own = "" if classes else "; intervals are the posterior's own"
        if data is None:
            if self.held is None or self.data is None:
                raise PyroDropoutError("plot: the held-back rows are known after fit_table only; give rows to predict.")
            y = self.data.test[1].to(self.held.mean.device)
            title = f"{target}: {len(y)} held-back rows, not trained on{own}"
            return picture(self.held, y, self.encoding, level=level, rows="held-back rows", title=title)
        table, x = self._read(data)
        kept, y = self.encoding.known_targets(table)
        if len(kept) < 2:
            return self.explain(data, seed=seed).plot()
        near = self._within(x[kept])
        x, y, left = x[kept][near], y[near], int((~near).sum())
        found = self.prediction(x, seed=seed)
        calibrated = not classes and self.calibration.calibrates(level)
        title = f"{target}: {len(x)} rows" + ("; intervals are calibrated on held-back rows" if calibrated else own)
        title += f"; {left} more left out: a number outside its training range" if left else ""
        shown = table.only(list(itertools.compress(kept, near.tolist())))
        far = self._familiar(x, shown).get("unfamiliar")
        return picture(
            found,
            y.to(found.mean.device),
            self.encoding,
            ends=self.calibration.interval(found, level) if calibrated else None,
            level=level,
            unfamiliar=None if far is None else torch.tensor(far),
            title=title,
        )

    def _within(self, x: Tensor) -> Tensor:
        """Return which encoded rows lie in the range of the training rows; all, if fewer than two do."""
        near = torch.tensor([not names for names in self.encoding.beyond(x)])
        return near if near.sum() > 1 else torch.ones_like(near)

    def _read(self, data: object) -> tuple[Table, Tensor]:
        """Return a table of new rows, and its inputs."""
        rows = data if isinstance(data, str | Path | Table) else table_of(data)
        return read_inputs(rows, self.encoding)


def _doubts(frame: pandas.DataFrame, outside: pandas.Series) -> list[str]:
    """Return what must be said of predictions: which means are of no use, and which inputs may be in another unit.

    ``outside`` counts the rows in which an input is outside its training range.
    """
    told = []
    if "mean" in frame:
        wrong = frame.index[~frame["mean"].between(frame["lower"], frame["upper"]) | frame["mean"].abs().eq(np.inf)]
        which = ", ".join(map(str, wrong[:5])) + ", ..." * (len(wrong) > 5)
        said = f"the mean is not finite, or outside its own interval, in row {which}: use a quantile, such as q=0.5"
        told += [said] * bool(len(wrong))
    for name, rows in outside[outside > max(FEWEST, len(frame) / 2)].items():
        told.append(f"{name} is outside its training range in {rows} of {len(frame)} rows: is it in another unit?")
    return told


def _columns(parts: dict[str, Tensor]) -> Record:
    return {name: part.detach().cpu().double().flatten().numpy() for name, part in parts.items()}


def _packed(value: Tensor) -> Record:
    data = base64.b64encode(value.contiguous().numpy().tobytes()).decode()
    return {"type": str(value.dtype).removeprefix("torch."), "shape": list(value.shape), "data": data}


def _unpacked(found: Record) -> Tensor:
    raw = np.frombuffer(bytearray(base64.b64decode(found["data"], validate=True)), np.uint8)
    if not all(isinstance(size, int) and size >= 0 for size in found["shape"]):
        raise TypeError("a tensor")
    return torch.from_numpy(raw).view(_TYPES[found["type"]]).reshape(found["shape"])
