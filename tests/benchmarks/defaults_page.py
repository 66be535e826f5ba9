"""What the map of defaults says: docs/results/defaults.csv, the tables of docs/results/defaults.md, and its picture."""

import csv
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.defaults_doors import DOORS
from tests.benchmarks.defaults_tables import CHOSEN_ON, DEPTHS, NEW, REPORTED, WIDTHS

_DOCS = Path(__file__).parents[2] / "docs"
_AS_THEY_COME = ("fit_table", "estimator-auto")
_BEGIN, _END = "<!-- measured: begin -->", "<!-- measured: end -->"
_KEY = ("table", "depth", "width", "guide", "prior", "steps")
Cells = dict[tuple[Any, ...], dict[str, Any]]


def judged(known: Iterable[dict[str, Any]]) -> Cells:
    """Return each cell of a guide beside plain torch: difference, its error, whether it is level, chance, warned."""
    rows = [row for row in known if "each" in row]
    torches = {(*row["cell"][:3], row["steps"]): row for row in rows if row["cell"][3] == "torch"}
    found: Cells = {}
    for row in rows:
        *net, guide, prior = row["cell"]
        beside = torches.get((*net, row["steps"]))
        if guide == "torch" or beside is None:
            continue
        each, plain = torch.tensor(row["each"]), torch.tensor(beside["with_noise" if guide in DOORS else "each"])
        apart = each.mean(0) - plain.mean(0)
        own = each.mean(1).var() / len(each) if len(each) > 1 else 0.0
        between = own + plain.mean(1).var() / len(plain)
        error = math.sqrt(float(apart.var() / len(apart) + between))
        chance = float(each.mean()) < row["constant"] + 0.02 and float(plain.mean()) > row["constant"] + 0.1
        found[(*net, guide, prior, row["steps"])] = {
            "gain": float(apart.mean()), "error": error, "level": float(apart.mean()) >= -error,
            "chance": chance, "told": any(row["told"]), "mean": float(each.mean()),
        }  # fmt: skip
    return found


def _share(cells: list[dict[str, Any]], what: str) -> str:
    return f"{sum(cell[what] for cell in cells)} of {len(cells)}" if cells else "-"


def text(cells: Cells) -> str:
    """Return the tables in Markdown."""
    lines: list[str] = []
    names = list(dict.fromkeys(key[3] for key in sorted(cells) if key[4] == "default"))
    titles: dict[str, tuple[str, ...]] = {"Tables that the default was chosen on": CHOSEN_ON, "Other tables": REPORTED}
    titles["Tables that were not used to choose between rules, but had been seen"] = NEW
    for title, tables in titles.items():
        if not any(key[0] in tables for key in cells):
            continue
        lines += [f"**{title}** ({', '.join(tables)})", ""]
        lines += ["| guide | level after 2,000 steps | level after 20,000 | mean difference |", "|---|---|---|---|"]
        for name in names:
            mine = {key: cell for key, cell in cells.items() if key[3:5] == (name, "default") and key[0] in tables}
            every = list(mine.values())
            if not every:
                continue
            early, late = ([cell for key, cell in mine.items() if key[5] == steps] for steps in (2_000, 20_000))
            mean = f"{sum(cell['gain'] for cell in every) / len(every):+.3f}"
            lines.append(f"| {name} | {_share(early, 'level')} | {_share(late, 'level')} | {mean} |")
        lines.append("")
    own = ("fit_table", "estimator-auto")  # these choose among priors of their own
    ours = [cell for key, cell in cells.items() if key[4] == "default" and key[3] not in own]
    lines += [f"With the default prior, {_share(ours, 'chance')} cells are at chance.", ""]
    paper = {key: cell for key, cell in cells.items() if key[4] == "paper"}
    if paper:
        # Whether a door warned was not looked at.
        lost = [cell for cell in paper.values() if cell["chance"]]
        fine = [cell for key, cell in cells.items() if not cell["chance"] and key[3] not in DOORS]
        lines += [
            "With the paper's prior, `Prior()`, tried only with three hidden layers of 1,024 units on digits and breast"
            f" cancer, {_share(list(paper.values()), 'chance')} cells are at chance. The"
        ]
        lines += [
            f"warning fired in {_share(lost, 'told')} of them, and in {_share(fine, 'told')} cells that are not, of all"
            " priors, where it was looked at: not in those of `estimator`.",
            "Cells of `fit_table` and `estimator-auto` are in neither count.",
            "",
        ]
    lines += _beside_mean_field(cells)
    doors = [cell for key, cell in cells.items() if key[3] in _AS_THEY_COME]
    if doors:
        share = sum(cell["level"] for cell in doors) / len(doors)
        named = " and ".join(f"`{name}`" for name in _AS_THEY_COME)
        lines += [f"Over all tables, {named} are level in {_share(doors, 'level')} cells ({share:.0%}).", ""]
    return "\n".join(lines)


def _beside_mean_field(cells: Cells) -> list[str]:
    """Say how guides with widths do in the cells of mean field: they were measured in different samples of the map."""
    early = {key[:4]: cell for key, cell in cells.items() if key[4:] == ("default", 2_000)}
    lines = []
    for guide in ("low-rank", "multiplicative", "mixture", "smooth-dropout"):
        both = [(cell, early.get((*key[:3], "mean-field"))) for key, cell in early.items() if key[3] == guide]
        pairs = [(cell, other) for cell, other in both if other is not None]
        if pairs:
            mine, others = (_share([pair[k] for pair in pairs], "level") for k in (0, 1))
            apart = sum(cell["gain"] - other["gain"] for cell, other in pairs) / len(pairs)
            lines.append(f"- {guide}: level in {mine}, mean field in {others}; mean difference {apart:+.3f} nats")
    return ["In the cells that both have, after 2,000 steps:", "", *lines, ""] if lines else []


def read() -> Cells:
    """Return the cells of the page."""
    with (_DOCS / "results/defaults.csv").open(encoding="utf-8") as file:
        rows = [{name: _value(each) for name, each in row.items()} for row in csv.DictReader(file)]
    return {tuple(row.pop(name) for name in _KEY): row for row in rows}


def _value(text: str) -> Any:
    if text in ("True", "False"):
        return text == "True"
    try:
        return float(text) if "." in text or "e" in text.lower() else int(text)
    except ValueError:
        return text


def write(cells: Cells) -> None:
    """Write the cells and their tables, and draw the picture."""
    with (_DOCS / "results/defaults.csv").open("w", encoding="utf-8", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow([*_KEY, *next(iter(cells.values()))])
        rounded = ([round(v, 4) if type(v) is float else v for v in cell.values()] for cell in cells.values())
        out.writerows([*key, *values] for key, values in zip(cells, rounded, strict=True))
    page = _DOCS / "results/defaults.md"
    before, rest = page.read_text("utf-8").split(_BEGIN)
    page.write_text(f"{before}{_BEGIN}\n{text(cells)}\n{_END}{rest.split(_END)[1]}", "utf-8")
    _draw(cells, _DOCS / "figures/defaults.png")


def _draw(cells: Cells, path: Path) -> None:
    """Draw networks against tables for each guide, coloured by the difference to plain torch after 2,000 steps."""
    import matplotlib.pyplot as plt
    import numpy as np

    names = list(dict.fromkeys(key[3] for key in cells if key[4] == "default" and key[0] not in NEW))
    tables, nets = (*CHOSEN_ON, *REPORTED), [(depth, width) for depth in DEPTHS for width in WIDTHS]
    columns = 3
    lines = -(-len(names) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(11, 2.1 * lines + 0.8), layout="constrained", squeeze=False)
    for ax, name in zip(axes.flat, names, strict=False):
        grid = np.full((len(tables), len(nets)), np.nan)
        for i, table in enumerate(tables):
            for j, net in enumerate(nets):
                cell = cells.get((table, *net, name, "default", 2_000))
                grid[i, j] = np.nan if cell is None else np.clip(cell["gain"], -0.5, 0.5)
        image = ax.imshow(grid, cmap="RdBu", vmin=-0.5, vmax=0.5, aspect="auto")
        ax.set_facecolor("0.92")
        ax.set_title(name, fontsize=9)
        ax.set_xticks(range(len(nets)), [f"{width}" for _, width in nets], fontsize=6, rotation=90)
        ax.set_yticks(range(len(tables)), tables, fontsize=7)
        for edge in (3.5, 7.5):
            ax.axvline(edge, color="0.3", linewidth=0.8)
    for ax in axes.flat[len(names) :]:
        ax.set_axis_off()
    for ax in axes[-1]:
        ax.set_xlabel("units in 1 | 2 | 3 hidden layers", fontsize=8)
    bar = figure.colorbar(image, ax=axes, shrink=0.7)
    bar.set_label(
        "log-likelihood minus that of plain torch, 2,000 steps\n(nats per test row, cut at ±0.5; grey: not measured)"
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)
