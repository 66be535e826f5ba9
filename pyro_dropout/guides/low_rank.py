"""Low rank: q(w) = N(m, σ(I + AAᵀ)σ) with R columns in A, for each layer or for the whole network.

With V = σA the covariance is diag σ² + V Vᵀ; A is what is trained.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Literal, Self, Unpack, cast

import torch
from torch import Tensor

from pyro_dropout.errors import PyroDropoutError, RangeError
from pyro_dropout.guides.base import SiteGuide, State, trained
from pyro_dropout.guides.sites import GuideSite, Options
from pyro_dropout.mathematics.checks import check_choice, check_count
from pyro_dropout.mathematics.distributions import LowRankNormal
from pyro_dropout.mathematics.full_rank_normal import SharedNoise
from pyro_dropout.mathematics.gaussian_rows import factorised, joint_log_det, mahalanobis
from pyro_dropout.mathematics.stand_ins import is_placeholder
from pyro_dropout.mathematics.weight_distribution import LOG_2PI
from pyro_dropout.protocols import PyroModel, SiteDistribution
from pyro_dropout.registry import guide


class SharedFactor(SharedNoise):
    """What the sites of a network-wide low-rank Gaussian share in one draw: η, each other's ε, and one log det."""

    def __init__(self, directions: dict[str, Tensor]) -> None:
        super().__init__(next(iter(directions.values())).shape[-1])
        self.directions = directions
        self.noise: dict[str, Tensor] = {}

    @cached_property
    def log_det(self) -> Tensor:
        """The joint log det(I + AAᵀ) for each number of a site, computed on first use."""
        blocks = list(self.directions.values())
        return joint_log_det(blocks) / sum(map(len, blocks))

    def draw(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return η for ``shape`` draws, (*shape, R); with a new one, what sites have noted of the last is forgotten."""
        before, found = self.drawn, super().draw(shape, like)
        self.noise = self.noise if found is before else {}
        return found

    def surplus(self) -> Tensor:
        """Return (ε + Aη)ᵀ(I + AAᵀ)⁻¹(ε + Aη), with the ε and A of all sites, less its expectation: their number."""
        if self.drawn is None or len(self.noise) != len(self.directions):
            raise PyroDropoutError("the joint density of a network-wide low-rank guide needs a draw of all its sites.")
        noise = torch.cat([self.noise[name] for name in self.directions], -1)
        factor = factorised(torch.cat([*self.directions.values()]))
        return mahalanobis(noise, factor, self.drawn).squeeze(-1) - noise.shape[-1]


class NetBlock(LowRankNormal):
    """One site of a network-wide low-rank Gaussian; sites share η, and the joint determinant in proportion to size."""

    joint = True
    shared: SharedFactor

    def sample_coefficients(self, shape: Sequence[int]) -> Tensor:
        """Return the η that all sites of this draw share."""
        return self.shared.draw(shape, self.like)

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Draw this site's block of the weights."""
        value = super().rsample(sample_shape)
        assert self._draw is not None
        self.shared.noise[self.site] = self._draw.noise
        return value

    def low_rank_log_det(self) -> Tensor:
        """Return this site's share of the joint log det(I + AAᵀ), (1, 1)."""
        return (self.shared.log_det * self.rest).reshape(1, 1)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return this site's share of the joint log density of the last draw; the shares add up."""
        if is_placeholder(value):
            return super().log_prob(value)
        made = self._made_of(value)
        assert made is not None
        log_det = 2 * self.log_scale().sum() + self.low_rank_log_det().squeeze()
        # Every share expects as many as it has numbers: beside a site whose KL is in closed form it must not be moved.
        form: Tensor = made.noise.new_full(made.noise.shape[:-2], self.rest)
        if self.site == next(iter(self.shared.directions)):
            form = form + self.shared.surplus()
        return -0.5 * (form + log_det + self.rest * LOG_2PI)


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
        tensors = (state.loc, state.log_scale.exp(), state.factor)
        if not isinstance(noise, SharedFactor):
            return LowRankNormal(*tensors)
        q = NetBlock(*tensors)
        q.shared, q.site = noise, site.name
        return q

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
