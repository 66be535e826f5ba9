"""Points: one value for every latent variable, so that training finds the maximum a posteriori."""

from typing import Any

import pyro.distributions as dist
from torch import Tensor

from pyro_dropout.guides.base import GuideSite, Init, InitLoc, SiteGuide, trained
from pyro_dropout.protocols import PyroModel


class Points(SiteGuide):
    """A point for every site; its ELBO is log p(y, w) up to a constant. The members of an ``Ensemble`` by default.

    Args:
        model: any Pyro model with continuous sites.
        init: where the points start: "module", "paper", or a function of name and shape.
        init_loc_fn: where all sites start, as in Pyro's guides, such as ``init_to_median``.
    """

    def __init__(self, model: PyroModel, *, init: Init = "module", init_loc_fn: InitLoc | None = None) -> None:
        super().__init__(model, bias="map", other="map", init=init, init_loc_fn=init_loc_fn)
        self._start()

    def parameters_of(self, site: GuideSite) -> dict[str, Tensor]:
        """The value itself."""
        return {"loc": trained(site.start)}

    def weight_distribution(self, site: GuideSite, state: Any) -> Any:
        """A point."""
        return dist.Delta(state.loc, event_dim=state.loc.dim())
