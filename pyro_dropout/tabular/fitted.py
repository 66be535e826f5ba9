"""A posterior trained on a table: it predicts raw rows, and says of each how far to trust the answer."""

import base64
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas
import torch
from torch import Tensor, nn

from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.generative.standardised import Standardised
from pyro_dropout.judging.support import Support
from pyro_dropout.mathematics.checks import check_finite, check_level
from pyro_dropout.prediction.predict import predict
from pyro_dropout.prediction.prediction import Prediction
from pyro_dropout.protocols import Figure, Record
from pyro_dropout.registry import resolve_guide
from pyro_dropout.tables.encoding import Dataset, Encoding
from pyro_dropout.tables.reading import read_input_pieces
from pyro_dropout.tables.table import Table, table_of
from pyro_dropout.tabular.calibration import Calibration
from pyro_dropout.tabular.explain import Importance, explain
from pyro_dropout.tabular.pictures import picture
from pyro_dropout.tabular.run_folder import Run

Cell = str | float | None
Columns = dict[str, list[Cell]]

_SAMPLES = 200  # weight draws of the curves and the importances in a picture, at most
FEWEST = 10  # rows of which it can be said what rows like them are
_TYPES = {"float32": torch.float32, "float64": torch.float64, "int64": torch.int64}
SHIFTED = ("mean", "lower", "upper")  # columns in the units of the target, and all quantiles


@dataclass(frozen=True)
class Question:
    """What is asked of every row.

    Attributes:
        level: the probability of the interval, or of the set of classes.
        quantiles: levels whose quantiles are asked for. They are ends of calibrated central intervals: a single side is
            not calibrated, and is off where errors are skewed or the mean is biased.
        above: numbers of which it is asked how probably the target exceeds them; in the same way.
        samples: weight draws.
        seed: of the draws.
    """

    level: float = 0.95
    quantiles: tuple[float, ...] = ()
    above: tuple[float, ...] = ()
    samples: int = 500
    seed: int = 0

    def check(self, classes: bool) -> None:
        """Raise unless all of it makes sense for a target that is a class, or a number."""
        check_level("level", self.level)
        for level in self.quantiles:
            check_level("quantiles", level)
        for threshold in self.above:
            check_finite("above", torch.tensor(float(threshold)))
        if classes and (self.quantiles or self.above):
            raise PyroDropoutError(
                "quantiles and thresholds are for numbers; the target is a class, and every class has a probability."
            )


@dataclass(frozen=True, eq=False)
class FittedTable:
    """A posterior trained on a table; made by ``fit_table``, or read from the folder that ``pyro-dropout fit`` wrote.

    Attributes:
        run: the table, how it was read, what was trained and how.
        model: in the units of the target.
        guide: its posterior.
        calibration: what the held-back rows say.
        data: the training rows and the held-back rows, if they are known.
        said: how the guide, the scale of the target and the noise were chosen, in one line.
        held: what the posterior said of the held-back rows before it was trained on them too, if it is known.

    Example:
        >>> import pandas, pyro_dropout as pdrop
        >>> frame = pandas.DataFrame({"age": [k % 20 for k in range(60)], "kind": ["oak", "elm", "ash"] * 20})
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
    said: str = ""
    held: Prediction | None = None

    @property
    def encoding(self) -> Encoding:
        """How the columns of the table become numbers."""
        return self.run.encoding

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
            calibration = known(run, support)
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as cause:
            raise PyroDropoutError(f"{folder} is damaged: {cause} is missing or wrong. Fit the run again.") from None
        return cls(run, model, guide, calibration, said=str(extra.get("said", "")))

    def save(self, folder: str | Path) -> None:
        """Write the run into a new or empty folder, for ``pyro-dropout predict`` and ``FittedTable.load``."""
        folder = Path(folder)
        if folder.exists() and not folder.is_dir():
            raise PyroDropoutError(f"{str(folder)!r} is a file; give a folder.")
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise PyroDropoutError(f"{str(folder)!r} is not empty; give a new folder.")
        self.run.write(folder)
        self.write(folder, {"steps": self.run.training.steps})

    def write(self, folder: Path, extra: dict[str, Any]) -> None:
        """Write the posterior beside the record of the run, and with it what rows of the table are like."""
        support = self.calibration.support
        packed = None if support is None else {k: _packed(v) for k, v in support.state().items()}
        self.run.save(folder, self.model, self.guide, extra | {"support": packed, "said": self.said})

    # --- answers ------------------------------------------------------------------------------------------------------

    def prediction(self, x: Tensor, asked: Question) -> Prediction:
        """Return the prediction for encoded rows, (N, Q); all rows by the same draws. The target is centred."""
        how: Any = resolve_guide(self.run.recipe.guide).method
        kept: Any = {"samples": asked.samples, "method": how, "seed": asked.seed, "shared": how == "mc"}
        found: Prediction = predict(self.model, self.guide, x, keep_samples=True, progress=False, **kept)
        return found

    def answers(self, table: Table, x: Tensor, asked: Question) -> Columns:
        """Return a column for everything that is asked of the rows of a table; numbers are centred as in training.

        Args:
            table: the rows.
            x: the same, encoded.
            asked: what is asked.
        """
        found, known = self.prediction(x, asked), self.calibration
        answer = self._of_classes if self.encoding.classes else self._of_numbers
        columns: Columns = {"row": table.rows.tolist(), **answer(found, asked)}
        if known.support is not None:
            columns |= self._unfamiliar(known.support, x.cpu())
        columns["beyond"] = ["; ".join(names) for names in self.encoding.beyond(x.cpu(), table)]
        return columns

    def _of_classes(self, found: Prediction, asked: Question) -> Columns:
        classes, best, sets = self.encoding.classes, found.probs.max(-1), self.calibration.sets(found, asked.level)
        columns: Columns = {"class": [classes[k] for k in best.indices.tolist()], "probability": best.values.tolist()}
        columns |= {"entropy": found.entropy.tolist(), "mutual_information": found.mutual_information.tolist()}
        columns |= {f"p={name}": found.probs[:, k].tolist() for k, name in enumerate(classes)}
        if sets is not None:
            columns["set"] = ["; ".join(itertools.compress(classes, held)) for held in sets.tolist()]
        return columns

    def _of_numbers(self, found: Prediction, asked: Question) -> Columns:
        ends, known, centre = self._ends(found, asked.level), self.calibration, self.encoding.target_centre
        parts = {"mean": found.mean, "std": found.std, "epistemic_std": found.epistemic.sqrt()}
        parts |= {"lower": ends[0], "upper": ends[1]}
        parts |= {f"q={level:g}": known.quantile(found, level) for level in asked.quantiles}
        parts |= {f"p>{t:.12g}": known.probability_above(found, t - centre) for t in asked.above}
        return {name: part[:, 0].tolist() for name, part in parts.items()}

    def _unfamiliar(self, support: Support, x: Tensor) -> Columns:
        """Return which rows are unlike the training rows, and the columns that set them apart, one or two of them."""
        flags = support.flag(x)
        names = [name for name, places in self.encoding.places.items() for _ in places]
        apart = [""] * len(x)
        for row, inputs in zip(flags.nonzero()[:, 0].tolist(), support.inputs(x[flags]), strict=True):
            apart[row] = "; ".join(dict.fromkeys(names[k] for k in inputs)) or "all inputs together"
        return {"unfamiliar": flags.int().tolist(), "unfamiliar_in": apart}

    def calibrates(self, level: float) -> bool:
        """Return whether intervals or sets of this level are calibrated on held-back rows."""
        held = self.calibration.intervals
        return held is not None and level <= held.highest_level

    def predict(
        self,
        data: object,
        level: float = 0.95,
        quantiles: float | Sequence[float] = (),
        above: float | Sequence[float] = (),
        samples: int = 500,
        seed: int = 0,
    ) -> pandas.DataFrame:
        """Return a data frame with a row for each row of a table: mean, interval, and whether to trust it.

        Columns are those of ``pyro-dropout predict``; a data frame keeps its index.

        Args:
            data: a data frame, or the path of a file; it need not have the target.
            level: the probability of the interval, or of the set of classes.
            quantiles: levels whose quantiles are wanted as well, such as [0.1, 0.9]; calibrated as intervals are.
            above: numbers t for which P(y > t) is wanted; calibrated too, unless targets are whole numbers.
            samples: weight draws.
            seed: of these draws.
        """
        levels, limits = (tuple(each) if isinstance(each, Iterable) else (each,) for each in (quantiles, above))
        asked = Question(level, levels, limits, samples, seed)
        asked.check(bool(self.encoding.classes))
        columns, centre = self.answers(*self._read(data), asked), self.encoding.target_centre
        frame = pandas.DataFrame({name: uncentred(name, values, centre) for name, values in columns.items()})
        if "unfamiliar" in frame:
            frame["unfamiliar"] = frame["unfamiliar"].astype(bool)
        if isinstance(data, pandas.DataFrame):
            return frame.drop(columns="row").set_axis(data.index)
        return frame.set_index("row")

    # --- pictures -----------------------------------------------------------------------------------------------------

    def explain(self, data: object, rows: int = 500, seed: int = 0) -> Importance:
        """Return how much predictions of a table depend on each of its columns: the mean, and the doubt.

        Args:
            data: a data frame, or the path of a file.
            rows: how many rows are used, at most.
            seed: of the draws and the shuffles.
        """
        return self.explained(self._read(data)[1], Question(seed=seed), rows)

    def explained(self, x: Tensor, asked: Question, rows: int = 500) -> Importance:
        """Return the same of encoded rows; those outside the training range would drown the others."""
        near = self._within(x)
        found = explain(self._asking(asked), x[near], self.encoding.places, rows=rows, seed=asked.seed)
        return replace(found, within=not bool(near.all()))

    def plot(self, data: object = None, level: float = 0.95, seed: int = 0) -> Figure:
        """Draw what predictions are worth, and the columns that they depend on most.

        Args:
            data: rows to predict, a data frame or the path of a file; with the target, predictions are compared with
                it. By default the held-back rows, as they were predicted before they were trained on too.
            level: of the intervals.
            seed: of the draws.
        """
        asked = Question(level, seed=seed)
        if data is not None:
            return self.drawn(*self._read(data), asked)
        if self.held is None or self.data is None:
            raise PyroDropoutError("plot: the held-back rows are known after fit_table only; give rows to predict.")
        (x, y), held, ask = self.data.test, self.held, self._asking(asked)
        own = "" if self.encoding.classes else "; intervals are the posterior's own"
        title = f"{self.encoding.target}: {len(x)} held-back rows, not trained on{own}"
        return picture(
            lambda points: held if points is x else ask(points), self.encoding, x, y, level=level, title=title
        )

    def drawn(self, table: Table, x: Tensor, asked: Question, importance: Importance | None = None) -> Figure:
        """Return the picture of rows of a table, which may have the target; they are predicted as in ``answers``."""
        kept, targets = self.encoding.known_targets(table)
        y = targets if len(kept) > 1 else None
        x = (x if y is None else x[kept]).to(next(self.guide.parameters()).device)
        near, support = self._within(x), self.calibration.support
        x, y, left = x[near], None if y is None else y[near.to(y.device)], int((~near).sum())
        calibrates = self.calibrates(asked.level) and not self.encoding.classes
        how = "calibrated on held-back rows" if calibrates else "the posterior's own"
        title = f"{self.encoding.target}: {len(x)} rows" + ("" if self.encoding.classes else f"; intervals are {how}")
        title += f"; {left} more left out: a number outside its training range" if left else ""
        ask, found = self._asking(asked), self.prediction(x, asked)
        return picture(
            lambda points: found if points is x else ask(points),
            self.encoding,
            x,
            y,
            level=asked.level,
            interval=(lambda one: self._ends(one, asked.level)) if calibrates else None,
            importance=importance,
            unfamiliar=None if support is None else support.flag(x.cpu()),
            rows="rows",
            title=title,
        )

    def _within(self, x: Tensor) -> Tensor:
        """Return which encoded rows lie in the range of the training rows; all, if fewer than two do."""
        near = torch.tensor([not names for names in self.encoding.beyond(x.cpu())], device=x.device)
        return near if near.sum() > 1 else torch.ones_like(near)

    def _ends(self, found: Prediction, level: float) -> tuple[Tensor, Tensor]:
        return self.calibration.interval(found, level) or found.interval(level)

    def _asking(self, asked: Question) -> Callable[[Tensor], Prediction]:
        device, few = next(self.guide.parameters()).device, min(asked.samples, _SAMPLES)
        return lambda x: self.prediction(x.to(device), replace(asked, samples=few))

    def _read(self, data: object) -> tuple[Table, Tensor]:
        """Return a table of new rows, and its inputs."""
        frame: Any = data
        rows = data if isinstance(data, str | Path | Table) else table_of(frame)
        ((table, x),) = read_input_pieces(rows, self.encoding, None)
        return table, x.to(next(self.guide.parameters()).device)


def finished(
    run: Run,
    model: Standardised,
    guide: nn.Module,
    data: Dataset,
    said: str = "",
    held: Prediction | None = None,
) -> FittedTable:
    """Return a trained run with what is known of the rows of its table, and how its recipe was chosen."""
    x = run.rows_of(data)[0]
    support = Support.of(x, seed=run.training.seed) if len(x) >= FEWEST else None
    return FittedTable(run, model, guide, known(run, support), data, said, held)


def known(run: Run, support: Support | None) -> Calibration:
    """Return what is known of the rows of a run's table: from its record, and what they are like."""
    return Calibration.from_json(run.held_back, support) if run.held_back else Calibration(support=support)


def _packed(value: Tensor) -> Record:
    data = base64.b64encode(value.contiguous().numpy().tobytes()).decode()
    return {"type": str(value.dtype).removeprefix("torch."), "shape": list(value.shape), "data": data}


def _unpacked(found: Record) -> Tensor:
    if found["type"] not in _TYPES or not all(isinstance(size, int) and size >= 0 for size in found["shape"]):
        raise TypeError("a tensor")
    raw = bytearray(base64.b64decode(found["data"], validate=True))
    return torch.frombuffer(raw, dtype=_TYPES[found["type"]]).reshape(found["shape"]).clone()


def uncentred(name: str, values: list[Cell], centre: float) -> list[Cell]:
    """Return a column of answers with the centre of the target added, if it is in the units of the target."""
    if not centre or not is_shifted(name):
        return values
    return [value + centre if isinstance(value, float) else value for value in values]


def is_shifted(name: str) -> bool:
    """Return whether a column of answers is in the units of the target."""
    return name in SHIFTED or name.startswith("q=")
