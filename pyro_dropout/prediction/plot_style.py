"""What all figures share: colours, text that is drawn as it is, and one way to write numbers, percentages and names.

And what a notebook shows of a prediction: its first points, and all of them in a picture.
"""

import contextlib
from collections.abc import Iterator, Sequence

from torch import Tensor

from pyro_dropout.guides.summary import picture, table
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
    """Return a share as a percentage; by default with as many digits as it needs, four at most.

    Where digits are given, nothing but all is 100 %, and nothing but none is 0 %.

    Example:
        >>> percent(0.95), percent(0.995), percent(0.8333, 0), percent(0.9967, 0)
        ('95 %', '99.5 %', '83 %', '99.7 %')
    """
    if digits is None:
        return f"{100 * share:.4g} %"
    told = f"{100 * share:.{digits}f} %"
    near = float(told[:-2]) in (0, 100) and share not in (0, 1)
    return f"{min(max(100 * share, 0.1), 99.9):.1f} %" if near else told


def short_number(value: float, _: object = None) -> str:
    """Return a number as it is written on axes: thousands as k, millions as M, then G.

    Example:
        >>> [short_number(value) for value in (0.01, 700, 1500, 2e6)]
        ['0.01', '700', '1.5k', '2M']
    """
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if unit <= abs(value) < 1e12:
            return f"{value / unit:g}{letter}"
    return f"{value:g}"


def finish(ax: Axes) -> None:
    """Give axes the look of all: no frame, large numbers short, labels away from the numbers.

    Numbers up to 10,000 on an axis that is far from 0, such as years, stay as they are.

    Example:
        >>> from matplotlib.figure import Figure
        >>> ax = Figure().subplots()
        >>> ax.set_ylim(0, 6000)
        (0.0, 6000.0)
        >>> finish(ax)
        >>> ax.yaxis.get_major_formatter()(1500)
        '1.5k'
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
    """Write names below an axis, all on one line; at an angle, if they are long together.

    Example:
        >>> from matplotlib.figure import Figure
        >>> ax = Figure().subplots()
        >>> categories_below(ax, [0, 1], ["Audi", "Škoda"])
        >>> [text.get_text() for text in ax.get_xticklabels()]
        ['Audi', 'Škoda']
    """
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


_FIRST, _DRAWN = 5, 300  # rows of the table, and points of the picture


def numbers_card(title: str, *of_points: Tensor) -> str:
    """Return HTML of numbers: their mean, standard deviation, and that of the mean, each (N, 1)."""
    mean, std, doubt = (value.detach().double().cpu()[:, 0] for value in of_points)
    rows = [[k, *(f"{float(value[k]):.4g}" for value in (mean, std, doubt))] for k in range(min(_FIRST, len(mean)))]

    def draw(ax: Axes) -> None:
        order = mean.argsort()[:: max(1, len(mean) // _DRAWN)]
        places = range(len(order))
        low, high = (mean - 2 * std)[order], (mean + 2 * std)[order]
        ax.fill_between(places, low, high, color=PALETTE[0], alpha=0.25, label="± 2 standard deviations")
        ax.plot(places, mean[order], color=PALETTE[0], label="mean")
        ax.set(xlabel="points, sorted by their mean", ylabel="y")
        ax.legend(frameon=False, fontsize="small")

    heads = ["point", "mean", "std. of y", "of that, doubt about the mean"]
    return f"<div><b>{title}</b>{table(heads, rows)}{picture(draw)}</div>"


def classes_card(title: str, probs: Tensor) -> str:
    """Return HTML of classes, from their probabilities, (N, C)."""
    probs = probs.detach().double().cpu()
    rows = [[k, *(f"{float(p):.3f}" for p in probs[k, :8])] for k in range(min(_FIRST, len(probs)))]
    top = probs.amax(1) if probs.shape[1] > 1 else probs[:, 0]

    def draw(ax: Axes) -> None:
        ax.hist(top.numpy(), bins=20, range=(0, 1), color=PALETTE[0])
        what = "of the most probable class" if probs.shape[1] > 1 else "of class 1"
        ax.set(xlabel=f"probability {what}", ylabel="points")

    names = [f"class {k}" for k in range(min(8, probs.shape[1]))] if probs.shape[1] > 1 else ["class 1"]
    return f"<div><b>{title}</b>{table(['point', *names], rows)}{picture(draw)}</div>"
