"""Low rank: q(w) = N(m, σ(I + AAᵀ)σ) with R columns in A, for each layer or for the whole network.

With V = σA the covariance is diag σ² + V Vᵀ; A is what is trained.
"""

from collections.abc import Callable
from typing import Literal, Self, Unpack, cast

import torch
from torch import Tensor

from pyro_dropout.errors import RangeError
from pyro_dropout.guides.base import SiteGuide, State, trained
from pyro_dropout.guides.sites import GuideSite, Options
from pyro_dropout.mathematics.checks import check_choice, check_count
from pyro_dropout.mathematics.distributions import LowRankNormal, SharedFactor
from pyro_dropout.mathematics.full_rank_normal import SharedNoise
from pyro_dropout.protocols import PyroModel, SiteDistribution
from pyro_dropout.registry import guide


def _laid_out(factor: Tensor) -> Tensor:
    """Return A, (..., K, R), as it is used fastest: its columns together on a CPU, and its rows on a GPU."""
    return factor.mT.contiguous().mT if factor.device.type == "cpu" else factor.contiguous()


@guide("low-rank", make=lambda model, keep: AutoLowRank(model, rank=5), compared=True, order=6)
class AutoLowRank(SiteGuide):
    """Gaussians with a diagonal plus rank-R covariance, for each layer or across the network.

    Args:
        model: any Pyro model with continuous sites.
        rank: R, the number of columns of A.
        per: "layer", each weight site has its own A and all other sites are independent Gaussians; "net", one A
            for all sites but those in subsampled plates, which are independent Gaussians.
        init_scale: the standard deviation that every number starts with, "auto" as in ``AutoMeanField``; a hundredth of
            its square comes from A, and with ``per="net"`` about half, as in Pyro's AutoLowRankMultivariateNormal.
        bias: with ``per="layer"``: "gaussian" or "map".
        options: ``other``, ``row_dim``, ``init``, ``create_plates`` and more: ``pyro_dropout.guides.base.SiteGuide``.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> guide = pdrop.AutoLowRank(pdrop.BayesianNet(torch.nn.Linear(3, 2)), rank=4)
        >>> guide.posterior("weight")
        LowRankNormal(event_shape=(2, 3), components=1, row_dim=all, rank=4, singular=False)
    """

    biases = ("gaussian", "map")

    def __init__(
        self,
        model: PyroModel,
        rank: int = 10,
        per: Literal["layer", "net"] = "layer",
        **options: Unpack[Options],
    ) -> None:
        super().__init__(model, **options)
        if str(rank) == "full":
            raise RangeError(f"rank must be a number; a full covariance matrix is AutoFullRank(model, per={per!r}).")
        check_count("rank", rank)
        check_choice("per", per, ("layer", "net"))
        self.rank, self.per = rank, per
        self.at_weights = per == "layer"
        self._start()

    def parameters_of(self, site: GuideSite) -> dict[str, Tensor]:
        """Means, log widths, and A with R columns."""
        # The gradient of a correlation is in proportion to A: from a small A it is learned late.
        share = 1.0 if self.per == "net" else 0.1
        factor = torch.randn(site.start.numel(), self.rank).to(site.start) * (share / self.rank**0.5)
        added = factor.square().sum(-1).reshape(site.start.shape)
        width = self.log_width(site) - 0.5 * added.log1p()
        return {"loc": trained(site.start), "log_scale": trained(width), "factor": trained(_laid_out(factor))}

    def weight_distribution(self, site: GuideSite, state: State, noise: SharedNoise | None = None) -> SiteDistribution:
        """One Gaussian over the whole tensor: with the other sites, or by itself."""
        shared = cast(SharedFactor | None, noise)
        return LowRankNormal(state.loc, state.log_scale.exp(), state.factor, shared, site.name)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the guide, as ``to`` does, and lay A out for the device that it is on then."""
        moved = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, value in self._states.named_parameters():
            if name.endswith(".factor"):
                value.data = _laid_out(value.data)
        return cast(Self, moved)

    def block_of(self, site: GuideSite) -> str | None:
        """Return the block of the network; None for sites in subsampled plates, whose elements are never together."""
        return "net" if self.per == "net" and not site.shown_in_part(self._subsampled) else None

    def shared_noise(self, sites: list[GuideSite]) -> SharedNoise:
        """Return η, and what else the sites of the network share."""
        return SharedFactor({site.name: self._state(site).factor for site in sites})
