"""One figure about predictions and the targets of their rows: how far off they are, and how often intervals hold."""

import torch
from torch import Tensor

from pyro_dropout.errors import ShapeError
from pyro_dropout.judging.scores.calibration import LEVELS, CoverageCurve, shares_inside
from pyro_dropout.judging.scores.class_calibration import reliability
from pyro_dropout.prediction.plot_style import PALETTE, categories_below, finish, literal_text, percent
from pyro_dropout.prediction.prediction import Prediction
from pyro_dropout.protocols import Axes, Figure
from pyro_dropout.tables.encoding import Encoding

_DRAWN = 250  # rows with an interval of their own
_CONFUSED = 12  # classes with a cell of their own


@literal_text()
def picture(
    prediction: Prediction,
    y: Tensor,
    encoding: Encoding,
    *,
    ends: tuple[Tensor, Tensor] | None = None,
    level: float = 0.95,
    unfamiliar: Tensor | None = None,
    rows: str = "rows",
    title: str = "",
) -> Figure:
    """Draw how predictions compare with targets; return matplotlib's figure."""
    import matplotlib.figure

    if len(y) < 2:
        raise ShapeError(f"a picture needs at least 2 rows with a target; got {len(y)}.")
    figure = matplotlib.figure.Figure(figsize=(11, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    if encoding.classes:
        _confusion(left, prediction, y, encoding, rows)
        reliability(prediction, y, bins=10).plot(right)
        right.set_title(f"How often the most probable class is right, {len(y)} {rows}", fontsize=10)
    else:
        far = torch.zeros(len(y), dtype=torch.bool) if unfamiliar is None else unfamiliar.cpu()
        inside = _compared(left, prediction, ends or prediction.interval(level), y, encoding, level, far, rows)
        share = shares_inside(prediction, y, LEVELS)  # of whole numbers, more than the level: intervals reach to them
        CoverageCurve(LEVELS, share, torch.full_like(LEVELS, torch.nan), y.numel()).plot(right)
        right.lines[-1].set_label("the posterior's own intervals")
        if ends is not None:
            label = f"calibrated {percent(level)} interval: {percent(inside, 1)}"
            right.plot([level], [inside], "D", color=PALETTE[3], ms=7, label=label)
        right.legend(frameon=False, fontsize=8, loc="upper left")
        right.set_title(f"How often intervals hold, {len(y)} {rows}", fontsize=10)
    finish(right)
    figure.suptitle(title, fontsize=12)
    return figure


def _compared(
    ax: Axes,
    prediction: Prediction,
    ends: tuple[Tensor, Tensor],
    y: Tensor,
    encoding: Encoding,
    level: float,
    far: Tensor,
    rows: str,
) -> float:
    """Draw actual against predicted values, each with its interval; return how many are in theirs."""
    parts = (prediction.mean, *ends, y)
    mean, low, high, actual = (part.detach().cpu()[:, 0].double() + encoding.target_centre for part in parts)
    inside = ((low <= actual) & (actual <= high)).double().mean().item()
    some = torch.linspace(0, len(mean) - 1, min(len(mean), _DRAWN)).round().long()
    label = f"{percent(level)} interval"
    ax.vlines(mean[some], low[some], high[some], color=PALETTE[0], alpha=0.25, lw=1.2, label=label)
    reach = [min(mean.min(), actual.min()).item(), max(mean.max(), actual.max()).item()]
    ax.plot(reach, reach, color="0.4", lw=0.8, label="actual = predicted")
    for which, colour, label in ((~far[some], "k", ""), (far[some], PALETTE[3], "unlike the training rows")):
        if which.any():
            ax.plot(mean[some][which], actual[some][which], "o", color=colour, ms=2.5, label=label or None)
    if actual.min() > 0 and mean.min() > 0 and actual.max() > 20 * actual.min():
        ax.set(yscale="log", xscale="log")
    # All but the farthest ends of intervals: of a few rows they may be a thousand times as far away.
    known = torch.cat([low[some], high[some]])
    known = known[known.isfinite() & ((known > 0) | (ax.get_yscale() == "linear"))]
    ends_shown = [torch.quantile(known, share) for share in (0.01, 0.99)] if len(known) else []
    shown = torch.stack([actual.min(), actual.max(), mean.min(), mean.max(), *ends_shown])
    shown = shown[shown.isfinite()]
    ax.set_ylim(shown.min().item(), shown.max().item())
    finish(ax)
    ax.set(xlabel=f"predicted {encoding.target}", ylabel=f"actual {encoding.target}")
    held = f"{percent(inside, 0)} of {len(mean)} {rows} in their {percent(level)} interval"
    ax.set_title(held + (f", {len(some)} shown" if len(some) < len(mean) else ""), fontsize=10)
    ax.legend(frameon=False, fontsize=8, loc="upper left")
    return inside


def _confusion(ax: Axes, prediction: Prediction, y: Tensor, encoding: Encoding, rows: str) -> None:
    """Draw how often each class was taken for each other one."""
    from sklearn.metrics import ConfusionMatrixDisplay

    best, actual = prediction.probs.argmax(-1).cpu(), y.cpu()
    common = actual.bincount(minlength=len(encoding.classes)).argsort(descending=True, stable=True)[:_CONFUSED]
    labels = common.sort().values.tolist()
    names = [encoding.classes[k] for k in labels]
    how = {"labels": labels, "display_labels": names, "cmap": "Blues", "colorbar": False, "ax": ax}
    ConfusionMatrixDisplay.from_predictions(actual.numpy(), best.numpy(), **how)
    categories_below(ax, range(len(names)), names)
    ax.set(xlabel=f"most probable {encoding.target}", ylabel=f"actual {encoding.target}")
    more = "" if len(names) == len(encoding.classes) else f", the {len(names)} most common classes"
    right = percent((best == actual).double().mean().item(), 0)
    ax.set_title(f"{right} of {len(y)} {rows} right{more}", fontsize=10)
