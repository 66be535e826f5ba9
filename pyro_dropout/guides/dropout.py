"""Dropout: q(w_r) = p N(m_r, σ²I) + (1-p) N(0, σ²I) for every row r, which is dropout at σ = 0 (eqs. 10-12)."""

from typing import Unpack

import pyro.distributions as dist
from torch import Tensor

from pyro_dropout.generative.priors import BySite
from pyro_dropout.guides.base import SiteGuide, State, gaussian, matching, trained
from pyro_dropout.guides.sites import Bias, Common, GuideSite, check_unless_by_site, over_rows, per_row
from pyro_dropout.mathematics.checks import check_keep, check_non_negative
from pyro_dropout.mathematics.distributions import BernoulliMixture
from pyro_dropout.protocols import PyroModel, SiteDistribution
from pyro_dropout.registry import guide

KEEP = 0.95  # how probably a row is kept, by default


@guide("dropout", make=lambda model, keep: AutoDropout(model, keep=keep), density=False, compared=True, order=1)
@guide(  # with a little noise on every weight, which gives it a density
    "smooth-dropout",
    make=lambda model, keep: AutoDropout(model, keep=keep, scale=0.02, bias="gaussian", init_scale=0.02),
    order=3,
)
class AutoDropout(SiteGuide):
    """MC dropout as a posterior: each row of each weight is kept with probability ``keep``, or else is zero.

    Swap it for Pyro's ``AutoNormal`` in a script. ``scale=0`` is dropout itself and has no density: train it with
    ``pyro_dropout.ELBO`` or ``TraceMeanField_ELBO``. ``keep=1`` with ``scale=0`` makes a layer a point estimate.

    Args:
        model: any Pyro model with continuous sites.
        keep: probability that a row is kept, in (0, 1]; a number, a dict by site, or a function of the site's name.
            By default 0.95, which was chosen by test scores on three tables (docs/defaults.md).
        scale: standard deviation σ of both components, given the same way.
        bias: what happens to sites of fewer than two dimensions: "map" (a point); "gaussian" (eq. 12); "dropout", where
            the bias vector is the row of a constant input unit, and is dropped as a whole; or "dropout_each", with a
            Bernoulli variable for each bias weight, as the paper has it.
        init: where the means start: "module", "paper" (U(±√(3/fan_in))), a function of name and shape, or a fitted
            guide or a dict of weights. Means of kept rows start at 1/keep times the module's or the given weights, so
            that these are E[w].
        options: ``other``, ``row_dim``, ``init``, ``create_plates`` and more: ``pyro_dropout.guides.base.SiteGuide``.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        >>> guide = pdrop.AutoDropout(pdrop.BayesianNet(net), keep={"0.weight": 1.0, "2.weight": 0.8})
        >>> guide.posterior("2.weight")
        BernoulliMixture(event_shape=(1, 8), components=2, row_dim=1, singular=True)
        >>> bool(torch.allclose(guide.mean()["2.weight"], net[2].weight))
        True
    """

    biases = ("map", "gaussian", "dropout", "dropout_each")
    at_weights = True

    def __init__(
        self,
        model: PyroModel,
        keep: BySite = KEEP,
        scale: BySite = 0.0,
        bias: Bias = "map",
        **options: Unpack[Common],
    ) -> None:
        super().__init__(model, bias=bias, **options)
        self.keep, self.scale = keep, scale
        check_unless_by_site(check_keep, keep=keep)
        check_unless_by_site(check_non_negative, scale=scale)
        self._start()

    def parameters_of(self, site: GuideSite) -> dict[str, Tensor]:
        """M is trained; keep and σ are settings."""
        keep = self.setting("keep", self.keep, site, KEEP, check_keep)
        scale = self.setting("scale", self.scale, site, 0.0, check_non_negative)
        settings = {"keep": matching(keep, site.start)}
        if not is_number(scale, 0):
            settings["scale"] = matching(scale, site.start)
        by_row = per_row("keep", settings["keep"], site)
        return {"loc": trained(site.start / by_row if site.own else site.start), **settings}

    def weight_distribution(self, site: GuideSite, state: State) -> SiteDistribution:
        """A Bernoulli mixture over rows; a point or a Gaussian where nothing is ever dropped."""
        scale, rows = over_rows(getattr(state, "scale", 0.0), site), site.row_dim
        if site.kind == "bias":  # the row of a constant input unit, or as many rows as it has weights
            rows = "all" if self.bias == "dropout" else None
        elif is_number(self.setting("keep", self.keep, site, KEEP), 1):
            if isinstance(scale, float):
                return dist.Delta(state.loc, event_dim=state.loc.dim())
            return gaussian(state.loc, scale.log().expand(state.loc.shape))
        return BernoulliMixture(state.loc, state.keep, scale, rows, validate_args=False)

    def family_of(self, site: GuideSite) -> str:
        """As in every guide; a dropped bias is made as a weight."""
        if site.kind == "bias" and self.bias.startswith("dropout"):
            return "own" if site.plain else "gaussian"  # else it is not a row of a weight layer
        return super().family_of(site)


def is_number(value: float | Tensor, number: float) -> bool:
    """Whether ``value`` is known to be ``number``: a plain number or a single tensor element, not one for each row."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.requires_grad and float(value) == number
    return bool(value == number)
