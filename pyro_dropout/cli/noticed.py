"""What ``pyro-dropout predict`` notices on its way through a table."""

import itertools
import math
from collections import Counter
from typing import TYPE_CHECKING, Any

from pyro_dropout.cli.terminal import figure, percent

if TYPE_CHECKING:
    from pyro_dropout.tables.encoding import Encoding
    from pyro_dropout.tables.table import Table

    Columns = dict[str, list[Any]]


class Noticed:
    """What is noticed about the table: how its file was read, and the rows that are unlike the training rows."""

    def __init__(self, encoding: "Encoding") -> None:
        self._encoding = encoding
        self.rows = self.unfamiliar = 0
        self.compared, self.squares, self.held = 0, 0.0, 0  # rows with a target, errors, and targets that were foreseen
        self.far: list[int] = []  # rows whose mean is outside its interval
        self.inputs: Counter[str] = Counter()
        self.notes: list[str] = []

    def seen(self, columns: "Columns", table: "Table") -> "Columns":
        """Count more rows, and return their answers."""
        self.notes = list(table.notes)
        beyond = [str(names).split("; ") for names in columns["beyond"] if names]
        self.rows += len(beyond)
        self.inputs.update(itertools.chain.from_iterable(beyond))
        self.unfamiliar += sum(map(bool, columns.get("unfamiliar", [])))
        self._compare(columns, table)
        if "mean" in columns:
            parts = (columns[name] for name in ("row", "mean", "lower", "upper"))
            self.far += [
                row for row, mean, low, high in zip(*parts, strict=True) if not low <= mean <= high or math.isinf(mean)
            ]
        return columns

    def _compare(self, columns: "Columns", table: "Table") -> None:
        """Compare the answers with the targets, where the table has them and they can be read."""
        kept, found = self._encoding.known_targets(table)
        targets = found.flatten().tolist()
        self.compared += len(kept)
        if self._encoding.classes:
            names = [columns["class"][row] for row in kept]
            self.held += sum(self._encoding.classes[k] == name for k, name in zip(targets, names, strict=True))
            return
        means, low, high = ([columns[name][row] for row in kept] for name in ("mean", "lower", "upper"))
        self.squares += sum((mean - y) ** 2 for mean, y in zip(means, targets, strict=True))
        self.held += sum(a <= y <= b for a, y, b in zip(low, targets, high, strict=True))

    def scores(self) -> "dict[str, float]":
        """Return the scores on the rows that have a target; none if there are no such rows."""
        if not self.compared:
            return {}
        share = self.held / self.compared
        if self._encoding.classes:
            return {"rows": self.compared, "accuracy": share}
        return {"rows": self.compared, "rmse": math.sqrt(self.squares / self.compared), "coverage": share}

    def judged(self, level: float, trained: bool) -> list[str]:
        """Return a sentence about the scores; ``trained`` says that these are the rows of the training table."""
        scores = self.scores()
        if not scores:
            return []
        good = f"accuracy {percent(scores['accuracy'])}" if "accuracy" in scores else f"rmse {figure(scores['rmse'])}"
        if "coverage" in scores:
            good += f", {percent(scores['coverage'])} of them in their {percent(level)} intervals"
        rows = "which it was trained on" if trained else "which have the target too"
        return [f"On {self.compared} rows, {rows}: {good}."]

    def said(self, file: str) -> list[str]:
        """Return a sentence about the file and one about the rows, if there is anything to say."""
        most = [f"{name} ({rows})" for name, rows in self.inputs.most_common(5)]
        where = ", ".join(most + ["..."] * (len(self.inputs) > len(most)))
        told = [f"{file}: {'; '.join(self.notes)}"] if self.notes else []
        told += [f"rows unlike the training rows (unfamiliar): {self.unfamiliar}"] * bool(self.unfamiliar)
        what = "rows outside the training range, or with a new category"
        told += [f"{what}: {self.rows}; inputs concerned: {where}"] * bool(self.rows)
        if self.far:
            which = ", ".join(map(str, self.far[:5])) + ", ..." * (len(self.far) > 5)
            told.append(f"the mean is infinite or outside its own interval in row {which}: do not use it there")
        return told
