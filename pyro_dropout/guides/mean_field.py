"""Mean field: q(w) = N(m, diag σ²), an independent Gaussian for every weight and bias (Graves 2011)."""

from typing import Unpack

from torch import Tensor

from pyro_dropout.guides.base import SiteGuide, State, gaussian, trained
from pyro_dropout.guides.sites import GuideSite, Options
from pyro_dropout.protocols import PyroModel, SiteDistribution
from pyro_dropout.registry import guide


@guide("mean-field", make=lambda model, keep: AutoMeanField(model), compared=True, order=5)
class AutoMeanField(SiteGuide):
    """Independent Gaussians over all weights and biases, with learned means and widths.

    The family of Pyro's ``AutoNormal``; here with an analytic KL and a draw for each data point.

    Args:
        model: any Pyro model with continuous sites.
        init_scale: the standard deviation that every number starts with; "auto" is s/√fan_in for weights, so that the
            noise of a layer does not grow with its width, and s for all else; s is 0.1, or 0.2 and 0.3 with two and
            three hidden layers.
        options: ``other``, ``row_dim``, ``init``, ``create_plates`` and more: ``pyro_dropout.guides.base.SiteGuide``.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> guide = pdrop.AutoMeanField(pdrop.BayesianNet(torch.nn.Linear(3, 1)), init_scale=0.5)
        >>> guide.posterior("weight").stddev
        tensor([[0.5000, 0.5000, 0.5000]], grad_fn=<SqrtBackward0>)
    """

    biases = ("gaussian", "map")

    def __init__(self, model: PyroModel, **options: Unpack[Options]) -> None:
        super().__init__(model, **options)
        self._start()

    def parameters_of(self, site: GuideSite) -> dict[str, Tensor]:
        """Means and log widths, one of each for every weight."""
        return {"loc": trained(site.start), "log_scale": trained(self.log_width(site))}

    def weight_distribution(self, site: GuideSite, state: State) -> SiteDistribution:
        """Independent Gaussians."""
        return gaussian(state.loc, state.log_scale)
