"""The result of a comparison: one row per posterior, as a table, as figures and as an HTML report."""

from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from pyro_dropout.comparison.columns import REFERENCE, Column, Score, best, columns
from pyro_dropout.generative.inputs import AnyInputs
from pyro_dropout.generative.model_call import ModelCall
from pyro_dropout.guides.summary import picture, table
from pyro_dropout.mathematics.errors import PyroDropoutError
from pyro_dropout.prediction.prediction import Prediction
from pyro_dropout.protocols import Axes, Figure, PyroModel, Record


@dataclass
class Row:
    """One posterior approximation: its scores and trained guides.

    Attributes:
        name: as it was given.
        scores: {column: score}.
        note: what went wrong, if anything did; if nothing could be scored, the row has only this note.
        trained: (model, guide) of every seed whose training did not diverge.
        answer: the prediction at the test points, of the first of them.
        curve: (x, mean, low, high, epistemic standard deviation) along one input, of the first of them.
    """

    name: str
    scores: dict[str, Score] = field(default_factory=dict)
    note: str = ""
    trained: list[tuple[PyroModel, object]] = field(default_factory=list)
    answer: Prediction | None = None
    curve: tuple[Tensor, ...] | None = None


@dataclass
class Comparison:
    """The result of ``compare``.

    Attributes:
        rows: one per guide, after the reference if there is one.
        train: the training data.
        test: the held-back data.
        settings: seeds, steps and so on.
        seconds: total time.
        call: the arguments of a model that is not a network, with the training data; ``train`` and ``test`` then hold
            the numbers of the points, and the data of the observed site.

    Example:
        >>> import torch, pyro_dropout as pd
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(-1)
        >>> model = pd.BayesianNet(torch.nn.Linear(1, 1), likelihood=pd.Gaussian(tau=100.0))
        >>> options = {"steps": 100, "lr": 0.03, "seeds": 1, "samples": 50, "compile": False, "progress": False}
        >>> found = pd.compare(model, {"mean field": pd.AutoMeanField}, (x, 2 * x), (x + 0.1, 2 * x + 0.2), **options)
        >>> [row.name for row in found.rows], found.rows[0].scores["rmse"].mean < 0.2
        (['mean field'], True)
    """

    rows: list[Row]
    train: tuple[AnyInputs, Tensor]
    test: tuple[AnyInputs, Tensor]
    settings: Record
    seconds: float
    call: ModelCall | None = None

    def __repr__(self) -> str:
        names = ", ".join(row.name for row in self.rows)
        points = f"{len(self.train[1])} training and {len(self.test[1])} test points"
        return f"Comparison({names}; {points}; {self.seconds:.0f} s)"

    def _repr_html_(self) -> str:
        """Return the scores, one in a line, and a picture of the first of them, for notebooks."""
        rows = [[column.heading, *(self.cell(row, key) for row in self.rows)] for key, column in self.columns.items()]
        found = table(["", *(row.name for row in self.rows)], rows)
        scored = [row for row in self.rows if "log_lik" in row.scores]
        if not scored:
            return found

        def draw(ax: Axes) -> None:
            scores = [row.scores["log_lik"] for row in scored]
            errors = [score.error or 0.0 for score in scores]
            ax.errorbar([score.mean for score in scores], range(len(scores)), xerr=errors, fmt="o", capsize=3)
            ax.set_yticks(range(len(scores)), [row.name for row in scored])
            ax.invert_yaxis()
            ax.set_xlabel("test log-likelihood per point (nats), ± standard error")

        return f"<div>{found}{picture(draw)}</div>"

    @property
    def answers(self) -> dict[str, Prediction]:
        """The prediction at the test points, by posterior; without those that could not be scored."""
        return {row.name: row.answer for row in self.rows if row.answer is not None}

    @property
    def curves(self) -> dict[str, tuple[Tensor, ...]]:
        """The bands along one input, by posterior; empty if there are several inputs."""
        return {row.name: row.curve for row in self.rows if row.curve is not None}

    @property
    def columns(self) -> dict[str, Column]:
        """The columns in which at least one row has a score, in order."""
        return {key: column for key, column in columns().items() if any(key in row.scores for row in self.rows)}

    @property
    def table(self) -> list[dict[str, str]]:
        """The table as text, one dict for each row: {heading: cell}."""
        return [
            {"posterior": row.name, **{c.heading: self.cell(row, key) for key, c in self.columns.items()}}
            for row in self.rows
        ]

    def cell(self, row: Row, key: str) -> str:
        """Return one cell as text."""
        if key in row.scores:
            column = columns()[key]
            return row.scores[key].text(column.digits, tiny=column.better == "less")  # errors, in small units
        return "failed" if not row.scores else "–"

    def best(self, key: str) -> str | None:
        """Return the name of the best guide in a column, without the reference."""
        return best(columns()[key], self._cells(key))

    def clearly_best(self, key: str) -> str | None:
        """Return the name of the best guide if it leads every other by more than a standard error of the difference.

        With one seed there is no standard error, and so no clear lead.
        """
        name, cells, column = self.best(key), self._cells(key), columns()[key]
        if name is None:
            return None
        first = cells.pop(name)
        return name if all(_apart(first, other, column) for other in cells.values()) else None

    def _cells(self, key: str) -> dict[str, Score]:
        """Return the cells of a column that have a value, by guide."""
        rows = [row for row in self.rows if key in row.scores and row.name != REFERENCE]
        return {row.name: row.scores[key] for row in rows if row.scores[key].values}

    @property
    def ranking(self) -> list[str]:
        """The guides by distance to the reference, nearest first; without a reference, by test log-likelihood."""
        key, sign = ("d_w1", 1) if any("d_w1" in row.scores for row in self.rows) else ("log_lik", -1)
        scored = [row for row in self.rows if row.name != REFERENCE and key in row.scores]
        return [row.name for row in sorted(scored, key=lambda row: sign * row.scores[key].mean)]

    def __str__(self) -> str:
        """The table, transposed: one line per score, because screens are narrow."""
        names = [row.name for row in self.rows]
        lines = [["", *names]]
        lines += [[c.heading, *(self.cell(row, key) for row in self.rows)] for key, c in self.columns.items()]
        widths = [max(len(line[i]) for line in lines) for i in range(len(names) + 1)]
        text = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
        notes = [f"{row.name}: {row.note}" for row in self.rows if row.note]
        return "\n".join([*text, *notes])

    def plot(self) -> Figure:
        """Draw predictive bands of all guides on shared axes; with several inputs, calibration curves and scores."""
        from pyro_dropout.comparison.figure import draw_bands, draw_scores

        return draw_bands(self) if self.curves else draw_scores(self)

    def plot_scores(self) -> Figure:
        """Draw calibration curves and the main scores with their errors."""
        from pyro_dropout.comparison.figure import draw_scores

        return draw_scores(self)

    def to_html(self, path: str | Path) -> Path:
        """Write a self-contained HTML report with table, figures and explanations, and return its path.

        Args:
            path: of the report; an existing file is replaced.
        """
        from pyro_dropout.comparison.report.page import page

        path = Path(path)
        if path.is_dir():
            raise PyroDropoutError(f"path must be a file to write the page to; {str(path)!r} is a folder.")
        if not path.parent.is_dir():
            raise PyroDropoutError(f"the folder of path does not exist: {str(path.parent)!r}.")
        path.write_text(page(self), "utf-8")
        return path


def _apart(one: Score, other: Score, column: Column) -> bool:
    """Whether one mean is better or worse by more than a standard error of the difference."""
    if one.error is None or other.error is None:
        return False
    lead = abs(column.badness(one.mean) - column.badness(other.mean))
    return bool(lead > (one.error**2 + other.error**2) ** 0.5)
