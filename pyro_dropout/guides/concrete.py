"""Concrete dropout: dropout's q(w) with ``keep`` learned, its coin flips relaxed to s = sigmoid((logit p + logit u)/t).

The relaxation is Gal, Hron and Kendall's (2017). It is used while training, where a gradient in p is needed; the
posterior that comes out, and what is sampled from it, is the Bernoulli mixture itself.

p stops at ``max_keep``. At p = 1 the guide is a point, and the point of a small network may overfit without bound:
after 20,000 steps its predictions can be worse than a constant.
"""

from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from pyro_dropout.errors import RangeError
from pyro_dropout.generative.priors import BySite
from pyro_dropout.guides.base import SiteGuide, State, matching, trained
from pyro_dropout.guides.sites import GuideSite, Options, check_unless_by_site, per_row, row_layout
from pyro_dropout.mathematics.checks import check_keep, check_positive
from pyro_dropout.mathematics.distributions import BernoulliMixture
from pyro_dropout.mathematics.weight_distribution import drawn
from pyro_dropout.protocols import Distribution, PyroModel, SiteDistribution
from pyro_dropout.registry import guide

_MAX_KEEP = 0.95


class ConcreteMixture(BernoulliMixture):
    """Dropout at σ = 0 with relaxed coin flips; its KL is that of the Bernoulli mixture, with the flips' entropy."""

    temperature: float = 0.1
    logit: Tensor  # of keep, which may itself round to 1

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


@guide(  # it may learn to drop more than ``keep`` says, not less
    "concrete",
    make=lambda model, keep: AutoConcreteDropout(model, lambda site: 0.95 * keep(site), max_keep=keep),
    density=False,
    order=2,
)
class AutoConcreteDropout(SiteGuide):
    """Dropout that learns how much to drop: one ``keep`` for each weight site.

    Args:
        model: any Pyro model with continuous sites.
        keep: where the probability of keeping a row starts; a number, a dict by site, or a function.
        max_keep: what it stays below, in (0, 1], given the same way. By default 0.95, and 1 for a layer of one row;
            with 1 it may learn to drop nothing.
        temperature: the temperature of the relaxation; smaller is closer to coin flips, with noisier gradients.
        options: ``other``, ``row_dim``, ``init``, ``create_plates`` and more: ``pyro_dropout.guides.base.SiteGuide``.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> guide = pdrop.AutoConcreteDropout(pdrop.BayesianNet(torch.nn.Linear(3, 1)), keep=0.75)
        >>> {name: round(keep.item(), 3) for name, keep in guide.keeps().items()}
        {'weight': 0.75}
    """

    at_weights = True

    def __init__(
        self,
        model: PyroModel,
        keep: BySite = 0.9,
        *,
        max_keep: BySite | None = None,
        temperature: float = 0.1,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(model, **options)
        check_positive("temperature", temperature)
        check_unless_by_site(check_keep, keep=keep, **({} if max_keep is None else {"max_keep": max_keep}))
        self.keep, self.max_keep, self.temperature = keep, max_keep, temperature
        self._start()

    def parameters_of(self, site: GuideSite) -> dict[str, Tensor]:
        """M and the logit of keep / max_keep are trained."""
        most = _MAX_KEEP if row_layout(site).rows > 1 else 1.0
        limit = matching(self.setting("max_keep", self.max_keep, site, most, check_keep), site.start)
        keep = matching(self.setting("keep", self.keep, site, 0.9, check_keep), site.start)
        by_row, _ = per_row("keep", keep, site), per_row("max_keep", limit, site)
        if not bool((keep < limit).all()):
            raise RangeError(
                f"keep of {site.name} must start below max_keep, {limit.max().item():g}, to be learned; got"
                f" {keep.max().item():g}. Give a larger max_keep, or use AutoDropout to hold keep fixed."
            )
        share = keep / limit
        logit = torch.log(share) - torch.log1p(-share)
        return {"loc": trained(site.start / by_row), "share_logit": trained(logit), "max_keep": limit}

    def weight_distribution(self, site: GuideSite, state: State) -> SiteDistribution:
        """A Bernoulli mixture with relaxed flips."""
        q = ConcreteMixture(state.loc, _keep(state), 0.0, site.row_dim, validate_args=False)
        # p / (1 - p) for p = max_keep / (1 + exp(-s)), which is exp(s) where max_keep is 1
        share, limit = state.share_logit, state.max_keep
        q.temperature, q.logit = self.temperature, share + limit.log() + logsigmoid(-(share + torch.log1p(-limit)))
        return q

    def _marginal(self, site: GuideSite) -> Distribution:
        return as_flips(super()._marginal(site))

    def keeps(self) -> dict[str, Tensor]:
        """Return the learned probability of keeping a row, by weight site."""
        weights = [site for site in self._known() if site.kind == "weight"]
        return {site.name: _keep(self._state(site)) for site in weights}


def _keep(state: State) -> Tensor:
    kept: Tensor = state.max_keep * torch.sigmoid(state.share_logit)
    return kept


def as_flips(q: Distribution) -> Distribution:
    """Return q with coin flips that are not relaxed: what was learned, and what predictions are drawn from."""
    if not isinstance(q, ConcreteMixture):
        return q
    return BernoulliMixture(q.loc, q.keep, 0.0, q.row_dim, validate_args=False)
