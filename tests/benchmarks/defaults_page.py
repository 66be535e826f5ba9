"""What the map of defaults says: docs/results/defaults.csv, the tables of docs/results/defaults.md, and its picture."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from tests.benchmarks.defaults_doors import DOORS
from tests.benchmarks.defaults_tables import CHOSEN_ON, DEPTHS, NEW, REPORTED, WIDTHS

_DOCS = Path(__file__).parents[2] / "docs"
_AS_THEY_COME = ["fit_table", "estimator-auto"]  # these choose among priors of their own
_BEGIN, _END = "<!-- measured: begin -->", "<!-- measured: end -->"
_NET = ["table", "depth", "width"]
_TITLES = {
    "Tables that the default was chosen on": CHOSEN_ON,
    "Other tables": REPORTED,
    "Tables that were not used to choose between rules, but had been seen": NEW,
}


def judged(known: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """Return each cell of a guide beside plain torch: difference, its error, whether it is level, chance, warned."""
    rows = [row for row in known if "each" in row]
    torches = {(*row["cell"][:3], row["steps"]): row for row in rows if row["cell"][3] == "torch"}
    found = []
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
        cell = dict(zip(_NET, net, strict=True)) | {"guide": guide, "prior": prior, "steps": row["steps"]}
        cell |= {"gain": float(apart.mean()), "error": error, "level": float(apart.mean()) >= -error}
        found.append(cell | {"chance": chance, "told": any(row["told"]), "mean": float(each.mean())})
    return pd.DataFrame(found).drop_duplicates([*_NET, "guide", "prior", "steps"], keep="last")


def _share(of: "pd.Series[bool]") -> str:
    return f"{of.sum()} of {len(of)}" if len(of) else "-"


def text(cells: pd.DataFrame) -> str:
    """Return the tables in Markdown."""
    lines: list[str] = []
    default, paper = cells[cells.prior == "default"], cells[cells.prior == "paper"]
    order = default.sort_values([*_NET, "guide"]).guide.unique()
    for title, tables in _TITLES.items():
        here = default[default.table.isin(tables)]
        if here.empty:
            continue
        lines += [f"**{title}** ({', '.join(tables)})", ""]
        lines.append("| guide | level after 2,000 steps | level after 20,000 | mean difference after 2,000 |")
        lines.append("|---|---|---|---|")
        for name in [each for each in order if each in set(here.guide)]:
            mine = here[here.guide == name]
            early, late = (_share(mine.level[mine.steps == steps]) for steps in (2_000, 20_000))
            lines.append(f"| {name} | {early} | {late} | {mine.gain[mine.steps == 2_000].mean():+.3f} |")
        lines.append("")
    ours = default[~default.guide.isin(_AS_THEY_COME)]
    lines += [f"With the default prior, {_share(ours.chance)} cells are at chance.", ""]
    if len(paper):
        # Whether a door warned was not looked at.
        lost, fine = paper[paper.chance], cells[~cells.chance & ~cells.guide.isin(list(DOORS))]
        lines += [
            "With the paper's prior, `Prior()`, tried only with three hidden layers of 1,024 units on digits and",
            f"breast cancer, {_share(paper.chance)} cells are at chance. The warning fired in",
            f"{_share(lost.told)} of them, and in {_share(fine.told)} cells that are not.",
            "Cells of `fit_table` and `estimator-auto` are in neither count.",
            "",
        ]
    lines += _beside_mean_field(default[default.steps == 2_000])
    doors = cells[cells.guide.isin(_AS_THEY_COME)]
    if len(doors):
        named = " and ".join(f"`{name}`" for name in _AS_THEY_COME)
        share = f"{_share(doors.level)} cells ({doors.level.mean():.0%})"
        lines += [f"Over all tables, {named} are level in {share}.", ""]
    return "\n".join(lines)


def _beside_mean_field(early: pd.DataFrame) -> list[str]:
    """Say how guides with widths do in the cells of mean field: they were measured in different samples of the map."""
    lines = []
    for guide in ("low-rank", "multiplicative", "mixture", "smooth-dropout"):
        both = early[early.guide == guide].merge(early[early.guide == "mean-field"], on=_NET)
        if len(both):
            apart = (both.gain_x - both.gain_y).mean()
            levels = f"level in {_share(both.level_x)}, mean field in {_share(both.level_y)}"
            lines.append(f"- {guide}: {levels}; mean difference {apart:+.3f} nats")
    return ["In the cells that both have, after 2,000 steps:", "", *lines, ""] if lines else []


def read() -> pd.DataFrame:
    """Return the cells of the page."""
    return pd.read_csv(_DOCS / "results/defaults.csv")


def write(cells: pd.DataFrame) -> None:
    """Write the cells and their tables, and draw the picture."""
    cells.round(4).to_csv(_DOCS / "results/defaults.csv", index=False)
    page = _DOCS / "results/defaults.md"
    before, rest = page.read_text("utf-8").split(_BEGIN)
    page.write_text(f"{before}{_BEGIN}\n{text(cells)}\n{_END}{rest.split(_END)[1]}", "utf-8")
    _draw(cells[(cells.prior == "default") & ~cells.table.isin(NEW)], _DOCS / "figures/defaults.png")


def _draw(cells: pd.DataFrame, path: Path) -> None:
    """Draw networks against tables for each guide, coloured by the difference to plain torch after 2,000 steps."""
    import matplotlib.pyplot as plt

    tables, nets = [*CHOSEN_ON, *REPORTED], [(depth, width) for depth in DEPTHS for width in WIDTHS]
    names, columns = sorted(set(cells.guide) - set(DOORS)), 3
    lines = -(-len(names) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(11, 2.1 * lines + 0.8), layout="constrained", squeeze=False)
    for ax, name in zip(axes.flat, names, strict=False):
        mine = cells[(cells.guide == name) & (cells.steps == 2_000)]
        grid = mine.pivot(index="table", columns=["depth", "width"], values="gain").reindex(index=tables)
        gains = np.stack([grid[net] if net in grid else np.full(len(tables), np.nan) for net in nets], 1)
        image = ax.imshow(np.clip(gains, -0.5, 0.5), cmap="RdBu", vmin=-0.5, vmax=0.5, aspect="auto")
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
