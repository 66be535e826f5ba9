"""When the large-K form of the KL is accurate: a figure, and layer by layer what it leaves out of a guide's KL.

The form is too small by E[H(z|w)], between 0 and H(z). The rule for when it can be used anyway is therefore in nats: a
hundredth of a nat is negligible in an ELBO; a whole nat, a factor e in the evidence, is not.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.generative.random_state import seeded
from pyro_dropout.generative.trial_run import evaluating
from pyro_dropout.mathematics.argument_names import also
from pyro_dropout.mathematics.checks import check_count, check_keep, check_positive
from pyro_dropout.mathematics.distributions import BernoulliMixture
from pyro_dropout.mathematics.divergence import kl_gap
from pyro_dropout.mathematics.label_entropy import label_entropy
from pyro_dropout.mathematics.row_mixture_distribution import RowMixture

Verdict = Literal["exact", "singular", "yes", "training", "no", "unknown"]

NEGLIGIBLE, MUCH = 0.01, 1.0  # nats

WORDS: dict[Verdict, str] = {
    "exact": "Exact: each row has one component, so nothing is left out.",
    "singular": "For training only: at σ = 0 nothing is left out, but the KL itself is infinite and the form is correct"
    " only up to a constant.",
    "yes": "Yes: it equals the KL to within a hundredth of a nat.",
    "training": "For training; add the gap before comparing ELBOs.",
    "no": "No: use the exact KL, ELBO(kl='exact').",
    "unknown": "Unknown: the gap of this mixture cannot be computed.",
}

SHORT: dict[Verdict, str] = {
    "exact": "exact", "singular": "training only", "yes": "yes", "training": "training only", "no": "no", "unknown": "–"
}  # fmt: skip


@dataclass(frozen=True)
class LayerGap:
    """The error of the large-K form at one site.

    Attributes:
        site: its name.
        rows: number of rows.
        weights: number of weights in a row.
        separation: median over rows of d, the distance of two components in units of σ; NaN if undefined.
        entropy: H(z) over all rows, in nats: the upper bound of the gap.
        gap: E[H(z|w)] over all rows, in nats; NaN if it cannot be computed.
        singular: whether some weight has zero width.
    """

    site: str
    rows: int
    weights: int
    separation: float
    entropy: float
    gap: float
    singular: bool

    @property
    def verdict(self) -> Verdict:
        """Whether the form can be used at this site."""
        if self.singular:
            return "singular"
        return "exact" if self.entropy == 0 else judged(self.gap)


def judged(gap: float) -> Verdict:
    """Return the verdict for a gap in nats."""
    if math.isnan(gap):
        return "unknown"
    return "yes" if gap <= NEGLIGIBLE else "training" if gap <= MUCH else "no"


def layer_gaps(guide: object) -> list[LayerGap]:
    """Return one entry for each site that is a mixture over rows; none for a guide without such a posterior."""
    posterior, mean = getattr(guide, "posterior", None), getattr(guide, "mean", None)
    if not callable(posterior) or not callable(mean):
        return []
    with evaluating(guide):
        mixtures = {site: q for site in mean() if isinstance(q := posterior(site), RowMixture)}
        # A Gaussian bias, one component over a vector, is not a layer.
        return [_line(site, q) for site, q in mixtures.items() if len(q.event_shape) >= 2 or q.components > 1]


def overall(layers: list[LayerGap]) -> Verdict:
    """Return the verdict for a whole guide: gaps add up, and one singular site makes the guide singular."""
    if any(layer.singular for layer in layers):
        return "singular"
    if all(layer.verdict == "exact" for layer in layers):
        return "exact"
    return judged(math.fsum(layer.gap for layer in layers))


def _line(site: str, q: RowMixture) -> LayerGap:
    probs = q.probs.double().expand(q.rows, q.components)
    entropy = float(torch.special.entr(probs).sum())
    separation = gap = math.nan
    if q.components == 2 and q.shared_covariance and entropy > 0:
        separation = float(q.separation_sq().clamp_min(0).sqrt().median())
    try:
        with seeded(0, q.like.device):
            gap = 0.0 if entropy == 0 else float(kl_gap(q))
    except PyroDropoutError:  # several components with scale 0: there is no formula, and no density to sample from
        pass
    return LayerGap(site, q.rows, q.rest, separation, entropy, gap, q.singular)


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colour-blind-safe palette; line styles repeat the distinction in print.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
_STYLES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1)))
_SMALLEST = 1e-8


def _against_distance(axes: "Axes", keeps: Sequence[float]) -> None:
    d = torch.linspace(0, 12, 481, dtype=torch.float64)
    for keep, colour, style in zip(keeps, _COLOURS, _STYLES, strict=False):
        probs = torch.tensor([keep, 1 - keep], dtype=torch.float64).expand(len(d), 2)
        axes.plot(d, label_entropy(probs, d.square()), color=colour, linestyle=style, label=f"keep {keep:g}")
    axes.set(xlabel="separation $d = ‖m‖/σ$ of a row's two components", ylabel="gap $E[H(z|w)]$ in nats, one row")
    axes.set_title("The gap closes as the components separate")


def _against_width(axes: "Axes", keep: float, scales: Sequence[float], draws: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    widths = [1, 2, 3, 5, 8, 13, 20, 32, 50, 80, 128, 200, 320, 500, 800, 1280, 2000]
    for scale, colour, style in zip(scales, _COLOURS, _STYLES, strict=False):
        gaps = []
        for width in widths:
            # The gap varies more between short rows, so they get more draws. Each column is one row's mean.
            rows = max(draws, draws * 100 // width)
            means = torch.randn(width, rows, dtype=torch.float64, generator=generator, device="cpu")
            gaps.append(kl_gap(BernoulliMixture(means, keep, scale)).item() / rows)
        axes.plot(widths, gaps, color=colour, linestyle=style, label=f"σ = {scale:g}")
    axes.set(xlabel="weights $K$ in a row, means drawn from the prior N(0, I)", ylabel="mean gap in nats, one row")
    axes.set_xscale("log")
    axes.set_title(f"Gap against the number of weights (keep {keep:g})")


@also(num_samples="draws")
def plot_kl_gap(
    keeps: Sequence[float] = (0.5, 0.8, 0.9, 0.95, 0.99),
    scales: Sequence[float] = (0.1, 0.3, 1.0, 3.0, 10.0),
    *,
    keep: float = 0.9,
    draws: int = 400,
    seed: int = 0,
) -> "Figure":
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
    from matplotlib.figure import Figure

    for name, values, check in (("keeps", keeps, check_keep), ("scales", scales, check_positive)):
        for value in values:
            check(name, value)
    check_keep("keep", keep)
    check_count("draws", draws)
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    _against_distance(left, keeps)
    _against_width(right, keep, scales, draws, seed)
    for axes, x, side in ((left, 0.02, "left"), (right, 0.98, "right")):
        axes.set_yscale("log")
        axes.set_ylim(_SMALLEST, 1)
        axes.axhline(1e-4, color="0.6", linewidth=0.8)
        place = axes.get_yaxis_transform()
        axes.text(x, 1.2e-4, "a ten-thousandth of a nat", transform=place, ha=side, color="0.4", fontsize=8)
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize=8)
    return figure


def draw_layer_gaps(axes: "Axes", found: Sequence[tuple[str, str, LayerGap]]) -> None:
    """Draw the gap of every (guide, colour, layer) next to its upper bound, with the limits of the rule."""
    labels = []
    for k, (name, colour, layer) in enumerate(found):
        most, gap = max(layer.entropy, _SMALLEST), max(layer.gap, _SMALLEST)
        axes.plot([gap, most], [k, k], color=colour, linewidth=1, alpha=0.4)
        axes.plot(most, k, "|", color=colour, markersize=10, label="H(z), upper bound" if k == 0 else None)
        axes.plot(gap, k, "o", color=colour, markersize=5, label="gap E[H(z|w)]" if k == 0 else None)
        labels.append(f"{name}\n{layer.site}")
    for limit, words in ((NEGLIGIBLE, "a hundredth"), (MUCH, "one nat")):
        axes.axvline(limit, color="#888888", linestyle="--", linewidth=0.8)
        axes.text(limit, -0.72, words, ha="center", va="bottom", fontsize=8, color="#555555")
    axes.set_xscale("log")
    ticks = [10.0**k for k in range(-8, 7, 2)]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlim(_SMALLEST / 2, 3 * max(MUCH, *(layer.entropy for _, _, layer in found)))
    axes.set_ylim(len(found) - 0.4, -0.7)
    axes.set_yticks(range(len(found)), labels)
    axes.set_xlabel("nats, all rows of the layer")
