"""A figure of what the large-K form leaves out of the KL, E[H(z|w)], and of when it may."""

from collections.abc import Sequence

import torch

from pyro_dropout.mathematics.checks import also, check_count, check_keep, check_positive
from pyro_dropout.mathematics.distributions import BernoulliMixture
from pyro_dropout.mathematics.divergence import kl_gap
from pyro_dropout.mathematics.label_entropy import label_entropy
from pyro_dropout.protocols import Figure

# Okabe and Ito's colour-blind-safe palette; line styles repeat the distinction in print.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
_STYLES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1)))
_WIDTHS = [1, 2, 3, 5, 8, 13, 20, 32, 50, 80, 128, 200, 320, 500, 800, 1280, 2000]


@also(num_samples="draws")
def plot_kl_gap(
    keeps: Sequence[float] = (0.5, 0.8, 0.9, 0.95, 0.99),
    scales: Sequence[float] = (0.1, 0.3, 1.0, 3.0, 10.0),
    *,
    keep: float = 0.9,
    draws: int = 400,
    seed: int = 0,
) -> Figure:
    """Plot how far the paper's large-K KL falls short of the exact one, and when the gap becomes negligible.

    On the left, the gap of one row against the separation d of its components, for several ``keeps``: beyond d = 8 it
    is below a ten-thousandth of a nat. On the right, the average gap against the number K of weights in a row whose
    means come from the prior: d grows as √K/σ, so a wide layer with σ well below the prior's scale may use the large-K
    form, and one with σ near or above it may not.

    Args:
        keeps: probabilities of keeping a row, for the left panel; up to six.
        scales: widths σ of the components in units of the prior's scale, for the right panel; up to six.
        keep: the probability of keeping a row in the right panel.
        draws: rows to average over in the right panel; short rows get up to a hundred times as many.
        seed: of the draws of the means.

    Returns:
        The figure; show it in a notebook, or save it with ``figure.savefig``.

    Example:
        >>> import pyro_dropout as pdrop
        >>> figure = pdrop.comparison.plot_kl_gap(keeps=[0.5, 0.9], scales=[0.3, 1.0], draws=20)
        >>> [axes.get_yscale() for axes in figure.axes]
        ['log', 'log']
    """
    from matplotlib.figure import Figure as Drawing

    for name, values, check in (("keeps", keeps, check_keep), ("scales", scales, check_positive)):
        for value in values:
            check(name, value)
    check_keep("keep", keep)
    check_count("draws", draws)
    figure = Drawing(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    d = torch.linspace(0, 12, 481, dtype=torch.float64)
    for each, colour, style in zip(keeps, _COLOURS, _STYLES, strict=False):
        probs = torch.tensor([each, 1 - each], dtype=torch.float64).expand(len(d), 2)
        left.plot(d, label_entropy(probs, d.square()), color=colour, linestyle=style, label=f"keep {each:g}")
    left.set(xlabel="separation $d = ‖m‖/σ$ of a row's two components", ylabel="gap $E[H(z|w)]$ in nats, one row")
    left.set_title("The gap closes as the components separate")
    generator = torch.Generator().manual_seed(seed)
    for scale, colour, style in zip(scales, _COLOURS, _STYLES, strict=False):
        gaps = []
        for width in _WIDTHS:
            # The gap varies more between short rows, so they get more draws. Each column is one row's mean.
            rows = max(draws, draws * 100 // width)
            means = torch.randn(width, rows, dtype=torch.float64, generator=generator, device="cpu")
            gaps.append(kl_gap(BernoulliMixture(means, keep, scale)).item() / rows)
        right.plot(_WIDTHS, gaps, color=colour, linestyle=style, label=f"σ = {scale:g}")
    right.set(xlabel="weights $K$ in a row, means drawn from the prior N(0, I)", ylabel="mean gap in nats, one row")
    right.set_xscale("log")
    right.set_title(f"Gap against the number of weights (keep {keep:g})")
    for axes, x, side in ((left, 0.02, "left"), (right, 0.98, "right")):
        axes.set_yscale("log")
        axes.set_ylim(1e-8, 1)
        axes.axhline(1e-4, color="0.6", linewidth=0.8)
        place = axes.get_yaxis_transform()
        axes.text(x, 1.2e-4, "a ten-thousandth of a nat", transform=place, ha=side, color="0.4", fontsize=8)
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize=8)
    return figure
