"""Full rank: q(w) = N(m, LLᵀ) with a lower-triangular L, for the whole network or for each layer.

With T below the diagonal, L = σ(I + T): T is in units of σ, and both are trained. A draw is w = m + σ(ε + Tε).
"""

from typing import Literal, Unpack

from torch import Tensor

from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.guides.base import SiteGuide, State, trained
from pyro_dropout.guides.sites import GuideSite, Options
from pyro_dropout.mathematics.checks import check_choice
from pyro_dropout.mathematics.full_rank_normal import SharedNoise, TriangularNormal
from pyro_dropout.protocols import PyroModel, SiteDistribution
from pyro_dropout.registry import guide

MOST = 8192  # numbers in a block: L has 256 MB in float32, and training needs four times as much


@guide("full-rank", make=lambda model, keep: AutoFullRank(model), order=11)
class AutoFullRank(SiteGuide):
    """A Gaussian with a full covariance matrix, over the whole network or over each layer.

    Memory grows with the square of the number of weights, so a block has at most 8,192 of them. Each draw is one
    function at all data points. The KL to a Gaussian prior is in closed form.

    Args:
        model: any Pyro model with continuous sites.
        per: "net", one covariance matrix for all sites but those in subsampled plates, which are independent Gaussians;
            "layer", one for each layer: for the sites whose names agree up to the last dot, such as a weight and its
            bias.
        init_scale: the standard deviation that every number starts with, without correlations; "auto" as in
            ``AutoMeanField``.
        bias: "gaussian", as weights; or "map", a point.
        options: ``other``, ``row_dim``, ``init``, ``create_plates`` and more: ``pyro_dropout.guides.base.SiteGuide``.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> guide = pdrop.AutoFullRank(pdrop.BayesianNet(torch.nn.Linear(3, 2)))
        >>> guide.posterior("weight").covariance_matrix.shape
        torch.Size([6, 6])
    """

    biases = ("gaussian", "map")

    def __init__(
        self,
        model: PyroModel,
        per: Literal["net", "layer"] = "net",
        **options: Unpack[Options],
    ) -> None:
        super().__init__(model, **options)
        check_choice("per", per, ("net", "layer"))
        self.per = per
        self._start()

    def parameters_of(self, site: GuideSite) -> dict[str, Tensor]:
        """Means, log widths, and rows of T with a column for each number before the last one of the site."""
        together = self._blocks()[str(self.block_of(site))]
        sizes = [each.start.numel() for each in together]
        self._check_size(site, sum(sizes))
        before = sum(sizes[: together.index(site)])
        lower = site.start.new_zeros(site.start.numel(), before + site.start.numel() - 1)
        return {
            "loc": trained(site.start),
            "log_scale": trained(self.log_width(site)),
            "lower": trained(lower) if lower.numel() else lower,
        }

    def weight_distribution(self, site: GuideSite, state: State, noise: SharedNoise | None = None) -> SiteDistribution:
        """One Gaussian over the whole tensor: with the sites of the block, or whatever the other sites are."""
        return TriangularNormal(state.loc, state.log_scale.exp(), state.lower, noise)

    def block_of(self, site: GuideSite) -> str | None:
        """Return the name of the block of a site; None for points, and for sites in subsampled plates."""
        if self.family_of(site) == "map" or site.shown_in_part(self._subsampled):
            return None
        return "" if self.per == "net" else site.name.rpartition(".")[0]

    def _check_size(self, site: GuideSite, number: int) -> None:
        """Raise an error if the block of a site is too large."""
        if number <= MOST:
            return
        where, advice = "the network", "per='layer', one matrix for each layer, if that is small enough; otherwise "
        if self.per == "layer":
            where, advice = f"layer {self.block_of(site)!r}", ""
        raise PyroDropoutError(
            f"AutoFullRank: {where} has {number:,} random weights, and their covariance matrix would take"
            f" {number**2 * site.start.element_size() / 1e9:,.1f} GB, four times as much in training; the most is"
            f" {MOST:,} weights. Use {advice}AutoLowRank(model, per='net'), or make fewer weights random with"
            " BayesianNet(net, only=...)."
        )
