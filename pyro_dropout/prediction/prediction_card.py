"""What a notebook shows of a prediction: its first points, and all of them in a picture."""

from torch import Tensor

from pyro_dropout.guides.summary import picture, table
from pyro_dropout.prediction.plot_style import PALETTE
from pyro_dropout.protocols import Axes

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
