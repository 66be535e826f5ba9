"""Ensembles: q(w) = (1/M) Σ q_m(w), each member trained from its own start and, by default, towards its own anchor.

An anchored member draws w⁰ ~ p(w) and ε ~ N(0, 1/τ), and minimises τ/2 ‖y + ε − f(x; w)‖² + ½ (w − w⁰)ᵀ Λ (w − w⁰):
randomised maximum a posteriori (Pearce et al. 2018). In a linear-Gaussian model its members are draws from the exact
posterior. Elsewhere they disagree where there are no data, as the posterior does.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import pyro.poutine as poutine
import torch
from pyro.distributions import Delta
from pyro.poutine.runtime import _PYRO_STACK
from pyro.poutine.trace_messenger import TraceMessenger
from torch import Tensor, nn
from torch.distributions import TransformedDistribution

from pyro_dropout.generative.model_call import ModelCall
from pyro_dropout.generative.random_state import forked
from pyro_dropout.generative.registration import tell_pyro
from pyro_dropout.guides.base import SiteGuide
from pyro_dropout.guides.dropout import AutoDropout
from pyro_dropout.guides.mean_field import AutoMeanField
from pyro_dropout.guides.member_starts import Start, all_equal, at_anchors, started
from pyro_dropout.guides.points import Points
from pyro_dropout.mathematics.checks import check_choice, check_count, check_seed
from pyro_dropout.mathematics.errors import PyroDropoutError, RangeError, SingularError
from pyro_dropout.mathematics.member_mixture import MemberMixture, balanced
from pyro_dropout.protocols import Distribution, PyroModel, Weights
from pyro_dropout.registry import guide

_BAR = "|"  # stands for the dot in the name of a member's parameter: torch allows none


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
    make=lambda model, keep, members=16: Ensemble(model, lambda each: AutoDropout(each, keep=keep), members),
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
class Ensemble(nn.Module):
    """M members of one kind, each trained from its own start; the posterior is their equal mixture.

    Train it with ``pd.fit(model, ensemble, x, y, ...)``, as any guide: all members are one computation. What they
    share, such as a learned τ, is a parameter of the model and is trained on all of them.

    Args:
        model: a network, or any Pyro model with continuous sites.
        guide: makes a member's guide from a model, such as ``pd.AutoDropout``; None for points, one value per weight.
        members: how many.
        anchored: whether each member has its own anchor, drawn from the prior, and its own perturbed targets: noise of
            the likelihood's own size for Gaussian sites, and random weights of the data points (the Bayesian bootstrap)
            for all others. "auto": where members are points. Without it an ensemble of points is too sure at the data.
        start: where members start: "fresh", each from a new initialisation of the network's layers (in a model that is
            not a network, from draws of the prior); "anchor", each point at its anchor, if the prior's draws are
            networks from which training can start; or "module", all from where the guide starts.
        seed: for starts, anchors and perturbations; drawn from torch's generator by default.

    Attributes:
        members: how many members there are.
        anchored: whether they are anchored.

    Example:
        >>> import torch, pyro_dropout as pd
        >>> _ = torch.manual_seed(0)
        >>> x = torch.cat([torch.linspace(-1, -0.5, 20), torch.linspace(0.5, 1, 20)]).unsqueeze(-1)
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 20), torch.nn.Tanh(), torch.nn.Linear(20, 1))
        >>> model = pd.BayesianNet(net, pd.Prior(), pd.Gaussian(tau=100.0))
        >>> ensemble = pd.Ensemble(model, members=16)
        >>> history = pd.fit(model, ensemble, x, x**2, steps=300, lr=0.03, compile=False, progress=False)
        >>> answer = pd.predict(model, ensemble, torch.tensor([[-0.75], [0.0]]))
        >>> bool(answer.epistemic[1] > 2 * answer.epistemic[0])  # it doubts more between the data
        True
    """

    seeds: Tensor
    trained: Tensor
    learned_buffers = ("seeds", "trained")  # a file brings its own

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
        super().__init__()
        if not callable(model):
            raise PyroDropoutError(f"model must be a Pyro model, a function or a module; got {type(model).__name__}.")
        if guide is not None and not callable(guide):
            raise PyroDropoutError(
                "guide must be a function that makes a member's guide from a model, such as AutoDropout, or None; got"
                f" {type(guide).__name__}."
            )
        check_count("members", members)
        check_choice("anchored", anchored, ("auto", True, False))
        check_choice("start", start, ("fresh", "anchor", "module"))
        check_seed(seed)
        self._model, self._make, self.start = (model,), (Points if guide is None else guide,), start
        self.anchored: bool = guide is None if anchored == "auto" else bool(anchored)
        template = self._make[0](model)
        if not isinstance(template, SiteGuide):
            raise PyroDropoutError(
                f"guide must make a guide of this package, such as AutoDropout; it made {type(template).__name__}."
            )
        if start == "anchor" and not (self.anchored and isinstance(template, Points)):
            raise PyroDropoutError("only anchored points can start at their anchors; take start='fresh'.")
        self._template = (template,)
        source = torch.Generator().manual_seed(int(torch.randint(2**62, ())) if seed is None else seed % 2**63)
        self.register_buffer("seeds", torch.randint(2**62, (members,), generator=source))
        self.register_buffer("trained", torch.zeros((), dtype=torch.int64))
        self._source = source
        if self.known:
            self._add(self.seeds.tolist())

    # --- members ------------------------------------------------------------------------------------------------------

    @property
    def template(self) -> SiteGuide:
        """The guide of one member; which one, changes."""
        return self._template[0]

    @property
    def members(self) -> int:
        """How many members there are."""
        return len(self.seeds)

    @property
    def known(self) -> bool:
        """Whether the sites of the model are known."""
        return self.template.prototype_trace is not None

    @property
    def points(self) -> bool:
        """Whether the members are points."""
        return isinstance(self.template, Points)

    def meet(self, call: ModelCall) -> None:
        """Read a model that names its sites only when it runs, and make the members."""
        if not self.known:
            with forked(), poutine.block():
                call.of(self.template)
            self._add(self.seeds.tolist())

    def _add(self, seeds: list[int]) -> None:
        """Append members that start from these seeds."""
        with forked():
            if self.start == "anchor":
                rows = at_anchors(self.template, seeds)
            else:
                some = seeds[:1] if self.start == "module" else seeds
                rows = [started(self._model[0], self._make[0], self.template, self.start, seed) for seed in some]
        if not self.anchored and self.points and len(seeds) > 1 and all_equal(rows):
            raise PyroDropoutError(
                "all members start at the same point and nothing else tells them apart, so they would stay equal. Let"
                " them be anchored, or give layers with reset_parameters and start='fresh'."
            )
        for name, parameter in self.template.named_parameters():
            added = torch.stack([row[name] for row in rows]).to(parameter)
            added = added.expand(len(seeds), *parameter.shape)
            key = name.replace(".", _BAR)
            before = self._parameters.get(key)
            whole = added if before is None else torch.cat([before.detach(), added])
            self.register_parameter(key, nn.Parameter(whole.clone()))

    def stacked(self) -> dict[str, Tensor]:
        """Return the parameters of all members, (M, ...), by their names in a member's guide."""
        self._check_known()
        return {name.replace(_BAR, "."): value for name, value in self._parameters.items() if value is not None}

    def tell(self) -> dict[str, Tensor]:
        """Register the parameters of all members with Pyro, and return them."""
        self._check_known()
        named = {name.replace(_BAR, ".").replace("/", "."): v for name, v in self._parameters.items() if v is not None}
        tell_pyro(self, named, type(self).__name__)
        return self.stacked()

    def _check_known(self) -> None:
        if not self.known:
            raise PyroDropoutError(
                "the ensemble has not seen its model's sites yet: fit it, or call it once with the model's arguments."
            )

    @contextmanager
    def as_member(self, member: int, detached: bool = True) -> Iterator[SiteGuide]:
        """Within this context, ``template`` is the guide of one member."""
        own, template = self.stacked(), self.template
        places = [
            (module._parameters, key, own[".".join(filter(None, (path, key)))])
            for path, module in template.named_modules()
            for key, value in module._parameters.items()
            if value is not None
        ]
        kept = [holder[key] for holder, key, _ in places]
        before = template.is_member
        template.is_member = True
        try:
            for holder, key, value in places:
                holder[key] = value.detach()[member] if detached else value[member]
            yield template
        finally:
            template.is_member = before
            for (holder, key, _), value in zip(places, kept, strict=True):
                holder[key] = value

    def part(self, members: slice) -> "Ensemble":
        """Return an ensemble of some of the members, with copies of their parameters."""
        made = copy.copy(self)
        made._parameters = {
            key: None if value is None else nn.Parameter(value.detach()[members].clone())
            for key, value in self._parameters.items()
        }
        made._buffers = {**self._buffers, "seeds": self.seeds[members], "trained": torch.zeros_like(self.trained)}
        return made

    def more(self, members: int) -> "Ensemble":
        """Add members; the next ``fit`` trains only them. Returns the ensemble itself.

        Args:
            members: how many to add.

        Example:
            >>> import torch, pyro_dropout as pd
            >>> model = pd.BayesianNet(torch.nn.Linear(2, 1))
            >>> ensemble = pd.Ensemble(model, members=4)
            >>> quiet = {"steps": 20, "compile": False, "progress": False}
            >>> _ = pd.fit(model, ensemble, torch.ones(3, 2), torch.ones(3, 1), **quiet)
            >>> before = ensemble.mean()["weight"]
            >>> _ = pd.fit(model, ensemble.more(4), torch.ones(3, 2), torch.ones(3, 1), **quiet)
            >>> ensemble.members, bool((ensemble.mean()["weight"] != before).any())
            (8, True)
        """
        check_count("members", members)
        seeds = torch.randint(2**62, (members,), generator=self._source).to(self.seeds)
        if self.known:
            self._add(seeds.tolist())
        self.seeds = torch.cat([self.seeds, seeds])
        return self

    def to_train(self) -> "Ensemble":
        """Return the members that the next training is for: those that ``more`` added, or else all."""
        done = int(self.trained)
        return self.part(slice(done, None)) if 0 < done < self.members else self

    def take_back(self, part: "Ensemble") -> None:
        """Take what ``to_train`` gave, after training; all members count as trained."""
        if part is not self:
            with torch.no_grad():
                for key, value in part._parameters.items():
                    mine = self._parameters[key]
                    if value is not None and mine is not None:
                        mine[-len(value) :] = value
        self.trained.fill_(self.members)

    # --- the posterior ------------------------------------------------------------------------------------------------

    def order(self, n: int) -> Tensor:
        """Return the member numbers of n draws, in random order: each member as often as any other, or once more."""
        check_count("n", n)
        return balanced(self.members, n)

    def draws_at(self, numbers: Tensor) -> Weights:
        """Return one draw from each of these members, {name: (len(numbers), ...)}."""
        self._check_known()
        listed = numbers.tolist()
        if any(not 0 <= m < self.members for m in listed):
            raise RangeError(f"numbers must lie between 0 and {self.members - 1}; got {listed[:8]}.")
        if self.points:
            return {name: value[numbers.to(value.device)] for name, value in self._values().items()}
        found: dict[str, list[Tensor]] = {}
        drawn: dict[int, Weights] = {}
        for member in sorted(set(listed)):
            with self.as_member(member) as guide:
                drawn[member] = guide.sample_weights(listed.count(member))
        used = dict.fromkeys(drawn, 0)
        for member in listed:
            for name, value in drawn[member].items():
                found.setdefault(name, []).append(value[used[member]])
            used[member] += 1
        return {name: torch.stack(values) for name, values in found.items()}

    def _values(self) -> Weights:
        """Return the points of all members, in the model's own space."""
        own = self.stacked()
        found = {}
        for site in self.template._sites.values():
            value = own[f"states.{site.name.replace('.', '/')}.loc"].detach()
            found[site.name] = value if site.transform is None else site.transform(value)
        return found

    def sample_weights(self, n: int) -> Weights:
        """Draw ``n`` times from the posterior, {name: (n, ...)}; every member is used equally often."""
        return self.draws_at(self.order(n))

    def mean(self) -> Weights:
        """Return E[w] of every site, the mean over members."""
        if self.points:
            return {name: value.mean(0) for name, value in self._values().items()}
        means = []
        for member in range(self.members):
            with self.as_member(member) as guide:
                means.append(guide.mean())
        return {name: torch.stack([each[name] for each in means]).mean(0) for name in means[0]}

    def posterior(self, name: str) -> MemberMixture:
        """Return the posterior of one site: the mixture of all members."""
        parts = []
        for member in range(self.members):
            with self.as_member(member) as guide:
                parts.append(guide.posterior(name))
        return MemberMixture(parts)

    def log_prob(self, weights: Mapping[str, Tensor]) -> Tensor:
        """Return log q(w) of each draw, {name: (n, ...)}: the density of the mixture, over all sites together."""
        self._check_density()
        each = []
        for member in range(self.members):
            with self.as_member(member) as guide:
                terms = [
                    guide.posterior(name).log_prob(value.to(next(iter(self.stacked().values()))))
                    for name, value in weights.items()
                ]
            each.append(torch.stack([term.double().reshape(len(term), -1).sum(-1) for term in terms]).sum(0))
        return torch.logsumexp(torch.stack(each), 0) - math.log(self.members)

    def _check_density(self) -> None:
        self._check_known()
        with self.as_member(0) as guide:
            for site in guide._sites.values():
                q: Distribution = guide.posterior(site.name)
                q = q.base_dist if isinstance(q, TransformedDistribution) else q
                if guide._joint(site):
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
        with self.as_member(int(torch.randint(self.members, ())), detached=False) as guide:
            found: Weights = guide(*args, **kwargs)
        return found

    # --- as a module --------------------------------------------------------------------------------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Ensemble":
        self.template._apply(fn, recurse)  # type: ignore[no-untyped-call]
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "Ensemble":
        made = copy.copy(self)
        memo[id(self)] = made
        model = memo.get(id(self._model[0]), self._model[0])
        made._model, made._template = (model,), (copy.deepcopy(self.template, memo),)
        made._parameters = copy.deepcopy(self._parameters, memo)
        made._buffers = copy.deepcopy(self._buffers, memo)
        made._source = torch.Generator()
        made._source.set_state(self._source.get_state())
        return made

    def __repr__(self) -> str:
        kind = "points" if self.points else type(self.template).__name__
        return f"Ensemble({self.members} {'anchored ' if self.anchored else ''}members: {kind})"
