"""The figures of the report, drawn separately so that they fit a phone, with alternative texts."""

import base64
import io
import math
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from pyro_dropout.comparison.figure import (
    calibration_curve,
    draw_band,
    draw_calibration,
    draw_rejection,
    rejection_of,
)
from pyro_dropout.comparison.findings import Findings
from pyro_dropout.generative.likelihoods.moments import is_class
from pyro_dropout.prediction.tails import is_whole
from pyro_dropout.protocols import Axes, Figure

_FONT = "system-ui, -apple-system, 'Segoe UI', 'Noto Sans', 'DejaVu Sans', sans-serif"  # inside a quoted attribute
_LOOK: dict[str, object] = {
    "font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#888888",
    "axes.labelcolor": "#333333", "xtick.color": "#555555", "ytick.color": "#555555", "legend.frameon": False,
    "legend.fontsize": 9, "lines.linewidth": 1.5, "figure.facecolor": "none", "axes.facecolor": "none",
    "savefig.dpi": 160,
    "svg.fonttype": "none",  # text stays text, in the reader's own font
    "svg.hashsalt": "pyro_dropout",  # the same comparison gives the same page
    "text.parse_math": False,  # a name may hold a dollar
}  # fmt: skip


@dataclass(frozen=True)
class Picture:
    """One figure of the page.

    Attributes:
        svg: the image.
        alt: the alternative text.
        caption: the text below it.
    """

    svg: str
    alt: str
    caption: str = ""

    @property
    def data(self) -> str:
        """The image in base64, to be embedded."""
        return base64.b64encode(self.svg.encode()).decode()


def minus(number: str) -> str:
    """Return a number with a typographic minus sign, which is as wide as a plus."""
    return f"−{number[1:]}" if number.startswith("-") else number


def band_pictures(comparison: Findings) -> list[Picture]:
    """Return the predictive bands of every posterior, one image each; none if there are several inputs."""
    found = []
    for name, curve in comparison.curves.items():
        svg = _drawn(4.8, 2.6, partial(_draw_panel, comparison=comparison, name=name), legend=False)
        x, _, low, high, std = (part.double() for part in curve)
        alt = (
            f"Predictive mean of {name} with its bands, for inputs from {x[0]:.4g} to {x[-1]:.4g}: the band that"
            f" should contain 95 % of y is between {(high - low).min():.3g} and {(high - low).max():.3g} wide, the"
            f" epistemic standard deviation between {std.min():.3g} and {std.max():.3g}."
        )
        found.append(Picture(svg, alt))
    return found


def _draw_panel(ax: Axes, comparison: Findings, name: str) -> None:
    draw_band(ax, comparison, name)
    ax.set_title(name, fontsize=11, loc="left", pad=5, color="#222222")
    ax.set_xlabel(str(comparison.settings.get("x", "x")))
    ax.set_ylabel(str(comparison.settings.get("y", "y")))


def calibration_picture(comparison: Findings) -> Picture | None:
    """Return coverage against level, or accuracy against confidence; None if there is neither."""
    answers = comparison.answers
    found = {name: calibration_curve(answer, comparison.test[1]) for name, answer in answers.items()}
    curves = {name: curve for name, curve in found.items() if curve is not None}
    if not curves:
        return None
    kinds = [answer.target_distribution for answer in answers.values()]
    regression = not any(map(is_class, kinds))
    svg = _drawn(4.8, 4.4, lambda ax: draw_calibration(ax, comparison))
    ends = {name: [100 * float(part[-1]) for part in curve] for name, curve in curves.items() if len(curve[0])}
    parts = ", ".join(f"{name} {happened:.0f} % at {said:.0f} %" for name, (said, happened) in ends.items())
    if regression:
        caption = (
            "Below the diagonal, intervals are too narrow; above it, too wide. The grey band shows what may be chance."
        )
        if any(map(is_whole, kinds)):
            caption += " Intervals of whole numbers hold more than their level, and lie above it."
        return Picture(svg, f"Coverage of central intervals against their level: {parts}.", caption)
    caption = "Below the diagonal, predictions are overconfident; above it, underconfident."
    return Picture(svg, f"Accuracy against confidence: {parts}.", caption)


def rejection_picture(comparison: Findings) -> Picture | None:
    """Return the score of the points kept as the most uncertain are rejected; None if nothing was predicted."""
    answers = comparison.answers
    if not answers or len(comparison.test[0]) < 2:
        return None
    svg = _drawn(4.8, 4.4, lambda ax: draw_rejection(ax, comparison))
    ratios = {name: rejection_of(answer, comparison.test[1]).ratio for name, answer in answers.items()}
    shares = {name: f"{100 * ratio:.0f} %" for name, ratio in ratios.items() if math.isfinite(ratio)}
    gains = ", ".join(f"{name} {minus(share)}" for name, share in shares.items())
    classes = any(is_class(answer.target_distribution) for answer in answers.values())
    what = "Accuracy" if classes else "Mean absolute error"
    caption = (
        "If the uncertainty is informative, the curve improves towards the left, where only the most certain points are"
        " kept; if it is not, the curve is flat."
    )
    if gains:
        caption += f" Share of the gain of a perfect ordering: {gains}."
    alt = f"{what} of the points kept when the most uncertain are rejected. Share of the possible gain: {gains}."
    return Picture(svg, alt, caption)


# --- drawing ----------------------------------------------------------------------------------------------------------


def _drawn(width: float, height: float, draw: Callable[[Axes], None], legend: bool = True) -> str:
    """Return a drawing as SVG, with its legend below."""
    import matplotlib.style
    from matplotlib.figure import Figure

    with matplotlib.style.context(["default", _LOOK]), warnings.catch_warnings():
        # Layout is measured in matplotlib's font, which lacks many scripts; the text is rendered in the reader's font.
        warnings.filterwarnings("ignore", message=".*missing from font.*")
        figure = Figure(figsize=(width, height), layout="constrained")
        ax = figure.subplots()
        draw(ax)
        handles, labels = ax.get_legend_handles_labels()
        if legend and handles:
            columns = 2 if len(handles) > 2 and max(map(len, labels)) < 24 else 1
            figure.legend(handles, labels, loc="outside lower center", ncols=columns)
        return _svg(figure)


def _svg(figure: Figure) -> str:
    """Return a figure as a small SVG: coordinates are cut to hundredths of a point, and fonts are the reader's."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<text\b[^>]*>", lambda tag: re.sub(r"(font: [\d.]+px) [^;\"]*", rf"\1 {_FONT}", tag[0]), text)
    return re.sub(r"<(?:path|use)\b[^>]*>", lambda tag: re.sub(r"(-?\d+\.\d\d)\d+", r"\1", tag[0]), text)
