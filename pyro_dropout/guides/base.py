"""What every guide has: a site for each latent variable, parameters of its own, and a distribution made from them.

A guide says two things about a weight site: which parameters it has (``parameters_of``) and which distribution they
make (``weight_distribution``). Everything else is here: reading the model, biases and scalars, plates, constrained
sites, the parameter store, posteriors and samples.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Literal

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoGuide
from pyro.infer.autoguide.initialization import InitMessenger
from torch import Size, Tensor, nn
from torch.distributions import TransformedDistribution, biject_to, constraints, register_kl

from pyro_dropout.generative.priors import BySite, by_site
from pyro_dropout.generative.registration import StoreName
from pyro_dropout.mathematics.errors import (
    PyroDropoutError,
    RangeError,
    ShapeError,
    check_count,
    check_finite,
    check_positive,
    describe,
)
from pyro_dropout.mathematics.quantiles import marginal_quantile
from pyro_dropout.mathematics.row_layout import RowDim, RowLayout
from pyro_dropout.mathematics.row_mixture import RowMixture

Bias = Literal["map", "gaussian", "dropout"]
Init = Literal["module", "paper"] | Callable[[str, Size], Tensor]


@dataclass(frozen=True)
class GuideSite:
    """What a guide knows of one latent variable, in unconstrained space.

    Attributes:
        name: the site's name.
        kind: "weight" or "bias"; sites of fewer than two dimensions are biases.
        row_dim: the dimension that counts rows.
        start: the value to start from.
        transform: from unconstrained space to the site's support; None for real-valued sites.
        event_dim: of the site in the model.
        plates: the names of the plates that the site stands in.
        reused: whether several layers share it.
    """

    name: str
    kind: str
    row_dim: RowDim
    start: Tensor
    transform: Any = None
    event_dim: int = 0
    plates: tuple[str, ...] = field(default=())
    reused: bool = False

    @property
    def plain(self) -> bool:
        """Whether the guide can sample the site directly: real-valued, and in no plate."""
        return self.transform is None and not self.plates


class SiteState(nn.Module):
    """The parameters (trained) and settings (buffers) of one site's distribution."""

    def __init__(self, **tensors: Tensor) -> None:
        super().__init__()
        for name, value in tensors.items():
            if isinstance(value, nn.Parameter):
                self.register_parameter(name, value)
            else:
                self.register_buffer(name, value)


def trained(value: Tensor) -> nn.Parameter:
    """Return a parameter that starts at ``value``."""
    return nn.Parameter(value.detach().clone())


class Image(dist.Delta):
    """The image of a draw in unconstrained space, whose volume term is part of its divergence from the prior too."""


@register_kl(Image, dist.Distribution)  # type: ignore[untyped-decorator]
def _kl_image(q: Image, p: Any) -> Tensor:
    log_density: Tensor = q.log_density - p.log_prob(q.v)  # Pyro's KL of a Delta leaves log_density out
    return log_density


def matching(value: float | Tensor, like: Tensor) -> Tensor:
    """Return a setting in the type of a site: straight from the number, which torch's default type would round."""
    return torch.as_tensor(value, dtype=like.dtype, device=like.device)


def per_row(name: str, value: Tensor, site: GuideSite) -> Tensor:
    """Return a setting, a number or one for each row of a site, so that it broadcasts against the site."""
    layout = RowLayout(site.start.shape, site.row_dim if site.kind == "weight" else "all")
    if tuple(value.shape) not in ((), (1,), (layout.rows,)):
        raise ShapeError(
            f"{name} of {site.name} must be a number or one for each of {layout.rows} rows; got shape"
            f" {tuple(value.shape)}."
        )
    return value if value.numel() == 1 else layout.per_row(value)


class SiteGuide(AutoGuide):
    """A guide with one distribution for each latent site of any Pyro model with continuous sites.

    Args:
        model: the Pyro model.
        bias: how sites of fewer than two dimensions are treated: a point ("map"), a Gaussian of learned width, or
            dropped as one row ("dropout", where the guide drops).
        row_dim: the dimension of a weight that counts rows; a number, a dict by site, or a function of the site's name.
            By default what the model says of the site, and else 1, as in torch's Linear.
        init: where means start: "module", the network's own parameters (in plain Pyro models, as "paper"); "paper",
            U(±√(3/fan_in)) for weights and 0 for biases; or a function of name and shape.
        init_scale: the standard deviation at which learned widths start.
        create_plates: as in Pyro's AutoGuide.
    """

    biases: tuple[str, ...] = ("map", "gaussian")

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        bias: Bias = "map",
        row_dim: BySite | None = None,
        init: Init = "module",
        init_scale: float = 0.1,
        create_plates: Any = None,
    ) -> None:
        if not callable(model):
            raise PyroDropoutError(f"model must be a Pyro model, a function or a module; got {describe(model)}.")
        if create_plates is not None and not callable(create_plates):
            raise PyroDropoutError(
                "create_plates must be a function of the model's arguments that returns plates, or None; got"
                f" {describe(create_plates)}."
            )
        super().__init__(model, create_plates=create_plates)  # type: ignore[no-untyped-call]
        self.prototype_trace: Any
        if bias not in self.biases:
            raise RangeError(f"bias must be one of {', '.join(self.biases)}; got {bias!r}.")
        if not callable(init) and init not in ("module", "paper"):
            raise RangeError(f"init must be 'module', 'paper' or a function of name and shape; got {init!r}.")
        check_positive("init_scale", init_scale)
        self.bias, self.init, self.init_scale, self._row_dim = bias, init, init_scale, row_dim
        self._pyro_name = StoreName.of(type(self).__name__)
        self._sites: dict[str, GuideSite] = {}
        self.states = nn.ModuleDict()

    def _start(self) -> None:
        """Read the model at once where it can name its sites without data; otherwise on the first call."""
        if hasattr(self.model, "sample_weights"):
            self._setup_prototype()

    # --- what a guide defines -----------------------------------------------------------------------------------------

    @abstractmethod
    def parameters_of(self, site: GuideSite) -> dict[str, Tensor]:
        """Return the tensors of a weight site's distribution: trained ones as ``nn.Parameter``."""

    @abstractmethod
    def weight_distribution(self, site: GuideSite, state: Any) -> Any:
        """Return q(w) of a weight site made from its tensors."""

    def bias_parameters(self, site: GuideSite) -> dict[str, Tensor]:
        """Return the tensors of a bias site's distribution."""
        if self.bias == "map":
            return {"loc": trained(site.start)}
        return {"loc": trained(site.start), "log_scale": trained(self.log_width(site))}

    def bias_distribution(self, site: GuideSite, state: Any) -> Any:
        """Return q(b) of a bias site: a point, or a Gaussian of its own width for each number."""
        if self.bias == "map":
            return dist.Delta(state.loc, event_dim=state.loc.dim())
        return gaussian(state.loc, state.log_scale)

    def log_width(self, site: GuideSite) -> Tensor:
        """Return the starting value of a learned log standard deviation."""
        return torch.full_like(site.start, self.init_scale).log()

    def setting(self, name: str, value: BySite, site: GuideSite, default: float) -> float | Tensor:
        """Return what an option given by number, dict or function says for ``site``."""
        found = by_site(name, value, site.name, list(self._expected_sites))
        return default if found is None else found

    # --- reading the model --------------------------------------------------------------------------------------------

    def _pyro_set_supermodule(self, name: str, context: Any) -> None:
        super()._pyro_set_supermodule(StoreName.of(name), context)  # two lists of guides may use one name

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        if not args and not kwargs and hasattr(self.model, "sample_weights"):
            # The trace is kept: with the network's own tensors as its values it costs no memory.
            started = InitMessenger(_first_or_drawn)(self.model.sample_weights)
            self.prototype_trace = poutine.block(poutine.trace(started).get_trace)()
        else:
            super()._setup_prototype(*args, **kwargs)  # type: ignore[no-untyped-call]
        found = list(self.prototype_trace.iter_stochastic_nodes())
        self._expected_sites = [name for name, _ in found]
        for name, site in found:
            self._sites[name] = self._read(name, site)
            known = self._sites[name]
            tensors = self.parameters_of(known) if known.kind == "weight" else self.bias_parameters(known)
            self.states[state_key(name)] = SiteState(**tensors)
        if not self._sites:
            raise PyroDropoutError("the model has no latent site for this guide; are all of them hidden or observed?")

    def _read(self, name: str, site: Any) -> GuideSite:
        fn, value, infer = site["fn"], site["value"], site["infer"]
        if not value.is_floating_point() or fn.support.is_discrete:
            raise PyroDropoutError(
                f"site {name!r} is discrete, and {type(self).__name__} is a guide for continuous sites. Enumerate it,"
                " or hide it with pyro.poutine.block and add a guide for it through AutoGuideList."
            )
        plates = tuple(frame.name for frame in site["cond_indep_stack"] if frame.vectorized)
        real = fn.support is constraints.real or _is_real(fn.support)
        transform = None if real else biject_to(fn.support)
        free = value if transform is None else transform.inv(value)
        kind = infer.get("kind", "weight" if value.dim() >= 2 else "bias")
        row_dim: RowDim = infer.get("row_dim", 1)
        chosen: Any = by_site("row_dim", self._row_dim, name, self._expected_sites)
        if chosen is not None:
            if isinstance(chosen, bool) or not isinstance(chosen, Integral):
                raise RangeError(f"row_dim of {name!r} must be a whole number; got {chosen!r}.")
            row_dim = int(chosen)
        if kind == "weight" and not -value.dim() <= int(row_dim or 0) < value.dim():
            raise RangeError(f"row_dim of {name!r} must index one of its {value.dim()} dimensions; got {row_dim}.")
        start = self._first_value(name, free.detach(), infer, kind, row_dim)
        return GuideSite(name, kind, row_dim, start, transform, fn.event_dim, plates, bool(infer.get("reused", False)))

    def _first_value(self, name: str, value: Tensor, infer: Any, kind: str, row_dim: RowDim) -> Tensor:
        if callable(self.init):
            chosen = self.init(name, value.shape)
            check_finite(f"init({name!r}, shape)", chosen)
            if chosen.shape != value.shape:
                raise RangeError(f"init gave shape {tuple(chosen.shape)} for {name!r}; it needs {tuple(value.shape)}.")
            return chosen.to(value)
        if self.init == "module" and "init" in infer:
            own: Tensor = infer["init"].to(value)
            return own
        if kind == "bias":
            return torch.zeros_like(value)
        outputs = next((size for d, size in enumerate(value.shape) if d != int(row_dim or 0) % value.dim()), 1)
        fan_in = infer.get("fan_in", max(1, value.numel() // max(1, outputs)))
        uniform: Tensor = (torch.rand_like(value) * 2 - 1) * (3 / fan_in) ** 0.5
        return uniform

    # --- a guide as a Pyro program ------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Sample every latent site; takes what the model takes and returns the values by name."""
        if self.prototype_trace is None:
            self._setup_prototype(*args, **kwargs)
        plates = self._create_plates(*args, **kwargs)  # type: ignore[no-untyped-call]
        states = self.states  # read once: reading it tells Pyro of every parameter
        self._before_sampling()
        result: dict[str, Tensor] = {}
        for name, site in self._sites.items():
            fn = self._distribution(site, states[state_key(name)])
            if isinstance(fn, RowMixture):
                fn.lenient = True
            infer: Any = {"reused": site.reused}
            if site.plain:
                result[name] = pyro.sample(name, fn, infer=infer)
                continue
            infer["is_auxiliary"] = True
            free = pyro.sample(f"_{self._pyro_name}_{name}", fn, infer=infer)
            value = free if site.transform is None else site.transform(free)
            log_density = self._log_density(site, free, value)
            with ExitStack() as stack:
                for plate in site.plates:
                    stack.enter_context(plates[plate])
                image = Image(value, log_density=log_density, event_dim=site.event_dim)  # type: ignore[no-untyped-call]
                result[name] = pyro.sample(name, image)
        return result

    def _before_sampling(self) -> None:
        """Prepare what the sites of one draw share; nothing, for most guides."""

    def _log_density(self, site: GuideSite, free: Tensor, value: Tensor) -> float | Tensor:
        """Return the volume term of a constrained site; a point estimate has none, as in Pyro's AutoDelta."""
        if site.transform is None or (site.kind == "bias" and self.bias == "map"):
            return 0.0
        log_volume: Tensor = site.transform.inv.log_abs_det_jacobian(value, free)
        extra = log_volume.dim() - (value.dim() - site.event_dim)
        return log_volume.sum(list(range(-extra, 0))) if extra > 0 else log_volume

    def _distribution(self, site: GuideSite, state: Any) -> Any:
        return self.weight_distribution(site, state) if site.kind == "weight" else self.bias_distribution(site, state)

    # --- the posterior ----------------------------------------------------------------------------------------------

    def _known(self) -> Iterator[GuideSite]:
        if self.prototype_trace is None:
            raise PyroDropoutError(
                f"{type(self).__name__} has not seen its model's sites yet: call it once with the model's arguments, or"
                " fit it, first."
            )
        return iter(self._sites.values())

    def posterior(self, name: str) -> Any:
        """Return the posterior distribution of one site."""
        sites = {site.name: site for site in self._known()}
        if name not in sites:
            raise PyroDropoutError(f"{name!r} is not a site of this guide; the sites are {', '.join(sites)}.")
        fn = self._marginal(sites[name], self.states[state_key(name)])
        transform = sites[name].transform
        if transform is None:
            return fn
        if isinstance(fn, dist.Delta):
            return dist.Delta(transform(fn.v), event_dim=fn.event_dim)
        return TransformedDistribution(fn, [transform])

    def _marginal(self, site: GuideSite, state: Any) -> Any:
        return self._distribution(site, state)

    def mean(self) -> dict[str, Tensor]:
        """Return E[w] of every site; of a constrained site, the image of the mean in unconstrained space."""
        found: dict[str, Tensor] = {}
        with torch.no_grad():
            for site in self._known():
                middle = self._marginal(site, self.states[state_key(site.name)]).mean
                found[site.name] = middle if site.transform is None else site.transform(middle)
        return found

    def sample_weights(self, n: int) -> dict[str, Tensor]:
        """Draw ``n`` times from the posterior: {name: (n, ...)}."""
        check_count("n", n)
        with torch.no_grad():
            self._before_sampling()
            found: dict[str, Tensor] = {}
            for site in self._known():
                value = self._distribution(site, self.states[state_key(site.name)]).sample((n,))
                found[site.name] = value if site.transform is None else site.transform(value)
        return found

    def median(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Return the posterior median of every single number of every site."""
        return {name: values[0] for name, values in self.quantiles([0.5], *args, **kwargs).items()}

    def quantiles(self, quantiles: list[float], *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Return quantiles of every single number of every site: {name: (len(quantiles), ...)}."""
        if self.prototype_trace is None and (args or kwargs):
            self._setup_prototype(*args, **kwargs)
        found: dict[str, Tensor] = {}
        with torch.no_grad():
            for site in self._known():
                fn = self._marginal(site, self.states[state_key(site.name)])
                values = [fn.v if isinstance(fn, dist.Delta) else marginal_quantile(fn, level) for level in quantiles]
                found[site.name] = torch.stack([v if site.transform is None else site.transform(v) for v in values])
        return found


def _first_or_drawn(site: Any) -> Tensor:
    """Return the value that the model says a site starts from, or a draw."""
    value: Tensor = site["infer"]["init"] if "init" in site["infer"] else site["fn"]()
    return value


def gaussian(loc: Tensor, log_scale: Tensor) -> RowMixture:
    """Return independent Gaussians with a width for each number, as a row mixture of one component."""
    one = torch.ones(1, dtype=loc.dtype, device=loc.device)
    return RowMixture(loc.unsqueeze(0), log_scale.exp(), one, row_dim=None, validate_args=False)


def _is_real(support: Any) -> bool:
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    return support is constraints.real


def state_key(name: str) -> str:
    """Return a site's name as torch allows it for a submodule, which may hold no dot."""
    return name.replace(".", "/")
