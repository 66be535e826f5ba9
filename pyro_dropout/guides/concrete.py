"""Concrete dropout: dropout's q(w) with ``keep`` learned, its coin flips relaxed to s = sigmoid((logit p + logit u)/t).

The relaxation is Gal, Hron and Kendall's (2017). It is used while training, where a gradient in p is needed; the
posterior that comes out, and what is sampled from it, is the Bernoulli mixture itself.
"""

from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor

from pyro_dropout.errors import RangeError
from pyro_dropout.generative.priors import BySite
from pyro_dropout.guides.base import SiteGuide, State, matching, trained
from pyro_dropout.guides.sites import GuideSite, Options, check_unless_by_site, per_row
from pyro_dropout.mathematics.checks import check_keep, check_positive
from pyro_dropout.mathematics.distributions import BernoulliMixture
from pyro_dropout.mathematics.weight_distribution import drawn
from pyro_dropout.protocols import Distribution, PyroModel, SiteDistribution
from pyro_dropout.registry import guide


class ConcreteMixture(BernoulliMixture):
    """Dropout at σ = 0 with relaxed coin flips; its KL is that of the Bernoulli mixture, with the flips' entropy."""

    temperature: float = 0.1
    logit: Tensor  # of keep; keep itself may round to 1

    def sample_masks(self, sample_shape: Sequence[int] = ()) -> list[Tensor]:
        """Draw relaxed flips s of all rows, and 1 - s."""
        u = drawn(torch.rand, (*sample_shape, *self.batch_shape, self.rows), self.like)
        tiny = torch.finfo(u.dtype).eps
        noise = torch.log(u + tiny) - torch.log1p(tiny - u)
        soft = torch.sigmoid((self.logit + noise) / self.temperature)
        return [soft, 1 - soft]

    def check_labels(self) -> None:
        """Do nothing: a gradient reaches the probabilities of relaxed flips."""

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Draw weights with relaxed flips, differentiable in ``keep`` too."""
        return self.per_row(self.sample_masks(sample_shape)[0]) * self.loc


@guide("concrete", make=lambda model, keep: AutoConcreteDropout(model, keep), density=False, learns_keep=True, order=2)
class AutoConcreteDropout(SiteGuide):
    """Dropout that learns how much to drop: one ``keep`` for each weight site.

    Args:
        model: any Pyro model with continuous sites.
        keep: where the probability of keeping a row starts, in (0, 1); a number, a dict by site, or a function.
        temperature: the temperature of the relaxation; smaller is closer to coin flips, with noisier gradients.
        options: ``other``, ``row_dim``, ``init``, ``create_plates`` and more: ``pyro_dropout.guides.base.SiteGuide``.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> guide = pdrop.AutoConcreteDropout(pdrop.BayesianNet(torch.nn.Linear(3, 1)), keep=0.75)
        >>> {name: round(keep.item(), 3) for name, keep in guide.keeps().items()}
        {'weight': 0.75}
    """

    drops = True

    def __init__(
        self,
        model: PyroModel,
        keep: BySite = 0.9,
        *,
        temperature: float = 0.1,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(model, **options)
        check_positive("temperature", temperature)
        check_unless_by_site(check_keep, keep=keep)
        self.keep, self.temperature = keep, temperature
        self._start()

    def parameters_of(self, site: GuideSite) -> dict[str, Tensor]:
        """M and the logit of keep are trained."""
        keep = matching(self.setting("keep", self.keep, site, 0.9, check_keep), site.start)
        by_row = per_row("keep", keep, site)
        if not bool((keep < 1).all()):
            raise RangeError(
                f"keep of {site.name} must start below 1 to be learned; got 1. Use AutoDropout to hold it fixed."
            )
        return {"loc": trained(site.start / by_row), "logit": trained(torch.log(keep) - torch.log1p(-keep))}

    def weight_distribution(self, site: GuideSite, state: State) -> SiteDistribution:
        """A Bernoulli mixture with relaxed flips."""
        q = ConcreteMixture(state.loc, torch.sigmoid(state.logit), 0.0, site.row_dim, validate_args=False)
        q.temperature, q.logit = self.temperature, state.logit
        return q

    def _marginal(self, site: GuideSite) -> Distribution:
        return as_flips(super()._marginal(site))

    def keeps(self) -> dict[str, Tensor]:
        """Return the learned probability of keeping a row, by weight site."""
        weights = [site for site in self._known() if site.kind == "weight"]
        return {site.name: torch.sigmoid(self._state(site).logit) for site in weights}


def as_flips(q: Distribution) -> Distribution:
    """Return q with coin flips that are not relaxed: what was learned, and what predictions are drawn from."""
    if not isinstance(q, ConcreteMixture):
        return q
    return BernoulliMixture(q.loc, q.keep, 0.0, q.row_dim, validate_args=False)
