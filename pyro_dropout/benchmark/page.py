"""The page of a benchmark: for every problem a picture, the scores and the ranks, in one self-contained file."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from pyro_dropout.benchmark.problems import Problem
from pyro_dropout.benchmark.reference import Reference
from pyro_dropout.benchmark.scores import COSTS
from pyro_dropout.comparison.figure import COLOURS, GREY, short
from pyro_dropout.comparison.findings import Findings
from pyro_dropout.comparison.report.page import picture, rendered, table_of
from pyro_dropout.prediction.plot_style import finish, literal_text
from pyro_dropout.protocols import Axes, Figure

Band = Mapping[str, Tensor]  # mean, low and high of every quantity
_ACROSS = 4  # panels beside each other
_GROUPS: dict[str, tuple[str, ...]] = {
    "Width, divided by the reference's": ("width", "width_gap", "width_outside"),
    "Cost": tuple(COSTS),
}


@dataclass(frozen=True)
class Part:
    """What the page shows of one problem: scores, ranks, and the bands of the posteriors that have one."""

    problem: Problem
    scores: Findings
    ranks: Findings
    bands: Mapping[str, Band]


def page(parts: list[Part], entries: list[str], facts: Mapping[str, str]) -> str:
    """Return the whole page."""
    told = []
    for part in parts:
        problem, known = part.problem, part.problem.reference
        left = set(part.scores.columns) - {key for group in _GROUPS.values() for key in group}
        groups: dict[str, Iterable[str]] = {"Distance to the reference": left, **_GROUPS}
        told.append({
            "name": problem.name, "title": problem.title, "about": problem.about, "held_out": problem.held_out,
            "picture": picture(partial(draw, part, entries)), "alt": _told(problem),
            "table": table_of(part.scores, groups), "ranks": table_of(part.ranks, groups),
            "notes": [(row.name, row.note) for row in part.scores.rows if row.note],
            "reference": known.how if known.how == "exact" else f"{known.how}; {_checked(known)}",
        })  # fmt: skip
    title = "How close are these posteriors?"
    return rendered("benchmark.html.jinja", entries, title=title, note="", problems=told, facts=facts)


# --- the picture ------------------------------------------------------------------------------------------------------


def _checked(known: Reference) -> str:
    return f"R-hat at most {known.rhat:.4f}, effective sample sizes at least {known.ess:,.0f}"


def _told(problem: Problem) -> str:
    what = {"numbers": "f", "classes": "the probability of a class", "parameters": "every parameter"}[problem.kind]
    where = "along the input" if _is_curve(problem) else "one place each, sorted by the reference's mean"
    return f"Mean and central 95 % interval of {what}, {where}: the reference in grey, the posterior in colour"


def _is_curve(problem: Problem) -> bool:
    return problem.x_test is not None and problem.x_test.dim() == 2 and problem.x_test.shape[1] == 1


@literal_text()
def draw(part: Part, entries: list[str]) -> Figure:
    """Draw the band of every posterior over that of the reference, each on axes of its own."""
    import matplotlib.pyplot as plt

    down, across = -(-len(part.bands) // _ACROSS), min(_ACROSS, len(part.bands))
    size = (10, 2.2 * down + 0.4)
    figure, axes = plt.subplots(
        max(1, down), max(1, across), figsize=size, sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    for ax in axes.flat[len(part.bands) :]:
        ax.remove()
    for ax, (name, band) in zip(axes.flat, part.bands.items(), strict=False):
        draw_one(ax, part.problem, band, COLOURS[entries.index(name) % len(COLOURS)])
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
