"""The table of the page: one line per posterior, and columns in groups."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyro_dropout.comparison.columns import REFERENCE
from pyro_dropout.comparison.figure import COLOURS
from pyro_dropout.registry import scores

if TYPE_CHECKING:
    from pyro_dropout.comparison.findings import Comparison, Row

_GROUPS: dict[str, tuple[str, ...]] = {
    "Uncertainty away from the data": ("between", "outside"),
    "Distance to the reference": ("d_mean", "d_std", "d_w1"),
    "As an approximation of p(w|y)": ("elbo", "objective", "gap", "khat"),
    "Cost": ("parameters", "us", "seconds"),
}


@dataclass(frozen=True)
class Cell:
    """One cell: its text, standard error, number to sort by, and what it is: "first" of its group, "none", "best"."""

    text: str
    kinds: list[str]
    error: str = ""
    number: float | None = None


def score_table(comparison: "Comparison") -> dict[str, object]:
    """Return what the template of the table needs: the columns by group, and the cells by posterior."""
    groups = _grouped(comparison)
    return {
        "seeds": comparison.settings.get("seeds", 1),
        "groups": [(title, [comparison.columns[key] for key in keys]) for title, keys in groups],
        "rows": {
            row.name: [_cell(comparison, row, key, key == keys[0]) for _, keys in groups for key in keys]
            for row in comparison.rows
        },
    }


def swatches(comparison: "Comparison") -> dict[str, str]:
    """Return the class of the dot in front of every posterior's name, which has its figure colour."""
    guides = [row.name for row in comparison.rows if row.name != REFERENCE]
    return {REFERENCE: "reference"} | {name: f"c{k % len(COLOURS)}" for k, name in enumerate(guides)}


def minus(number: str) -> str:
    """Return a number with a typographic minus sign, which is as wide as a plus."""
    return f"−{number[1:]}" if number.startswith("-") else number


def _grouped(comparison: "Comparison") -> list[tuple[str, list[str]]]:
    """Return the non-empty columns by group; columns without a group come last."""
    left = list(comparison.columns)
    found = []
    for title, keys in {"Predictions of held-back data": tuple(scores()), **_GROUPS}.items():
        found.append((title, [key for key in keys if key in left]))
        left = [key for key in left if key not in keys]
    return [(title, keys) for title, keys in [*found, ("Other", left)] if keys]


def _cell(comparison: "Comparison", row: "Row", key: str, first: bool) -> Cell:
    score = row.scores.get(key)
    kinds = ["first"] if first else []
    if score is None or not score.values:
        return Cell(comparison.cell(row, key), [*kinds, "none"])
    if comparison.clearly_best(key) == row.name:
        kinds.append("best")
    value, _, error = comparison.cell(row, key).partition(" ± ")
    return Cell(minus(value), kinds, error, score.mean if math.isfinite(score.mean) else None)
