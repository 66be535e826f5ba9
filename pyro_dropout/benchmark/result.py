"""The results of a benchmark: for every problem a table of scores with their errors, and a table of ranks."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch

from pyro_dropout.benchmark.page import Band, Part, draw, page
from pyro_dropout.benchmark.problems import Problem
from pyro_dropout.benchmark.problems import problems as all_problems
from pyro_dropout.benchmark.scores import COSTS, Truth, columns, half_of, rows_of, scored
from pyro_dropout.comparison.findings import REFERENCE, Findings, Row, Score
from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.protocols import Figure, Record
from pyro_dropout.registry import Column
from pyro_dropout.training.checkpoints.safe_files import whole_file

MARK, CELLS, PAGE = "benchmark.json", "runs", "report.html"


@dataclass
class Cell(Score):
    """A score over seeds whose error is at least that of the draws.

    Attributes:
        drawn: the Monte Carlo error of each value.
    """

    drawn: list[float] = field(default_factory=list)

    @property
    def error(self) -> float | None:
        """The standard error over seeds or the Monte Carlo error of the mean, whichever is larger."""
        over = super().error
        known = [each for each in self.drawn if math.isfinite(each)]
        within = math.sqrt(math.fsum(each**2 for each in known)) / len(known) if known else None
        return max((each for each in (over, within) if each is not None), default=None)


@dataclass
class OnProblem(Findings):
    """The rows of one problem: scores or ranks of every posterior, and scores of half of the reference.

    Attributes:
        possible: every column that there may be.
    """

    possible: Mapping[str, Column] = field(default_factory=columns)

    def _known(self) -> Mapping[str, Column]:
        """Return the columns of a benchmark, and not those of a comparison."""
        return self.possible


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
        settings = json.loads((folder / MARK).read_text("utf-8"))["settings"]
        records = [json.loads(path.read_text("utf-8")) for path in sorted(folder.glob(f"{CELLS}/*/*.json"))]
        run = {record["problem"] for record in records}
        return cls(
            folder, settings, records, {name: each for name, each in all_problems("full").items() if name in run}
        )

    @property
    def entries(self) -> dict[str, str]:
        """Where every posterior came from, by its name."""
        return {record["entry"]: record["what"] for record in self.records}

    def on(self, name: str) -> OnProblem:
        """Return the scores on a problem, as means over seeds with errors."""
        problem = self.problems[name]
        rows = rows_of(problem, self.settings["held_out"])
        half = scored(half_of(problem, rows), Truth.of(problem, rows), problem.kind)
        best = Row(REFERENCE, {key: Cell([value], drawn=[error]) for key, (value, error) in half.items()})
        return self._table(name, [best, *(_row(entry, self._of(entry, name)) for entry in self.entries)])

    def ranks(self, name: str) -> OnProblem:
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
        return self._table(name, list(found.values()), possible=possible)

    def _table(self, name: str, rows: list[Row], **more: Any) -> OnProblem:
        seeds = len({record["seed"] for record in self.records if record["problem"] == name})
        nothing: Any = ()
        return OnProblem(rows, nothing, nothing, {"seeds": seeds}, 0.0, **more)

    def to_html(self, path: str | Path | None = None) -> Path:
        """Write a self-contained page, by default into the folder, and return its path."""
        path = self.folder / PAGE if path is None else Path(path)
        facts = {
            "guides": f"Adam, {self.settings['steps']} steps of all points, learning rate {self.settings['lr']:g}",
            "draws": f"at most {self.settings['samples']} of each posterior",
            "test points": "all" if self.settings["held_out"] else "those that are not held out",
            **{f"posterior {name}": what for name, what in self.entries.items()},
        }
        for key in ("hardware", "versions"):
            facts[key] = "; ".join(sorted({_words(record[key]) for record in self.records}))
        parts = [
            Part(problem, self.on(name), self.ranks(name), self._bands(name, list(self.entries)))
            for name, problem in self.problems.items()
        ]
        with whole_file(path) as beside:
            beside.write_text(page(parts, list(self.entries), facts), "utf-8")
        return path

    def plot(self, name: str, entries: Sequence[str] | None = None) -> Figure:
        """Draw the band of every posterior, or of some ``entries``, over the reference's on a problem."""
        shown = list(self.entries if entries is None else entries)
        part = Part(self.problems[name], self.on(name), self.on(name), self._bands(name, shown))
        return draw(part, list(self.entries))

    def _bands(self, problem: str, entries: list[str]) -> dict[str, Band]:
        """Return the bands of the first seed that has one, by posterior."""
        found: dict[str, Band] = {}
        for entry in entries:
            known = [record["band"] for record in self._of(entry, problem) if "band" in record]
            if known:
                found[entry] = {part: torch.tensor(each, dtype=torch.float64) for part, each in known[0].items()}
        return found

    def _of(self, entry: str, problem: str) -> list[Record]:
        return [each for each in self.records if (each["entry"], each["problem"]) == (entry, problem)]

    def __str__(self) -> str:
        return "\n\n".join(f"{name}: {each.title}\n{self.on(name)}" for name, each in self.problems.items())


def _row(entry: str, records: list[Record]) -> Row:
    """Return the row of a posterior: scores with errors, and a note of what failed."""
    row = Row(entry)
    for record in records:
        for key, (value, error) in record.get("scores", {}).items():
            cell = row.scores.setdefault(key, Cell())
            assert isinstance(cell, Cell)
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


def _words(known: object) -> str:
    return ", ".join(f"{name} {each}" for name, each in known.items()) if isinstance(known, dict) else str(known)
