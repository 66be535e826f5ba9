"""Ensembles: q(w) = (1/M) Σ q_m(w), each member trained from its own start and, by default, towards its own anchor.

An anchored member draws w⁰ ~ p(w) and ε ~ N(0, 1/τ), and minimises τ/2 ‖y + ε − f(x; w)‖² + ½ (w − w⁰)ᵀ Λ (w − w⁰):
randomised maximum a posteriori (Pearce et al. 2020). In a linear-Gaussian model its members are draws from the exact
posterior. Elsewhere they are an approximation without a guarantee.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from pyro.distributions import Delta
from pyro.poutine.runtime import _PYRO_STACK
from pyro.poutine.trace_messenger import TraceMessenger
from torch import Tensor, nn
from torch.distributions import TransformedDistribution

from pyro_dropout.errors import PyroDropoutError, RangeError, SingularError
from pyro_dropout.generative.model_call import ModelCall, is_network, name_of
from pyro_dropout.guides.base import SiteGuide
from pyro_dropout.guides.dropout import AutoDropout
from pyro_dropout.guides.laplace import AutoLaplace
from pyro_dropout.guides.mean_field import AutoMeanField
from pyro_dropout.guides.points import Points
from pyro_dropout.guides.stacked_members import StackedMembers, Start
from pyro_dropout.mathematics.checks import check_choice, check_count, check_seed
from pyro_dropout.mathematics.mixtures import MemberMixture, balanced
from pyro_dropout.protocols import Distribution, PyroModel, Weights
from pyro_dropout.registry import guide


@guide(
    "ensemble",
    make=lambda model, keep, members=32: Ensemble(model, members=members),
    density=False,
    compared=True,
    order=8,
    options=("members",),
    per_site=False,
)
@guide(
    "dropout-ensemble",
    make=lambda model, keep, members=16: Ensemble(model, functools.partial(AutoDropout, keep=keep), members),
    density=False,
    order=9,
    options=("members",),
    per_site=False,
)
@guide(
    "mean-field-ensemble",
    make=lambda model, keep, members=16: Ensemble(model, AutoMeanField, members),
    compared=True,
    order=10,
    options=("members",),
    per_site=False,
)
class Ensemble(StackedMembers):
    """M members of one kind, each trained from its own start; the posterior is their equal mixture.

    Train it with ``pdrop.fit(model, ensemble, x, y, ...)``, as any guide: all members are one computation. What they
    share, such as a learned τ, is a parameter of the model and is trained on all of them.

    Args:
        model: a network; members that are neither points nor anchored may be of any Pyro model with continuous sites.
        guide: makes a member's guide from a model, such as ``AutoDropout``; None for points, one value per weight.
        members: how many.
        anchored: whether each member has its own anchor, drawn from the prior, and its own perturbed targets: noise of
            the likelihood's own size for Gaussian sites, and random weights of the data points (the Bayesian bootstrap)
            for all others. "auto": where members are points. Without it points differ only in where they start.
        start: where members start: "fresh", each from a new initialisation of the network's layers (in a model that is
            not a network, from draws of the prior, within two units of the guide's start); "anchor", each point at its
            anchor, if the prior's draws are networks from which training can start; or "module", all from where the
            guide starts.
        seed: for starts, anchors and perturbations; drawn from torch's generator by default.

    Attributes:
        members: how many members there are; those that have diverged do not count.
        anchored: whether they are anchored.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> _ = torch.manual_seed(0)
        >>> x = torch.cat([torch.linspace(-1, -0.5, 20), torch.linspace(0.5, 1, 20)]).unsqueeze(-1)
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 20), torch.nn.Tanh(), torch.nn.Linear(20, 1))
        >>> model = pdrop.BayesianNet(net, pdrop.Prior(), pdrop.Gaussian(tau=100.0))
        >>> ensemble = pdrop.Ensemble(model, members=16)
        >>> history = pdrop.fit(model, ensemble, x, x**2, steps=300, lr=0.03, compile=False, progress=False)
        >>> answer = pdrop.predict(model, ensemble, torch.tensor([[-0.75], [0.0]]))
        >>> bool(answer.epistemic[1] > 2 * answer.epistemic[0])  # it doubts more between the data
        True
    """

    def __init__(
        self,
        model: PyroModel,
        guide: Callable[[Any], SiteGuide] | None = None,
        members: int = 32,
        anchored: bool | Literal["auto"] = "auto",
        *,
        start: Start = "fresh",
        seed: int | None = None,
    ) -> None:
        if not callable(model):
            raise PyroDropoutError(f"model must be a Pyro model, a function or a module; got {type(model).__name__}.")
        if guide is not None and (not callable(guide) or isinstance(guide, nn.Module)):
            made = ", which is a guide already" if isinstance(guide, SiteGuide) else ""
            raise PyroDropoutError(
                "guide must be a function that makes a member's guide from a model, such as AutoDropout, or None; got"
                f" {type(guide).__name__}{made}."
            )
        check_count("members", members)
        check_choice("anchored", anchored, ("auto", True, False))
        check_choice("start", start, ("fresh", "anchor", "module"))
        check_seed(seed)
        make = Points if guide is None else guide
        template = make(model)
        if not isinstance(template, SiteGuide):
            raise PyroDropoutError(
                f"guide must make a guide of this package, such as AutoDropout; it made {type(template).__name__}."
            )
        if isinstance(template, AutoLaplace):
            raise PyroDropoutError(
                "the members of an ensemble stay as training leaves them, and AutoLaplace would be points: its"
                " curvature comes after training. Use Ensemble(model) for points, or fit an AutoLaplace for each start."
            )
        anchored = guide is None if anchored == "auto" else anchored
        if (anchored or isinstance(template, Points)) and not is_network(model):
            raise PyroDropoutError(
                f"members that are points or anchored need a network, such as BayesianNet; got {name_of(model)}. For"
                " another Pyro model give members with a width: Ensemble(model, AutoMeanField)."
            )
        if start == "anchor" and not (anchored and isinstance(template, Points)):
            raise PyroDropoutError("only anchored points can start at their anchors; take start='fresh'.")
        super().__init__(model, make, template, start, anchored, members, seed)

    # --- the posterior ------------------------------------------------------------------------------------------------

    def order(self, n: int) -> Tensor:
        """Return the member numbers of n draws, in random order: each member as often as any other, or once more."""
        check_count("n", n)
        self.check_usable()
        return balanced(self.members, n)

    def draws_at(self, numbers: Tensor) -> Weights:
        """Return one draw from each of these members, {name: (len(numbers), ...)}."""
        self.check_usable()
        listed, count = numbers.tolist(), self.members
        if any(not 0 <= m < count for m in listed):
            raise RangeError(f"numbers must lie between 0 and {count - 1}; got {listed[:8]}.")
        if self.points:
            rows = self.numbered(numbers)
            own = {
                name: self.stacked()[f"states.{site.key}.loc"].detach() for name, site in self.template._sites.items()
            }
            return {name: value[rows.to(value.device)] for name, value in own.items()}
        drawn: dict[int, Weights] = {}
        for member in sorted(set(listed)):
            with self.as_member(member) as guide:
                drawn[member] = guide.sample_weights(listed.count(member))
        order = torch.tensor(listed).sort(stable=True).indices.argsort()  # draws lie by member
        names = next(iter(drawn.values()))
        whole = {name: torch.cat([each[name] for each in drawn.values()]) for name in names}
        return {name: value[order.to(value.device)] for name, value in whole.items()}

    def sample_weights(self, n: int) -> Weights:
        """Draw ``n`` times from the posterior, {name: (n, ...)}; every member is used equally often."""
        return self.draws_at(self.order(n))

    def mean(self) -> Weights:
        """Return E[w] of every site, the mean over members."""
        self.check_usable()
        means = self._of_each(lambda guide: guide.mean())
        return {name: torch.stack([each[name] for each in means]).mean(0) for name in means[0]}

    def posterior(self, name: str) -> MemberMixture:
        """Return the posterior of one site: the mixture of all members."""
        self.check_usable()
        return MemberMixture(self._of_each(lambda guide: guide.posterior(name)))

    def _of_each(self, ask: Callable[[SiteGuide], Any]) -> list[Any]:
        """Return what the guide of each member answers."""
        found = []
        for member in range(self.members):
            with self.as_member(member) as guide:
                found.append(ask(guide))
        return found

    def log_prob(self, weights: Mapping[str, Tensor]) -> Tensor:
        """Return log q(w) of each draw, {name: (n, ...)}: the density of the mixture, over all sites together."""
        self._check_density()
        like = next(iter(self.stacked().values()))

        def log_density(guide: SiteGuide) -> Tensor:
            terms = [guide.posterior(name).log_prob(value.to(like)) for name, value in weights.items()]
            return torch.stack([term.double().reshape(len(term), -1).sum(-1) for term in terms]).sum(0)

        return torch.logsumexp(torch.stack(self._of_each(log_density)), 0) - math.log(self.members)

    def _check_density(self) -> None:
        self.check_usable()
        with self.as_member(0) as guide:
            for site in guide._sites.values():
                q: Distribution = guide.posterior(site.name)
                q = q.base_dist if isinstance(q, TransformedDistribution) else q
                if guide.block_of(site) is not None:
                    raise SingularError(
                        f"members of {type(guide).__name__} share noise between sites, so that the mixture has no"
                        " density that can be computed site by site."
                    )
                if isinstance(q, Delta) or getattr(q, "singular", False):
                    raise SingularError(
                        f"the ensemble has no density at site {site.name!r}: its members are points there, or lie on a"
                        " set of volume zero."
                    )

    # --- a guide as a Pyro program ------------------------------------------------------------------------------------

    def forward(self, *args: object, **kwargs: object) -> Weights:
        """Sample every latent site from one member, chosen at random."""
        self.meet(ModelCall(self._model[0], args, dict(kwargs)))
        if any(isinstance(each, TraceMessenger) and each.param_only for each in _PYRO_STACK):
            if self.anchored:
                raise PyroDropoutError(
                    "an anchored ensemble is trained by pyro_dropout.fit(model, ensemble, ...): a step of Pyro's SVI"
                    " knows neither the anchors nor the perturbed targets."
                )
            self.tell()
        self.check_usable()
        with self.as_member(int(torch.randint(self.members, ())), detached=False) as guide:
            found: Weights = guide(*args, **kwargs)
        return found

    def _facts(self) -> dict[str, object]:
        kind = "points" if self.points else type(self.template).__name__
        return {"members": f"{self.members}{' anchored' * self.anchored}, {kind}"}
