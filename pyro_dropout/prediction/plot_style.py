"""What all figures share: colours, text that is drawn as it is, and one way to write numbers, percentages and names."""

import contextlib
from collections.abc import Iterator, Sequence

from pyro_dropout.protocols import Axes, Record

# Okabe and Ito's blue, orange, green, vermilion, pink, light blue and a grey: safe for colour-blind readers.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#999999")

_LONG = 50  # letters of all names below an axis, from which they are written at an angle
_ASCENT = 12.0  # points from the tick to the line that names stand on


@contextlib.contextmanager
def literal_text() -> Iterator[None]:
    """Within this context, or in a function that it decorates, text is drawn literally: a $ is a $."""
    import matplotlib

    with matplotlib.rc_context({"text.parse_math": False}):
        yield


def percent(share: float, digits: int | None = None) -> str:
    """Return a share as a percentage, with as many digits as it needs, four at most.

    Where digits are given, nothing but all is 100 %, and nothing but none is 0 %.
    """
    if digits is None:
        return f"{100 * share:.4g} %"
    told = f"{100 * share:.{digits}f} %"
    near = float(told[:-2]) in (0, 100) and share not in (0, 1)
    return f"{min(max(100 * share, 0.1), 99.9):.1f} %" if near else told


def short_number(value: float, _: object = None) -> str:
    """Return a number as it is written on axes: thousands as k, millions as M, then G."""
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if unit <= abs(value) < 1e12:
            return f"{value / unit:g}{letter}"
    return f"{value:g}"


def finish(ax: Axes) -> None:
    """Give axes the look of all: no frame, large numbers short, labels away from the numbers.

    Numbers up to 10,000 on an axis that is far from 0, such as years, stay as they are.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, ScalarFormatter

    ax.spines[["top", "right"]].set_visible(False)
    ax.yaxis.labelpad = 8
    for axis in (ax.xaxis, ax.yaxis):
        if axis.get_scale() == "log":
            axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=7))
            axis.set_major_formatter(FuncFormatter(short_number))
            axis.set_minor_formatter(NullFormatter())
        low, high = sorted(axis.get_view_interval())
        most = max(abs(low), abs(high))
        large = most >= 1e4 or (most >= 1e3 and high - low >= most / 2)
        if large and axis.get_scale() == "linear" and type(axis.get_major_formatter()) is ScalarFormatter:
            axis.set_major_locator(MaxNLocator(6))
            axis.set_major_formatter(FuncFormatter(short_number))


def categories_below(ax: Axes, places: Sequence[float], names: Sequence[str]) -> None:
    """Write names below an axis, all on one line; at an angle, if they are long together."""
    turned: Record = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"}
    # Text is aligned by its box by default: a letter with an accent would push its name down.
    ax.set_xticks(places, names, va="baseline", **(turned if sum(map(len, names)) > _LONG else {}))
    ax.tick_params(axis="x", pad=_ASCENT)


def axes_or_new(ax: Axes, width: float = 5, height: float = 3.6) -> Axes:
    """Return ``ax``; if it is None, the axes of a new figure of this size, in inches."""
    if ax is not None:
        return ax
    import matplotlib.pyplot as plt

    return plt.subplots(figsize=(width, height), layout="constrained")[1]
