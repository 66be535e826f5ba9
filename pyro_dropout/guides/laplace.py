"""Laplace: q(w) = N(w*, (H + P)⁻¹) at a trained point w*, with the curvature H of the log-likelihood there.

Training finds the point: until the curvature is known, q is a point for each site. P holds the prior's precisions.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import pyro.distributions as dist
import torch
from torch import Size, Tensor
from torch.distributions import Normal

from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.guides.base import SiteGuide, State, trained
from pyro_dropout.guides.sites import GuideSite, Init, InitLoc
from pyro_dropout.mathematics.checks import check_choice
from pyro_dropout.mathematics.curvature import OF_NOISE, Curvature, log_evidence
from pyro_dropout.mathematics.curvature_blocks import Block, Dense, Diagonal, Kronecker
from pyro_dropout.mathematics.full_rank_normal import SharedNoise
from pyro_dropout.mathematics.shapes import base_distribution, keeps_density
from pyro_dropout.protocols import PyroModel, SiteDistribution, Weights
from pyro_dropout.registry import guide

Structure = Literal["full", "layer", "kron", "diagonal", "last"]
# By structure: what a block is, and whether each layer has its own.
STRUCTURES: dict[Structure, tuple[type[Dense | Diagonal | Kronecker], bool]] = {
    "full": (Dense, False),
    "layer": (Dense, True),
    "kron": (Kronecker, True),
    "diagonal": (Diagonal, False),
    "last": (Dense, False),  # of the last layer only; Kronecker if it is large
}
_PENALTY = 8.0  # of the point of "last": its other layers stay points, which nothing else regularises
MOST = 4096  # weights with one matrix by default, and in the last layer


def groups_of(structure: Structure, shapes: Mapping[str, Size]) -> tuple[type[Any], list[dict[str, Size]]]:
    """Return what the blocks of a structure are, and the sites of each with their shapes."""
    kind, by_layer = STRUCTURES[structure]
    if structure == "last" and sum(shape.numel() for shape in shapes.values()) > MOST:
        kind = Kronecker
    groups: dict[str, dict[str, Size]] = {}
    for name, shape in shapes.items():
        groups.setdefault(name.rpartition(".")[0] if by_layer else "", {})[name] = shape
    return kind, list(groups.values())


@guide("laplace", per_site=False, order=12, method="linearised")
class AutoLaplace(SiteGuide):
    """A Gaussian at a trained point, whose covariance is the inverse of the curvature there.

    ``fit`` trains the point, the maximum a posteriori, and then adds the curvature; so does ``laplace`` at a point that
    you have. Until then the guide has a point for each site. ``fit`` starts again from points. Predict with
    ``method="linearised"``: draws of the weights may leave the region where the curvature holds, and be too wide. With
    structure="last" a tempered prior, as the default of ``BayesianNet`` is, has eight times its weaker penalty at the
    point; all other structures take the prior in full.

    Equation: laplace-posterior.

    Args:
        model: a ``BayesianNet``, or one inside ``Standardised``.
        structure: which weights are correlated. "full": all of them; "layer": those of one layer; "kron": those of one
            layer, whose covariance has two Kronecker factors; "diagonal": none; "last": all of the last layer (with
            Kronecker factors above 4,096 weights), and the other layers are points. By default "full" up to 4,096
            weights and "last" above.
        init: where the point starts: "module", "paper", or a function of name and shape.
        init_loc_fn: where all sites start, as in Pyro's guides.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> x = torch.linspace(-1, 1, 20).unsqueeze(-1)
        >>> model = pdrop.BayesianNet(torch.nn.Linear(1, 1), likelihood=pdrop.Gaussian(tau=100.0))
        >>> guide = pdrop.guides.AutoLaplace(model)
        >>> _ = pdrop.fit(model, guide, x, 2 * x, steps=500, lr=0.02, compile=False, progress=False, seed=0)
        >>> guide.posterior("weight").stddev.item() < 0.05
        True
    """

    def __init__(
        self,
        model: PyroModel,
        structure: Structure | None = None,
        *,
        init: Init = "module",
        init_loc_fn: InitLoc | None = None,
    ) -> None:
        if not all(hasattr(model, name) for name in ("evaluate", "prior_of", "sample_sites", "likelihood")):
            raise PyroDropoutError(
                "AutoLaplace needs a BayesianNet, whose outputs and likelihood have a curvature; got"
                f" {type(model).__name__}. For other Pyro models, Pyro has AutoLaplaceApproximation."
            )
        net: Any = model
        for name in net.sites:
            prior = base_distribution(net.prior_of(name))
            if not keeps_density(prior, Normal):
                raise PyroDropoutError(
                    f"AutoLaplace knows the curvature of Gaussian priors, and that of {name!r} is a"
                    f" {type(prior).__name__}. Use AutoLowRank, or Pyro's AutoLaplaceApproximation."
                )
        if structure is not None:
            check_choice("structure", structure, tuple(STRUCTURES), "None")
        super().__init__(model, bias="map", other="map", init=init, init_loc_fn=init_loc_fn)
        self.set_curvature(None)
        self._start()
        size = sum(site.start.numel() for site in self._sites.values())
        self.structure: Structure = ("full" if size <= MOST else "last") if structure is None else structure
        self.prior_factor = 1.0
        self.penalty = _PENALTY if self.structure == "last" else math.inf

    def parameters_of(self, site: GuideSite) -> dict[str, Tensor]:
        """The point."""
        return {"loc": trained(site.start)}

    def weight_distribution(self, site: GuideSite, state: State, noise: SharedNoise | None = None) -> SiteDistribution:
        """A point, or what the curvature makes of it: drawn with the others of its block, or by itself."""
        block, loc = self._block(site.name), state.loc
        if block is None:
            return dist.Delta(loc, event_dim=loc.dim())
        found: SiteDistribution = block.distribution(site.name, loc, noise)
        return found

    # --- the curvature ------------------------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """Whether the curvature is known, so that q is a Gaussian."""
        return self._modules["measured"] is not None

    @property
    def curvature(self) -> Curvature:
        """The curvature at the point, without the prior: blocks, the log-likelihood there, and the number of data."""
        found = self._modules["measured"]
        if not isinstance(found, Curvature):
            raise PyroDropoutError(
                "AutoLaplace has no curvature yet: train it with fit, or write laplace(model, guide, x, y)."
            )
        return found

    def log_evidence(self) -> Tensor:
        """Return log p(D) of the Laplace approximation, in float64.

        Where sites are points (structure="last"), it is the evidence given their values. Inside ``Standardised`` it is
        that of the raw targets. ``maximise_evidence`` finds the settings under which it is largest.

        Example:
            >>> import torch, pyro_dropout as pdrop
            >>> x, net = torch.linspace(-1, 1, 20).unsqueeze(-1), torch.nn.Linear(1, 1)
            >>> model, wide = (pdrop.BayesianNet(net, pdrop.Prior(length_scale)) for length_scale in (1.0, 0.5))
            >>> point = {"weight": torch.tensor([[2.0]]), "bias": torch.zeros(1)}
            >>> first, second = (pdrop.laplace(each, point, x, 2 * x).log_evidence() for each in (model, wide))
            >>> bool(first < second)  # a weight of 2 is more probable under a prior of width 2
            True
        """
        return log_evidence(self.curvature, self.point())

    def point(self) -> Weights:
        """Return the point itself, not a copy of it."""
        return {name: self._state(site).loc.detach() for name, site in self._sites.items()}

    def set_curvature(self, curvature: Curvature | None) -> None:
        """Make q the Gaussian with this curvature; with None, points again."""
        self._modules["measured"] = curvature

    @contextmanager
    def room_for(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Make room for the curvature in a file, given as the tensors of this guide; an error restores what was."""
        before, prefix = self._modules["measured"], "measured."
        shapes = {name: site.start.shape for name, site in self._sites.items()}
        own = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
        names = list(shapes)
        if self.structure == "last":  # those of the block in the file
            keys = [name.split(".")[1] for name in own if name.startswith("blocks.")]
            names = keys[0].replace("/", ".").split(",") if keys else []
        try:
            self.set_curvature(None)
            if own and set(names) <= set(shapes):
                device = next(self.parameters()).device
                kind, groups = groups_of(self.structure, {name: shapes[name] for name in names})
                ones = dict.fromkeys(names, torch.ones((), device=device))
                noise = {name: torch.zeros_like(own[name]) for name in OF_NOISE if name in own}
                blocks = [kind(group, ones) for group in groups]
                self.set_curvature(Curvature(blocks, torch.zeros((), device=device), 0, noise))
            yield
        except BaseException:
            self._modules["measured"] = before
            raise

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load the tensors of another guide, with its curvature."""
        with self.room_for(state_dict):
            return super().load_state_dict(state_dict, *args, **kwargs)

    @property
    def learned_buffers(self) -> tuple[str, ...]:
        """The buffers that training sets."""
        return tuple(name for name, _ in self.named_buffers())

    def extra_repr(self) -> str:
        """Return the structure, and whether the curvature is known."""
        kinds = {type(block).__name__ for block in self.curvature} if self.finished else set()
        return f"structure={self.structure!r}, " + (f"blocks: {', '.join(kinds)}" if kinds else "a point so far")

    def _block(self, name: str) -> Block | None:
        """Return the block that a site belongs to; None for a point."""
        return next((block for block in (self.curvature if self.finished else ()) if name in block.shapes), None)

    # --- distributions ------------------------------------------------------------------------------------------------

    def family_of(self, site: GuideSite) -> str:
        """Every site's q is made by the curvature."""
        return "own"

    def block_of(self, site: GuideSite) -> str | None:
        """Return the name of the block of a site whose numbers share noise."""
        block = self._block(site.name)
        return ",".join(block.shapes) if block is not None and block.sites_share else None

    def layer_covariance(self, features: Tensor, sites: Sequence[str]) -> Tensor | None:
        """Return Cov[W φ + b] of a layer at N points, (N, outputs, outputs), from φ alone, if it is a block."""
        block = self._block(sites[0])
        if block is None or not block.sites_share or set(block.shapes) != set(sites):
            return None
        return block.layer_covariance(features)
