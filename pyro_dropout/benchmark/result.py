"""The results of a benchmark: for every problem scores with their errors, ranks and a picture, and a page of them."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyro_dropout.benchmark.problems import Problem
from pyro_dropout.benchmark.problems import problems as all_problems
from pyro_dropout.benchmark.scores import COSTS, Truth, columns, half_of, rows_of, scored
from pyro_dropout.comparison.figure import COLOURS, GREY, short
from pyro_dropout.comparison.findings import REFERENCE, Findings, Row, Score
from pyro_dropout.comparison.report.page import picture, rendered, table_of
from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.prediction.plot_style import finish, literal_text
from pyro_dropout.protocols import Axes, Figure, Record
from pyro_dropout.registry import Column
from pyro_dropout.training.checkpoints.safe_files import whole_file

MARK, CELLS, PAGE = "benchmark.json", "runs", "report.html"
FORMAT = 1  # of the records
Band = Mapping[str, Tensor]  # mean, low and high of every quantity
_ACROSS = 4  # panels beside each other
_GROUPS: dict[str, tuple[str, ...]] = {
    "Width, divided by the reference's": ("width", "width_gap", "width_outside"),
    "Cost": tuple(COSTS),
}


@dataclass
class Results:
    """What the folder of a benchmark holds.

    Attributes:
        folder: where it lies.
        settings: with which all of it was made.
        records: one for each posterior, problem and seed.
        problems: those that have been run, by name.

    Example:
        >>> import tempfile
        >>> from pyro_dropout import benchmark
        >>> quick = {"problems": ["line"], "seeds": 2, "steps": 50, "progress": False, "out": tempfile.mkdtemp()}
        >>> found = benchmark.benchmark(["mean-field", "laplace"], **quick)
        >>> found.entries
        {'laplace': 'guide laplace', 'mean-field': 'guide mean-field'}
        >>> [row.name for row in found.ranks("line").rows], found.to_html().name
        (['laplace', 'mean-field'], 'report.html')
    """

    folder: Path
    settings: Record
    records: list[Record]
    problems: dict[str, Problem]

    @classmethod
    def read(cls, folder: str | Path) -> "Results":
        """Return the results in a folder."""
        folder = Path(folder)
        if not (folder / MARK).is_file():
            raise PyroDropoutError(f"{str(folder)!r} holds no benchmark: it has no {MARK}.")
        told = json.loads((folder / MARK).read_text("utf-8"))
        if told.get("format") != FORMAT:
            raise PyroDropoutError(
                f"{str(folder / MARK)!r} has format {told.get('format')!r}; this version reads {FORMAT}. Run it again."
            )
        records = [json.loads(path.read_text("utf-8")) for path in sorted(folder.glob(f"{CELLS}/*/*.json"))]
        run = {record["problem"] for record in records}
        known = {name: each for name, each in all_problems("full").items() if name in run}
        return cls(folder, told["settings"], records, known)

    @property
    def entries(self) -> dict[str, str]:
        """Where every posterior came from, by its name."""
        return {record["entry"]: record["what"] for record in self.records}

    def on(self, name: str) -> Findings:
        """Return the scores on a problem, as means over seeds with errors."""
        problem = self.problems[name]
        rows = rows_of(problem, self.settings["held_out"])
        half = scored(half_of(problem, rows), Truth.of(problem, rows), problem.kind)
        best = Row(REFERENCE, {key: Score([value], drawn=[error]) for key, (value, error) in half.items()})
        return self._table(name, [best, *(_row(entry, self._of(entry, name)) for entry in self.entries)], columns())

    def ranks(self, name: str) -> Findings:
        """Return the rank of every posterior by every score, as means over seeds with errors; what failed is last."""
        possible = {
            key: Column(key, each.heading, f"Rank, 1 for the best: {each.meaning}", "less", 1)
            for key, each in self.on(name).columns.items()
            if each.better
        }
        found = {entry: Row(entry) for entry in self.entries if self._of(entry, name)}
        for key, seed in product(possible, sorted({each["seed"] for each in self.records if each["problem"] == name})):
            bad: dict[str, float] = {}
            for record in (each for each in self.records if (each["problem"], each["seed"]) == (name, seed)):
                value = {**record, **{k: v[0] for k, v in record.get("scores", {}).items()}}.get(key)
                if value is not None or record["note"]:  # a posterior whose cost is not known has no rank by it
                    bad[record["entry"]] = math.inf if value is None else columns()[key].badness(value)
            for entry, own in bad.items():
                rank = 0.5 + sum((each < own) + 0.5 * (each == own) for each in bad.values())  # ties share theirs
                found[entry].scores.setdefault(key, Score()).add(rank)
        return self._table(name, list(found.values()), possible)

    def _table(self, name: str, rows: list[Row], known: Mapping[str, Column]) -> Findings:
        seeds = len({record["seed"] for record in self.records if record["problem"] == name})
        nothing: Any = ()
        found = Findings(rows, nothing, nothing, {"seeds": seeds}, 0.0)
        found.known = known
        return found

    def to_html(self, path: str | Path | None = None) -> Path:
        """Write a self-contained page, by default into the folder, and return its path."""
        path = self.folder / PAGE if path is None else Path(path)
        facts = {
            "guides": f"Adam, {self.settings['steps']} steps of all points, learning rate {self.settings['lr']:g}",
            "draws": f"at most {self.settings['samples']} of each posterior",
            "test points": "all" if self.settings["held_out"] else "those that are not held out",
            **{f"posterior {name}": what for name, what in self.entries.items()},
        }
        facts["hardware"] = "; ".join(sorted({record["hardware"] for record in self.records}))
        made = (record["versions"].items() for record in self.records)
        facts["versions"] = "; ".join(sorted({", ".join(f"{name} {each}" for name, each in parts) for parts in made}))
        told = []
        for problem in self.problems.values():
            scores, known = self.on(problem.name), problem.reference
            left = set(scores.columns) - {key for group in _GROUPS.values() for key in group}
            groups: dict[str, Iterable[str]] = {"Distance to the reference": left, **_GROUPS}
            checked = f"R-hat at most {known.rhat:.4f}, effective sample sizes at least {known.ess:,.0f}"
            told.append({
                "name": problem.name, "title": problem.title, "about": problem.about, "held_out": problem.held_out,
                "picture": picture(partial(self.plot, problem.name)), "alt": _told(problem),
                "table": table_of(scores, groups), "ranks": table_of(self.ranks(problem.name), groups),
                "notes": [(row.name, row.note) for row in scores.rows if row.note],
                "reference": known.how if known.how == "exact" else f"{known.how}; {checked}",
            })  # fmt: skip
        shown: Record = {"title": "How close are these posteriors?", "note": "", "problems": told, "facts": facts}
        with whole_file(path) as beside:
            beside.write_text(rendered("benchmark.html.jinja", list(self.entries), **shown), "utf-8")
        return path

    def plot(self, name: str, entries: Sequence[str] | None = None) -> Figure:
        """Draw the band of every posterior, or of some ``entries``, over the reference's on a problem."""
        bands: dict[str, Band] = {}  # of the first seed that has one
        for entry in self.entries if entries is None else entries:
            known = [record["band"] for record in self._of(entry, name) if "band" in record]
            if known:
                bands[entry] = {part: torch.tensor(each, dtype=torch.float64) for part, each in known[0].items()}
        return draw(self.problems[name], bands, list(self.entries))

    def _of(self, entry: str, problem: str) -> list[Record]:
        return [each for each in self.records if (each["entry"], each["problem"]) == (entry, problem)]

    def __str__(self) -> str:
        return "\n\n".join(f"{name}: {each.title}\n{self.on(name)}" for name, each in self.problems.items())


def _row(entry: str, records: list[Record]) -> Row:
    """Return the row of a posterior: scores with errors, and a note of what failed."""
    row = Row(entry)
    for record in records:
        for key, (value, error) in record.get("scores", {}).items():
            cell = row.scores.setdefault(key, Score())
            cell.add(math.inf if value is None else value)
            cell.drawn.append(math.nan if error is None else error)
    for key in COSTS:
        values = [float(record[key]) for record in records if record.get(key) is not None]
        if values:
            row.scores[key] = Score(values if len({*values}) > 1 else values[:1])
    notes = sorted({record["note"] for record in records if record["note"]})
    if notes:
        lost = sum(bool(record["note"]) for record in records)
        row.note = f"with {lost} of {len(records)} seeds: {' '.join(notes)}"
    elif not records:
        row.note = "not run."
    return row


# --- the picture ------------------------------------------------------------------------------------------------------


def _told(problem: Problem) -> str:
    what = {"numbers": "f", "classes": "the probability of a class", "parameters": "every parameter"}[problem.kind]
    where = "along the input" if _is_curve(problem) else "one place each, sorted by the reference's mean"
    return f"Mean and central 95 % interval of {what}, {where}: the reference in grey, the posterior in colour"


def _is_curve(problem: Problem) -> bool:
    return problem.x_test is not None and problem.x_test.dim() == 2 and problem.x_test.shape[1] == 1


@literal_text()
def draw(problem: Problem, bands: Mapping[str, Band], entries: list[str]) -> Figure:
    """Draw the band of every posterior over that of the reference, each on axes of its own."""
    import matplotlib.pyplot as plt

    down, across = -(-len(bands) // _ACROSS), min(_ACROSS, len(bands))
    size = (10, 2.2 * down + 0.4)
    figure, axes = plt.subplots(
        max(1, down), max(1, across), figsize=size, sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    for ax in axes.flat[len(bands) :]:
        ax.remove()
    for ax, (name, band) in zip(axes.flat, bands.items(), strict=False):
        draw_one(ax, problem, band, COLOURS[entries.index(name) % len(COLOURS)])
        ax.set_title(short(name), fontsize=9, loc="left", pad=3)
    return figure


def draw_one(ax: Axes, problem: Problem, band: Band, colour: str) -> None:
    """Draw one posterior's band and the reference's."""
    known, draws = problem.reference, problem.reference.draws.double()
    ends = torch.quantile(draws, torch.tensor([0.025, 0.975], dtype=torch.float64), dim=0)
    true = {"mean": known.mean.double(), "low": ends[0], "high": ends[1]}
    pairs = [(true, GREY), ({part: value.reshape(known.mean.shape) for part, value in band.items()}, colour)]
    if problem.kind == "parameters":
        pairs = [({part: (value - true["mean"]) / known.std for part, value in each.items()}, c) for each, c in pairs]
    elif true["mean"].dim() > 1:  # one number for each point: the class that the reference finds most probable
        which = true["mean"].mean(0).argmax() if _is_curve(problem) else 0
        pairs = [({part: value[:, which] for part, value in each.items()}, c) for each, c in pairs]
    if _is_curve(problem):
        assert problem.x_test is not None
        order = problem.x_test[:, 0].argsort()
        x = problem.x_test[order, 0].double()
    else:
        order = pairs[0][0]["mean"].argsort()
        x = torch.arange(len(order), dtype=torch.float64)
    for k, (each, shade) in enumerate(pairs):
        mean, low, high = (each[name][order] for name in ("mean", "low", "high"))
        if _is_curve(problem):
            ax.fill_between(x, low, high, color=shade, alpha=0.35, linewidth=0)
            ax.plot(x, mean, color=shade, linewidth=1.2)
        else:  # the two side by side
            ax.vlines(x + 0.4 * k, low, high, color=shade, linewidth=1.2)
            ax.plot(x + 0.4 * k, mean, ".", color=shade, markersize=3)
    ax.margins(x=0)
    ax.tick_params(labelsize=7)
    finish(ax)
