"""Layer by layer: what the large-K form leaves out of a guide's KL, and a rule for when it can be used anyway.

The form is too small by E[H(z|w)], between 0 and H(z). The rule is therefore in nats: a hundredth of a nat is
negligible in an ELBO; a whole nat, a factor e in the evidence, is not.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch

from pyro_dropout.generative.random_state import seeded
from pyro_dropout.generative.trial_run import evaluating
from pyro_dropout.mathematics.divergence import kl_gap
from pyro_dropout.mathematics.errors import PyroDropoutError
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
