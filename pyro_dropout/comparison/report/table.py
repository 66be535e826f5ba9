"""The table of the page: one line per posterior, grouped columns, and the meaning of each column."""

import html
import math
from typing import Any

from pyro_dropout.comparison.columns import REFERENCE
from pyro_dropout.comparison.figure import COLOURS
from pyro_dropout.registry import scores

_GROUPS: dict[str, tuple[str, ...]] = {
    "Uncertainty away from the data": ("between", "outside"),
    "Distance to the reference": ("d_mean", "d_std", "d_w1"),
    "As an approximation of p(w|y)": ("elbo", "objective", "gap", "khat"),
    "Cost": ("parameters", "us", "seconds"),
}
_FIRST = {"more": "descending", "less": "ascending"}  # the order that puts the best on top


def grouped(comparison: Any) -> list[tuple[str, list[str]]]:
    """Return the non-empty columns by group; columns without a group come last."""
    left = list(comparison.columns)
    found = []
    for title, keys in {"Predictions of held-back data": tuple(scores()), **_GROUPS}.items():
        found.append((title, [key for key in keys if key in left]))
        left = [key for key in left if key not in keys]
    found.append(("Other", left))
    return [(title, keys) for title, keys in found if keys]


def name_cell(comparison: Any, name: str) -> str:
    """Return a posterior's name after a dot in its figure colour."""
    guides = [row.name for row in comparison.rows if row.name != REFERENCE]
    kind = "reference" if name == REFERENCE else f"c{guides.index(name) % len(COLOURS)}"
    return f'<span class="dot {kind}"></span>{html.escape(name)}'


def table(comparison: Any) -> str:
    """Return the table of all scores; without JavaScript it is a plain table."""
    groups = grouped(comparison)
    above = "".join(
        f'<th class="first" colspan="{len(keys)}" scope="colgroup">{html.escape(title)}</th>' for title, keys in groups
    )
    below = "".join(_heading(comparison, key, key == keys[0]) for _, keys in groups for key in keys)
    lines = []
    for row in comparison.rows:
        cells = "".join(_cell(comparison, row, key, key == keys[0]) for _, keys in groups for key in keys)
        lines.append(f'<tr><th scope="row">{name_cell(comparison, row.name)}</th>{cells}</tr>')
    return (
        f"<p>{_explained(comparison)}</p>"
        '<div class="scroll" tabindex="0" role="region" aria-label="Table of all scores">'
        f'<table class="scores sortable"><thead><tr class="group"><td class="name"></td>{above}</tr>'
        f'<tr><th class="name" scope="col">posterior</th>{below}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
        '<p class="hidden" role="status"></p>'
    )


def meanings(comparison: Any) -> str:
    """Return the meaning of every column, as a definition list."""
    which = {"more": "More is better.", "less": "Less is better.", "level": "The nearer to 0.95 the better."}
    parts = []
    for _, keys in grouped(comparison):
        for key in keys:
            column = comparison.columns[key]
            words = " ".join(filter(None, [column.meaning, which.get(column.better, "")]))
            parts.append(f"<dt>{html.escape(column.heading)}</dt><dd>{html.escape(words)}</dd>")
    return f'<dl class="meanings">{"".join(parts)}</dl>'


def _explained(comparison: Any) -> str:
    if comparison.settings.get("seeds", 1) == 1:
        return "One seed per guide: there are no standard errors, so no value is marked as best."
    return (
        "Mean over seeds, and below it ± its standard error (which does not include the choice of test points). A value"
        " is marked as best if it leads every other guide by more than a standard error of the difference."
    )


def _heading(comparison: Any, key: str, first: bool) -> str:
    column = comparison.columns[key]
    way = _FIRST.get(column.better, "ascending")
    place = ' class="first"' if first else ""
    title = html.escape(column.meaning)
    return f'<th{place} scope="col" data-first="{way}" title="{title}">{html.escape(column.heading)}</th>'


def _cell(comparison: Any, row: Any, key: str, first: bool) -> str:
    score = row.scores.get(key)
    kinds = ["first"] if first else []
    if score is None or not score.values:
        kinds.append("none")
        return f'<td class="{" ".join(kinds)}">{html.escape(comparison.cell(row, key))}</td>'
    best = comparison.clearly_best(key) == row.name
    kinds += ["best"] if best else []
    value, _, error = comparison.cell(row, key).partition(" ± ")
    below = f'<span class="error"> ± {html.escape(error)}</span>' if error else ""
    said = '<span class="hidden"> (best)</span>' if best else ""
    number = f' data-value="{score.mean!r}"' if math.isfinite(score.mean) else ""
    attribute = f' class="{" ".join(kinds)}"' if kinds else ""
    return f"<td{attribute}{number}>{minus(value)}{said}{below}</td>"


def minus(number: str) -> str:
    """Return a number with a typographic minus sign, which is as wide as a plus."""
    return html.escape(f"−{number[1:]}" if number.startswith("-") else number)
