"""Multiplicative noise: w = m(1 + √α ε) + σ ε', Gaussian dropout with N(1, α) (§5; Kingma et al. 2015)."""

from typing import Literal, Unpack

from torch import Tensor

from pyro_dropout.generative.priors import BySite
from pyro_dropout.guides.base import SiteGuide, State, matching, trained
from pyro_dropout.guides.dropout import is_number
from pyro_dropout.guides.sites import GuideSite, Options, check_unless_by_site, over_rows
from pyro_dropout.mathematics.checks import check_choice, check_flag, check_non_negative, check_positive
from pyro_dropout.mathematics.distributions import MultiplicativeNormal
from pyro_dropout.protocols import PyroModel, SiteDistribution
from pyro_dropout.registry import guide


@guide(  # α with dropout's variance, (1 - keep)/keep, and next to none where a row is always kept
    "multiplicative",
    make=lambda model, keep: AutoMultiplicative(
        model, lambda site: max((1 - keep(site)) / keep(site), 1e-6), scale=0.02, bias="gaussian", init_scale=0.02
    ),
    compared=True,
    order=4,
)
class AutoMultiplicative(SiteGuide):
    """Weights multiplied by Gaussian noise N(1, α), one draw for each row or for each weight.

    With one draw for each row it is Gaussian dropout; α = (1-keep)/keep has dropout's variance. At ``scale=0`` it is
    singular by row, as dropout is.

    Args:
        model: any Pyro model with continuous sites.
        alpha: variance of the noise; a number, a dict by site, or a function of the site's name. Where it is learned,
            this is where it starts.
        per: "row" or "weight".
        learn_alpha: whether α is trained, one for each site.
        scale: standard deviation of added noise, given like ``alpha``; gives rows a density.
        options: ``other``, ``row_dim``, ``init``, ``create_plates`` and more: ``pyro_dropout.guides.base.SiteGuide``.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> model = pdrop.BayesianNet(torch.nn.Linear(3, 1))
        >>> guide = pdrop.AutoMultiplicative(model, alpha=0.25, per="weight")
        >>> q = guide.posterior("weight")
        >>> bool(torch.allclose(q.stddev, 0.5 * q.mean.abs()))
        True
    """

    at_weights = True

    def __init__(
        self,
        model: PyroModel,
        alpha: BySite = 0.1,
        *,
        per: Literal["row", "weight"] = "row",
        learn_alpha: bool = False,
        scale: BySite = 0.0,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(model, **options)
        check_choice("per", per, ("row", "weight"))
        check_flag("learn_alpha", learn_alpha)
        check_unless_by_site(check_positive, alpha=alpha)
        check_unless_by_site(check_non_negative, scale=scale)
        self.alpha, self.per, self.learn_alpha, self.scale = alpha, per, learn_alpha, scale
        self._start()

    def parameters_of(self, site: GuideSite) -> dict[str, Tensor]:
        """Means are trained; α is trained or a setting; σ is a setting."""
        alpha = self.setting("alpha", self.alpha, site, 0.1, check_positive)
        scale = self.setting("scale", self.scale, site, 0.0, check_non_negative)
        log_alpha = matching(alpha, site.start).log()
        found: dict[str, Tensor] = {"loc": trained(site.start)}
        found["log_alpha"] = trained(log_alpha) if self.learn_alpha else log_alpha
        if not is_number(scale, 0):
            found["scale"] = matching(scale, site.start)
        return found

    def weight_distribution(self, site: GuideSite, state: State) -> SiteDistribution:
        """Multiplicative normal over rows or over single weights."""
        row_dim = site.row_dim if self.per == "row" else None
        scale, alpha = over_rows(getattr(state, "scale", 0.0), site), state.log_alpha.exp()
        alpha = over_rows(alpha, site) if row_dim is None else alpha
        return MultiplicativeNormal(state.loc, alpha, scale, row_dim, validate_args=False)
