"""Mean field: q(w) = N(m, diag σ²), an independent Gaussian for every weight and bias (Graves 2011)."""

from collections.abc import Callable

from torch import Tensor

from pyro_dropout.guides.base import Family, Shared, SiteGuide, State, gaussian, trained
from pyro_dropout.guides.nearest import model_of, nearest_to, set_state
from pyro_dropout.guides.sites import GuideSite, Init, InitLoc
from pyro_dropout.guides.starts import InitScale
from pyro_dropout.protocols import HasMoments, PyroModel, SiteDistribution
from pyro_dropout.registry import guide


@guide("mean-field", make=lambda model, keep: AutoMeanField(model), compared=True, order=5)
class AutoMeanField(SiteGuide):
    """Independent Gaussians over all weights and biases, with learned means and widths.

    The family of Pyro's ``AutoNormal``; here with an analytic KL and a draw for each data point.

    Args:
        model: any Pyro model with continuous sites.
        init: where the means start: "module", "paper", a function of name and shape, or a fitted guide or a dict of
            weights.
        init_scale: the standard deviation that every number starts with; "auto" is 0.1/√fan_in for weights, so that the
            noise of a layer does not grow with its width, and 0.1 for all else.
        bias: "gaussian", as weights; or "map", a point.
        other: scalars, constrained sites and sites in plates: "gaussian" in unconstrained space, or "map".
        init_loc_fn: where all sites start, as in Pyro's guides, such as ``init_to_median``.
        create_plates: as in Pyro's AutoGuide.

    Example:
        >>> import torch, pyro_dropout as pd
        >>> guide = pd.AutoMeanField(pd.BayesianNet(torch.nn.Linear(3, 1)), init_scale=0.5)
        >>> guide.posterior("weight").stddev
        tensor([[0.5000, 0.5000, 0.5000]], grad_fn=<SqrtBackward0>)
    """

    def __init__(
        self,
        model: PyroModel,
        *,
        init: Init = "module",
        init_scale: InitScale = "auto",
        bias: Family = "gaussian",
        other: Family = "gaussian",
        init_loc_fn: InitLoc | None = None,
        create_plates: Callable[..., object] | None = None,
    ) -> None:
        shared: Shared = {"init": init, "init_loc_fn": init_loc_fn, "init_scale": init_scale, "other": other}
        super().__init__(model, bias=bias, create_plates=create_plates, **shared)
        self._start()

    @classmethod
    def nearest(cls, guide: HasMoments, *, model: PyroModel | None = None) -> "AutoMeanField":
        """Return the mean field that is nearest to a Gaussian guide, in KL(q‖guide), with the same mean.

        It can be used as it is, or trained further.

        Args:
            guide: a guide with a covariance, such as ``laplace(...)``, of at most 8,192 weights.
            model: the model of the new guide; by default that of ``guide``.

        Example:
            >>> import torch, pyro_dropout as pd
            >>> full = pd.AutoFullRank(pd.BayesianNet(torch.nn.Linear(3, 1)), init_scale=0.5)
            >>> pd.AutoMeanField.nearest(full).posterior("weight").stddev.detach()
            tensor([[0.5000, 0.5000, 0.5000]])
        """
        made = cls(model_of(guide, model), init=guide)
        set_state(made, log_scale={name: width.log() for name, width in nearest_to(guide, 0)[0].items()})
        return made

    def parameters_of(self, site: GuideSite) -> dict[str, Tensor]:
        """Means and log widths, one of each for every weight."""
        return {"loc": trained(site.start), "log_scale": trained(self.log_width(site))}

    def weight_distribution(self, site: GuideSite, state: State) -> SiteDistribution:
        """Independent Gaussians."""
        return gaussian(state.loc, state.log_scale)
