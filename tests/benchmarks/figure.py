"""One picture of everything that grows: small multiples, both axes logarithmic."""

from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from tests.benchmarks.report import Curve

BLUE, VERMILION = "#0072B2", "#D55E00"  # of Okabe and Ito's palette
COLUMNS = 4


def draw(curves: list[Curve], path: Path) -> None:
    """Draw one panel for each curve, with a line of slope 1 through its last point to compare with."""
    rows = -(-len(curves) // COLUMNS)
    across = min(COLUMNS, len(curves))
    figure = Figure(figsize=(2.9 * across, 2.7 * rows + 0.3), layout="constrained")
    panels = figure.subplots(rows, across, squeeze=False).flat
    for curve, axes in zip(curves, panels, strict=False):
        linear = [curve.y[-1] * x / curve.x[-1] for x in curve.x]
        axes.plot(curve.x, linear, "--", color=VERMILION, lw=1, label="slope 1")
        axes.plot(curve.x, curve.y, "o-", color=BLUE, lw=1.8, ms=4, label="measured")
        axes.set(xscale="log", yscale="log", xlabel=curve.against, ylabel=curve.quantity)
        axes.set_xticks(curve.x, [f"{x:g}" for x in curve.x])
        axes.minorticks_off()
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_ylim(min(curve.y) / 2, max(curve.y) * 2)
        axes.set_title(f"{curve.case}\nslope {curve.slope:.2f} at the large end", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.25)
    for axes in list(figure.axes)[len(curves) :]:
        axes.set_axis_off()
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path, dpi=120)
