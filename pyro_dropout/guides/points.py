"""Points: one value for every latent variable, so that training finds the maximum a posteriori."""

from typing import Any

import pyro.distributions as dist
from torch import Tensor

from pyro_dropout.guides.base import GuideSite, Init, InitLoc, SiteGuide, trained
from pyro_dropout.guides.dependent_widths import dependent_width
from pyro_dropout.mathematics.errors import PyroDropoutError
from pyro_dropout.protocols import PyroModel


class Points(SiteGuide):
    """A point for every site; its ELBO is log p(y, w) up to a constant. The members of an ``Ensemble`` by default.

    Args:
        model: any Pyro model with continuous sites.
        init: where the points start: "module", "paper", a function of name and shape, or a fitted guide or a dict of
            weights.
        init_loc_fn: where all sites start, as in Pyro's guides, such as ``init_to_median``.
    """

    def __init__(self, model: PyroModel, *, init: Init = "module", init_loc_fn: InitLoc | None = None) -> None:
        super().__init__(model, bias="map", other="map", init=init, init_loc_fn=init_loc_fn)
        self._start()

    def _setup_prototype(self, *args: object, **kwargs: object) -> None:
        super()._setup_prototype(*args, **kwargs)
        if hasattr(self.model, "sample_sites"):
            return  # a network, whose priors are fixed
        found = dependent_width(self.model, self.prototype_trace, args, kwargs)
        if found is not None:
            self.prototype_trace = None
            site, other = found
            raise PyroDropoutError(
                f"the width of site {site!r} depends on {other!r}, another latent site, so the density of points grows"
                f" without bound where the width is zero. Sample a standard normal and scale it, as in {site} = mu +"
                f" {other} * z (pyro.infer.reparam.LocScaleReparam), or give the ensemble members with a width, such as"
                " AutoMeanField."
            )

    def parameters_of(self, site: GuideSite) -> dict[str, Tensor]:
        """The value itself."""
        return {"loc": trained(site.start)}

    def weight_distribution(self, site: GuideSite, state: Any) -> Any:
        """A point."""
        return dist.Delta(state.loc, event_dim=state.loc.dim())
