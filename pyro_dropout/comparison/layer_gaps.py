"""Layer by layer: what the large-K form leaves out of a guide's KL, and by what rule it may be trusted all the same.

The form is too small by E[H(z|w)], between 0 and H(z). So the question has an answer in nats, and the rule is about
those: a hundredth of a nat changes nothing that anyone reads off an ELBO, and a whole nat, a factor e in the evidence,
does.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch

from pyro_dropout.mathematics.divergence import kl_gap
from pyro_dropout.mathematics.errors import PyroDropoutError
from pyro_dropout.mathematics.row_mixture import RowMixture
from pyro_dropout.prediction.snapshot import evaluating, seeded

Verdict = Literal["exact", "singular", "yes", "training", "no", "unknown"]

NEGLIGIBLE, MUCH = 0.01, 1.0  # nats

WORDS: dict[Verdict, str] = {
    "exact": "Exact: there is one component a row, so nothing is left out.",
    "singular": "For training only: at σ = 0 nothing is left out, but the KL itself is infinite and the form holds up"
    " to a constant.",
    "yes": "Yes: it is the KL to a hundredth of a nat.",
    "training": "For training; add the gap before ELBOs are compared.",
    "no": "No: use the exact KL, ELBO(kl='exact').",
    "unknown": "Not known: the gap of this mixture cannot be computed.",
}

SHORT: dict[Verdict, str] = {
    "exact": "exact", "singular": "training only", "yes": "yes", "training": "training only", "no": "no", "unknown": "–"
}  # fmt: skip


@dataclass(frozen=True)
class LayerGap:
    """What the large-K form does at one site.

    Attributes:
        site: its name.
        rows: how many rows it has.
        weights: in a row.
        separation: the median over rows of d, the distance of two components in units of σ; NaN where it has none.
        entropy: H(z) over all rows, in nats: the most that the gap can be.
        gap: E[H(z|w)] over all rows, in nats; NaN where it cannot be computed.
        singular: whether some weight has no width.
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
        """Whether the form may be trusted at this site."""
        if self.singular:
            return "singular"
        return "exact" if self.entropy == 0 else judged(self.gap)


def judged(gap: float) -> Verdict:
    """Return what a gap of so many nats means."""
    if math.isnan(gap):
        return "unknown"
    return "yes" if gap <= NEGLIGIBLE else "training" if gap <= MUCH else "no"


def layer_gaps(guide: Any) -> list[LayerGap]:
    """Return one line for each site that is a mixture over rows; none for a guide that has no such posterior."""
    if not callable(getattr(guide, "posterior", None)) or not callable(getattr(guide, "mean", None)):
        return []
    with evaluating(guide):
        found = [(site, guide.posterior(site)) for site in guide.mean()]
        return [_line(site, q) for site, q in found if isinstance(q, RowMixture) and _is_weight(q)]


def overall(layers: list[LayerGap]) -> Verdict:
    """Return the verdict over a whole guide: gaps add up, and one site without a density is enough for none."""
    if any(layer.singular for layer in layers):
        return "singular"
    if all(layer.verdict == "exact" for layer in layers):
        return "exact"
    return judged(math.fsum(layer.gap for layer in layers))


def _is_weight(q: RowMixture) -> bool:
    return len(q.event_shape) >= 2 or q.components > 1  # a Gaussian bias is no layer


def _line(site: str, q: RowMixture) -> LayerGap:
    probs = q.probs.double().expand(q.rows, q.components)
    entropy = float(torch.special.entr(probs).sum())
    separation = gap = math.nan
    if q.components == 2 and q.shared_covariance and entropy > 0:
        separation = float(q.separation_sq().clamp_min(0).sqrt().median())
    try:
        with seeded(0, q.like.device):
            gap = 0.0 if entropy == 0 else float(kl_gap(q))
    except PyroDropoutError:  # several components with a scale of 0: no formula, and no density to sample by
        pass
    return LayerGap(site, q.rows, q.rest, separation, entropy, gap, q.singular)
