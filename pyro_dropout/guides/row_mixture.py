"""Row mixture: q(w_r) = Σ_l π_l N(m_rl, diag σ_rl²) for every row r, with L >= 2 components and all means free (§5)."""

from typing import Unpack

import torch
from torch import Tensor

from pyro_dropout.errors import ShapeError
from pyro_dropout.guides.base import SiteGuide, State, matching, trained
from pyro_dropout.guides.sites import GuideSite, Options
from pyro_dropout.mathematics.checks import check_count, check_non_negative, check_positive, describe
from pyro_dropout.mathematics.row_mixture_distribution import RowMixture
from pyro_dropout.protocols import PyroModel, SiteDistribution
from pyro_dropout.registry import guide


@guide("mixture", make=lambda model, keep: AutoRowMixture(model, components=2), order=7, alias="row-mixture")
class AutoRowMixture(SiteGuide):
    """Each row of each weight is drawn from a mixture of ``components`` Gaussians with free means.

    Dropout is the case of two components with one mean tied to zero. The probabilities of the components stay as they
    are: a drawn label has no gradient in its probability.

    Args:
        model: any Pyro model with continuous sites.
        components: how many Gaussians a row has, at least 2.
        probs: component probabilities; equal by default.
        scale: a fixed σ for all weights; by default the widths are learned, one for each weight and component.
        spread: how far apart the means start, in units of the weights' own standard deviation.
        options: ``other``, ``row_dim``, ``init``, ``create_plates`` and more: ``pyro_dropout.guides.base.SiteGuide``.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> guide = pdrop.AutoRowMixture(pdrop.BayesianNet(torch.nn.Linear(3, 2)), components=3)
        >>> guide.posterior("weight")
        RowMixture(event_shape=(2, 3), components=3, row_dim=1, singular=False)
    """

    at_weights = True

    def __init__(
        self,
        model: PyroModel,
        components: int = 2,
        *,
        probs: Tensor | None = None,
        scale: float | None = None,
        spread: float = 0.3,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(model, **options)
        check_count("components", components, least=2)
        if probs is not None:
            check_positive("probs", probs)
            if not isinstance(probs, Tensor) or probs.shape != (components,):
                raise ShapeError(f"probs must be a tensor of {components} numbers; got {describe(probs)}.")
        check_non_negative("spread", spread)
        if scale is not None:
            check_positive("scale", scale)
        self.components, self.scale, self.spread = components, scale, spread
        self.probs = torch.ones(components) / components if probs is None else probs / probs.sum()
        self._start()

    def parameters_of(self, site: GuideSite) -> dict[str, Tensor]:
        """Means of all components, their log widths, and the component probabilities."""
        width = site.start.std(correction=0) + 1e-2
        locs = site.start + self.spread * width * torch.randn((self.components, *site.start.shape)).to(site.start)
        found: dict[str, Tensor] = {"locs": trained(locs), "probs": self.probs.to(site.start)}
        learned = self.log_width(site).expand_as(locs)
        found["log_scale"] = trained(learned) if self.scale is None else matching(self.scale, site.start).log()
        return found

    def weight_distribution(self, site: GuideSite, state: State) -> SiteDistribution:
        """A row mixture with free means."""
        return RowMixture(state.locs, state.log_scale.exp(), state.probs, site.row_dim, validate_args=False)
