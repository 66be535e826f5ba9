"""The base class of all guides: the sites of a model, the parameters of each, and the distribution they define.

A guide defines the parameters of a weight site (``parameters_of``) and the distribution that they make
(``weight_distribution``). Everything else is here, and means, draws and quantiles are in ``guides/marginals.py``.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, cast

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer.autoguide.initialization import InitMessenger
from torch import Tensor, nn

from pyro_dropout.errors import EmptyModelError, NoWeightWarning, PyroDropoutError, warn_caller
from pyro_dropout.generative.model_call import ModelCall, check_programs
from pyro_dropout.generative.observed_sites import check_supports, sample_sites
from pyro_dropout.generative.priors import BySite, by_site
from pyro_dropout.generative.process_state import one_at_a_time
from pyro_dropout.generative.registration import note_names, tell_pyro
from pyro_dropout.generative.trial_run import calls_noted, owner_of
from pyro_dropout.guides.marginals import Marginals
from pyro_dropout.guides.sites import (
    Bias,
    Check,
    Family,
    GuideSite,
    Image,
    Init,
    InitLoc,
    InitScale,
    check_distribution,
    first_value,
    first_width,
    given_weights,
    per_row,
    read_site,
    unknown_option,
)
from pyro_dropout.guides.summary import Summarised
from pyro_dropout.mathematics.checks import check_choice, check_held, check_positive, describe
from pyro_dropout.mathematics.full_rank_normal import SharedNoise
from pyro_dropout.mathematics.normal import Normal
from pyro_dropout.mathematics.row_mixture_distribution import RowMixture
from pyro_dropout.mathematics.shapes import broadcast_shape
from pyro_dropout.protocols import Distribution, PyroModel, SiteDistribution

__all__ = ["GuideSite", "Image", "Init", "InitLoc", "SiteGuide", "gaussian", "matching", "per_row", "trained"]


class SiteState(nn.Module):
    """The parameters (trained) and settings (buffers) of one site's distribution."""

    def __init__(self, **tensors: Tensor) -> None:
        super().__init__()
        for name, value in tensors.items():
            if isinstance(value, nn.Parameter):
                self.register_parameter(name, value)
            else:
                self.register_buffer(name, value)

    def __getattr__(self, name: str) -> Tensor:
        return cast(Tensor, super().__getattr__(name))


State = SiteState | SimpleNamespace  # the tensors of a site by name; in a plate, those that it shows now


def trained(value: Tensor) -> nn.Parameter:
    """Return a parameter that starts at ``value``."""
    return nn.Parameter(value.detach().clone())


def matching(value: float | Tensor, like: Tensor) -> Tensor:
    """Return a setting in the dtype of a site, converted directly: torch's default dtype would round it."""
    return torch.as_tensor(value, dtype=like.dtype, device=like.device)


class SiteGuide(Summarised, Marginals):
    """A guide with one distribution for each latent site of any Pyro model with continuous sites.

    Args:
        model: the Pyro model.
        bias: how biases (real-valued vectors outside all plates) are treated: a point ("map"), a Gaussian of learned
            width ("gaussian"), or, in ``AutoDropout``, dropped as one row ("dropout") or weight by weight
            ("dropout_each"). By default the first of ``biases``.
        other: how all other latent variables (scalars, constrained sites, sites in plates) are treated: a Gaussian of
            learned width in unconstrained space, or a point ("map").
        row_dim: the weight dimension that indexes rows; a number, a dict by site, or a function of the site's name.
            By default the model's choice for the site, or 1, as in torch's Linear, if it makes none.
        init: where means start: "module", the network's own parameters (in plain Pyro models weights start as in
            "paper", and all else at the prior's median); "paper", U(±√(3/fan_in)) for weights and 0 for biases; a
            function of name and shape; or a fitted guide, whose mean it is, or a dict of weights by site.
        init_loc_fn: where all sites start, as in Pyro's guides: ``init_to_median``, ``init_to_value(values=...)``, ….
        init_scale: the standard deviation at which learned widths start; "auto" as in ``AutoMeanField``.
        create_plates: as in Pyro's AutoGuide.
    """

    biases: tuple[Bias, ...] = ("map", "gaussian")  # what ``bias`` may be; the first is the default
    at_weights = False  # whether the guide differs from a Gaussian, or a point, only at weights
    penalty = 1.0  # how many times the penalty of a tempered prior counts at points; inf: the prior counts in full
    is_member = False  # whether it stands for members of an ensemble, which registers their parameters itself

    def __init__(
        self,
        model: PyroModel,
        *,
        bias: Bias | None = None,
        other: Family = "gaussian",
        row_dim: BySite | None = None,
        init: Init = "module",
        init_loc_fn: InitLoc | None = None,
        init_scale: InitScale = "auto",
        create_plates: Callable[..., object] | None = None,
        **unknown: object,
    ) -> None:
        if unknown:
            raise TypeError(unknown_option(type(self), unknown))
        if not callable(model):
            raise PyroDropoutError(f"model must be a Pyro model, a function or a module; got {describe(model)}.")
        check_programs(model, self)
        for path, parameter in model.named_parameters() if isinstance(model, nn.Module) else ():
            check_held(f"{path!r} of the model", parameter)
        for name, value in (("create_plates", create_plates), ("init_loc_fn", init_loc_fn)):
            if value is not None and not callable(value):
                raise PyroDropoutError(
                    f"{name} must be a function, as in Pyro's guides, or None; got {describe(value)}."
                )
        super().__init__(model, create_plates=create_plates)  # type: ignore[no-untyped-call]
        bias = self.biases[0] if bias is None else bias
        check_choice("bias", bias, self.biases)
        check_choice("other", other, ("gaussian", "map"))
        if init_loc_fn is not None and init != "module":
            raise PyroDropoutError("give init or init_loc_fn, not both: each sets where the guide starts.")
        if isinstance(init_scale, str):
            check_choice("init_scale", init_scale, ("auto",), "a positive number")
        else:
            check_positive("init_scale", init_scale)
        self.bias, self.other, self.init_scale, self._row_dim = bias, other, init_scale, row_dim
        self.init, self.init_loc_fn = given_weights(init), init_loc_fn
        self._sites: dict[str, GuideSite] = {}
        self._expected_sites: list[str] = []
        self._subsampled: set[str] = set()
        self.states = nn.ModuleDict()

    def _start(self) -> None:
        """Read the model now if it can name its sites without data; otherwise on the first call."""
        if hasattr(self.model, "sample_sites"):
            self._setup_prototype()

    def _facts(self) -> dict[str, object]:
        own = {} if not self.extra_repr() else {"settings": self.extra_repr()}
        return {**own, "sites": len(self._sites) or "not known before the first call"}

    @abstractmethod
    def parameters_of(self, site: GuideSite) -> dict[str, Tensor]:
        """Return the tensors of a weight site's distribution: trained ones as ``nn.Parameter``."""

    @abstractmethod
    def weight_distribution(self, site: GuideSite, state: State) -> SiteDistribution:
        """Return q(w) of a weight site, made from its tensors: a distribution of Pyro or of this package.

        With ``block_of``, a guide takes the noise of the block too: q is then drawn with the other sites of the block.
        """

    def family_of(self, site: GuideSite) -> str:
        """Return what a site's q is: "own", as these two make it; "gaussian", independent Gaussians; "map", a point."""
        return {"weight": "own", "bias": self.bias, "other": self.other}[site.kind]

    def log_width(self, site: GuideSite) -> Tensor:
        """Return the starting value of a learned log standard deviation."""
        hidden = sum(each.kind == "weight" for each in self._sites.values()) - 1
        return torch.full_like(site.start, first_width(self.init_scale, site.fan_in, hidden)).log()

    def setting(
        self, name: str, value: BySite | None, site: GuideSite, default: float, check: Check = lambda name, value: None
    ) -> float | Tensor:
        """Return the value for ``site`` of an option given as a number, dict or function, after a check of it."""
        found = by_site(name, value, site.name, self._expected_sites)
        found = default if found is None else found
        check(f"{name} of {site.name}", found)
        return found

    @property
    def whole_functions(self) -> bool:
        """Whether each draw is one function at all data points: only row mixtures are drawn for each data point."""
        return any(
            site.kind != "other" and not site.plates and not isinstance(self._marginal(site), RowMixture | dist.Delta)
            for site in self._sites.values()
        )

    def block_of(self, site: GuideSite) -> str | None:
        """Return the name of the block of sites that share noise in a draw, if the site is in one.

        Such a site is drawn as one tensor, its plates included.
        """
        return None

    def shared_noise(self, sites: list[GuideSite]) -> SharedNoise:
        """Return the noise of one draw of a block: a number for each number of its sites."""
        return SharedNoise(sum(site.start.numel() for site in sites))

    def _blocks(self) -> dict[str, list[GuideSite]]:
        found: dict[str, list[GuideSite]] = {}
        for site in self._sites.values():
            if (block := self.block_of(site)) is not None:
                found.setdefault(block, []).append(site)
        return found

    def _shared(self) -> dict[str, SharedNoise]:
        """Return what the sites of the same block share in one draw, by site."""
        each = ((self.shared_noise(sites), sites) for sites in self._blocks().values())
        return {site.name: noise for noise, sites in each for site in sites}

    def _tensors_of(self, site: GuideSite) -> dict[str, Tensor]:
        if self.family_of(site) == "own" or self.block_of(site) is not None:
            return self.parameters_of(site)
        width = {} if self.family_of(site) == "map" else {"log_scale": trained(self.log_width(site))}
        return {"loc": trained(site.start), **width}

    def _distribution(self, site: GuideSite, noise: SharedNoise | None = None) -> Distribution:
        """Return q of a site, from its tensors: by itself, or drawn with the others of its block by their ``noise``.

        In a plate it is of the elements that the plate shows now.
        """
        state: State = self._state(site)
        if self.block_of(site) is not None:
            found: Distribution = cast(Any, self).weight_distribution(site, state, noise)
            return found
        if site.plates:
            tensors = {**state._parameters, **state._buffers}
            shown = {name: pyro.subsample(value, event_dim=site.free_dim) for name, value in tensors.items()}
            state = SimpleNamespace(**shown)
        family = self.family_of(site)
        if family == "own":
            return self.weight_distribution(site, state)
        if family == "map":
            return dist.Delta(state.loc, event_dim=state.loc.dim() if site.plain else site.free_dim)
        if site.plain:
            return gaussian(state.loc, state.log_scale)
        return Normal(state.loc, state.log_scale.exp(), validate_args=False).to_event(site.free_dim)  # type: ignore[no-untyped-call]

    @one_at_a_time
    def _setup_prototype(self, *args: object, **kwargs: object) -> None:
        start = InitMessenger(first_value(self.init_loc_fn))
        if not args and not kwargs and hasattr(self.model, "sample_sites"):
            # The trace is kept: with the network's own tensors as its values it costs no memory.
            self.prototype_trace = poutine.block(poutine.trace(start(self.model.sample_sites)).get_trace)()
        else:
            own, run = self._model, poutine.trace()
            self._model = (run(start(self.model)),)
            try:
                with calls_noted(own[0]):
                    super()._setup_prototype(*args, **kwargs)  # type: ignore[no-untyped-call]
            finally:
                self._model = own
            note_names(owner_of(self.model), run.trace.param_nodes)
            if not sample_sites(run.trace):
                raise EmptyModelError("the model has no latent site for this guide; are all hidden or observed?")
        with poutine.block():
            plates = self._create_plates(*args, **kwargs)  # type: ignore[no-untyped-call]
        self._subsampled = {name for name, plate in plates.items() if plate.subsample_size < plate.size}
        found = list(self.prototype_trace.iter_stochastic_nodes())
        check_supports(ModelCall(self.model, args, kwargs), dict(found), trained=True)
        self._expected_sites = [name for name, _ in found]
        guide, sites, given = type(self).__name__, self._expected_sites, self.init_loc_fn is not None
        how: Any = {"guide": guide, "sites": sites, "row_dim": self._row_dim, "init": self.init, "given": given}
        self._sites |= {name: read_site(name, message, **how) for name, message in found}
        for site in self._sites.values():
            self._states[site.key] = SiteState(**self._tensors_of(site))
        with torch.no_grad():
            shared = self._shared()
            for name, site in self._sites.items():
                check_distribution(self._distribution(site, shared.get(name)), site, guide)
        kinds = {site.kind for site in self._sites.values()}
        marked = all("kind" in message["infer"] for _, message in found)
        # A guide in an AutoGuideList has some of the sites, and a model may say that none of them is a weight.
        expected = self.at_weights and not marked and self.master is None
        if expected and "weight" not in kinds and not ("bias" in kinds and self.bias.startswith("dropout")):
            warn_caller(
                f"{type(self).__name__} finds no weight in this model ({', '.join(self._sites)}), so it is no more than"
                " a Gaussian or a point for each site: scalars, vectors, constrained sites and sites in plates are not"
                " weights. Mark one with pyro.sample(..., infer={'kind': 'weight'}), or use AutoMeanField; for"
                " correlations, AutoLowRank(per='net') or AutoFullRank.",
                NoWeightWarning,
            )

    @property
    def _states(self) -> nn.ModuleDict:
        """The states, without registering them with Pyro: reading ``states`` would, under Pyro's own names."""
        return cast(nn.ModuleDict, self._modules["states"])

    def _state(self, site: GuideSite) -> SiteState:
        return cast(SiteState, self._states[site.key])

    def _tell(self) -> None:
        """Register all parameters with Pyro, and adopt values loaded into its store."""
        if self.is_member:
            return
        named = {name.replace("/", "."): value for name, value in self._states.named_parameters()}
        tell_pyro(self, named, str(self._pyro_name))

    def forward(self, *args: object, **kwargs: object) -> dict[str, Tensor]:
        """Sample every latent site; takes the model's arguments and returns the values by name."""
        if self.prototype_trace is None:
            self._setup_prototype(*args, **kwargs)
        plates = self._create_plates(*args, **kwargs)  # type: ignore[no-untyped-call]
        self._tell()
        result, shared = {}, self._shared()
        for name, site in self._sites.items():
            noise = shared.get(name)
            free = None if noise is None or site.plain else self._drawn_whole(site, noise, plates)
            with ExitStack() as stack:
                for frame in site.plates:
                    stack.enter_context(plates[frame.name])
                result[name] = self._sample(site, noise) if free is None else self._sample_image(site, free)
        return result

    def _sample(self, site: GuideSite, noise: SharedNoise | None) -> Tensor:
        q = self._distribution(site, noise)
        if isinstance(q, dist.Delta):
            value = site.image(q.v)
            point = dist.Delta(value, event_dim=value.dim() if site.plain else site.event_dim)
            return pyro.sample(site.name, point, infer={"penalty": self.penalty})  # type: ignore[arg-type]
        if isinstance(q, RowMixture):
            q.lenient, q.site = True, site.name
        if site.transform is None:
            return pyro.sample(site.name, q, infer={"reused": site.reused})  # type: ignore[arg-type]
        return self._sample_image(site, pyro.sample(f"{site.name}_unconstrained", q, infer={"is_auxiliary": True}))

    def _sample_image(self, site: GuideSite, free: Tensor) -> Tensor:
        """Sample a site at a draw mapped from unconstrained space."""
        value = site.image(free)
        log_density = 0.0 if poutine.get_mask() is False else site.log_volume(free, value)
        return pyro.sample(site.name, Image(value, log_density=log_density, event_dim=site.event_dim))  # type: ignore[no-untyped-call]

    def _drawn_whole(self, site: GuideSite, noise: SharedNoise, plates: Mapping[str, pyro.plate]) -> Tensor:
        """Draw a site together with its plates, so that it can share noise with other sites."""
        for frame in site.plates:
            if plates[frame.name].subsample_size != frame.size:
                raise PyroDropoutError(
                    f"site {site.name!r} is in plate {frame.name!r}, which is subsampled now and was not when"
                    f" {type(self).__name__} first saw the model. Call the guide first with the subsample."
                )
        q = self._distribution(site, noise)
        q.lenient, q.site = True, site.name
        free = pyro.sample(f"{site.name}_unconstrained", q, infer={"is_auxiliary": True})
        lead = free.shape[: free.dim() - site.start.dim()]  # particles, and dimensions for inner plates
        return free.reshape(broadcast_shape(site.start.shape, (*lead, *[1] * site.free_dim)))


def gaussian(loc: Tensor, log_scale: Tensor) -> RowMixture:
    """Return independent Gaussians with a width for each number, as a row mixture of one component."""
    one = torch.ones(1, dtype=loc.dtype, device=loc.device)
    return RowMixture(loc.unsqueeze(0), log_scale.exp(), one, row_dim=None, validate_args=False)
