"""What a guide knows about one latent variable: its kind, its shape, and where it starts.

A *weight* is a site that the model marks as one, or else a real-valued site of two dimensions or more outside all
plates. A *bias* is a site that the model marks as one, or else a real-valued vector outside all plates. Everything else
(a scalar, a constrained site, a site in a plate) is an *other* latent variable, and is never dropped.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Literal, TypedDict

import torch
from pyro.distributions import Delta
from pyro.distributions import Distribution as PyroDistribution
from pyro.distributions.torch_distribution import TorchDistributionMixin
from pyro.distributions.util import sum_rightmost
from pyro.infer.autoguide.initialization import init_to_median
from pyro.ops.tensor_utils import periodic_repeat
from pyro.poutine.indep_messenger import CondIndepStackFrame
from torch import Size, Tensor, nn
from torch.distributions import Distribution as TorchDistribution
from torch.distributions import Transform, biject_to, constraints, register_kl

from pyro_dropout.errors import PyroDropoutError, RangeError, ShapeError
from pyro_dropout.generative.precision import HALF
from pyro_dropout.generative.priors import BySite, by_site
from pyro_dropout.mathematics.checks import check_choice, check_finite, check_positive, describe
from pyro_dropout.mathematics.shapes import RowDim, RowLayout
from pyro_dropout.protocols import Distribution, HasMean, Message, SiteDistribution

InitScale = float | Literal["auto"]

SHARE = 0.1  # with "auto", the noise of a layer's outputs beside its inputs, times 2 and 3 with so many hidden layers


def check_init_scale(init_scale: object) -> None:
    """Raise an error unless this is a positive number or "auto"."""
    if isinstance(init_scale, str):
        check_choice("init_scale", init_scale, ("auto",), "a positive number")
    else:
        check_positive("init_scale", init_scale)


def first_width(init_scale: InitScale, fan_in: int, hidden: int) -> float:
    """Return the width at which the numbers of a site start; with "auto", 0.1/√fan_in.

    A layer's output sums ``fan_in`` products, so independent noise of this width in the weights adds noise of a tenth
    of the inputs' size to it, however wide the layer is. With two and three hidden layers it is twice and three times
    as wide, because such networks overfit sooner; deeper ones would drown in the noise of so many layers.
    """
    return SHARE * (hidden if hidden in (2, 3) else 1) / fan_in**0.5 if init_scale == "auto" else float(init_scale)


def given_weights(init: object) -> object:
    """Return ``init`` as it is, or, if it is a fitted guide or a dict of weights, copies of the weights by site."""
    if hasattr(init, "members"):
        raise PyroDropoutError(
            "init must be one guide: the mean of an Ensemble is no network that was trained. Give a dict of weights."
        )
    weights = init.mean() if isinstance(init, HasMean) else init
    if isinstance(weights, nn.Module):
        raise PyroDropoutError(
            f"init must be a guide or a dict of weights; got a network, {type(init).__name__}. The model's own network"
            " is init='module'; of another one give dict(net.named_parameters())."
        )
    if not isinstance(weights, Mapping):
        return init
    wrong = next((name for name, value in weights.items() if not isinstance(value, Tensor)), None)
    if wrong is not None:
        raise PyroDropoutError(f"init must hold a tensor for each site; got {describe(weights[wrong])} for {wrong!r}.")
    return {name: value.detach().clone() for name, value in weights.items()}


Init = Literal["module", "paper"] | Callable[[str, Size], Tensor] | Mapping[str, Tensor] | HasMean
InitLoc = Callable[[Message], Tensor]

Family = Literal["map", "gaussian"]
Bias = Literal["map", "gaussian", "dropout", "dropout_each"]
Check = Callable[[str, object], None]


class Common(TypedDict, total=False):
    """The options of every guide but ``bias``."""

    other: Family
    row_dim: BySite | None
    init: Init
    init_loc_fn: InitLoc | None
    init_scale: InitScale
    create_plates: Callable[..., object] | None


class Options(Common, total=False):
    """The options of every guide, by keyword; ``SiteGuide`` explains them."""

    bias: Bias


def check_unless_by_site(check: Check, **options: BySite) -> None:
    """Check options that are given as numbers; those given by site are checked where they are read."""
    for name, value in options.items():
        if not callable(value) and not isinstance(value, Mapping):
            check(name, value)


@dataclass(frozen=True)
class GuideSite:
    """What a guide knows about one latent variable; shapes are those of unconstrained space.

    Attributes:
        name: the site's name.
        kind: "weight", "bias" or "other".
        row_dim: the dimension that indexes rows.
        start: the value to start from, (*plates, *event), with the plates at their full size.
        transform: from unconstrained space to the site's support; None for real-valued sites.
        event_dim: how many dimensions the model's site has beyond its plates.
        free_dim: the same in unconstrained space.
        plates: the plates that the site is in, as Pyro's frames.
        reused: whether several layers share it.
        own: whether ``start`` is a value that the model or the user has given.
        fan_in: of a weight, how many products are summed into one output.
    """

    name: str
    kind: str
    row_dim: RowDim
    start: Tensor
    transform: Transform | None = None
    event_dim: int = 0
    free_dim: int = 0
    plates: tuple[CondIndepStackFrame, ...] = ()
    reused: bool = False
    own: bool = False
    fan_in: int = 1

    @property
    def key(self) -> str:
        """The site's name as torch allows it for a submodule, which may hold no dot."""
        return self.name.replace(".", "/")

    @property
    def plain(self) -> bool:
        """Whether the guide can sample the site as one tensor: real-valued, and in no plate."""
        return self.transform is None and not self.plates

    @property
    def subsampled(self) -> bool:
        """Whether a plate of the site is subsampled."""
        return any((frame.full_size or frame.size) != frame.size for frame in self.plates)

    def image(self, free: Tensor) -> Tensor:
        """Map a value from unconstrained space to the support of the site."""
        return free if self.transform is None else torch.as_tensor(self.transform(free))

    def log_volume(self, free: Tensor, value: Tensor) -> float | Tensor:
        """Return the transform's log-determinant term for a draw, one number for each element of a plate."""
        if self.transform is None:
            return 0.0
        found = self.transform.inv.log_abs_det_jacobian(value, free)
        return torch.as_tensor(sum_rightmost(found, found.dim() - value.dim() + self.event_dim))


def read_site(
    name: str, site: Message, *, guide: str, sites: list[str], row_dim: BySite | None, init: object, given: bool
) -> GuideSite:
    """Return what a guide knows about a site of its model's trace; ``given``: its value is from ``init_loc_fn``."""
    fn, value, infer = site["fn"], site["value"].detach(), site["infer"]
    value = value.float() if value.dtype in HALF else value  # a guide is trained in single precision at least
    if not value.is_floating_point() or fn.support.is_discrete:
        raise PyroDropoutError(
            f"site {name!r} is discrete, and {guide} is a guide for continuous sites. Enumerate"
            " it (https://pyro.ai/examples/enumeration.html) and hide it from the guide with pyro.poutine.block, or"
            " hide it with pyro.poutine.block and add a guide for it through AutoGuideList."
        )
    real = _is_real(fn.support)
    transform = None if real else _transform(name, fn, guide)
    free = value if transform is None else transform.inv(value).detach()
    plates = tuple(frame for frame in site["cond_indep_stack"] if frame.vectorized)
    free_dim = fn.event_dim + free.dim() - value.dim()
    for frame in plates:  # a subsampled plate shows some elements, and every one of them has its own numbers
        size = frame.full_size or frame.size
        if size != frame.size:
            free = periodic_repeat(free, size, frame.dim - free_dim).contiguous()
    kind = _kind(name, infer, real, free, bool(plates))
    known = GuideSite(name, kind, 0, free, transform, fn.event_dim, free_dim, plates, bool(infer.get("reused", False)))
    shape = free.shape
    rows = _rows(name, infer, row_dim, sites, shape, kind)
    known = replace(known, row_dim=rows, fan_in=_fan_in(kind, shape, rows, infer))
    unknown = [given_name for given_name in init if given_name not in sites] if isinstance(init, dict) else []
    if unknown:
        raise PyroDropoutError(f"init names {unknown[0]!r}, which is not a site; the sites are {', '.join(sites)}.")
    start, own = _start(known, infer, init, given)
    return replace(known, start=start, own=own)


def first_value(init_loc_fn: InitLoc | None) -> InitLoc:
    """Return the function that gives each site the value it has while a guide reads its model.

    The value comes from ``init_loc_fn``, or else from the model; otherwise it is the prior's median (discrete: a draw).
    """

    def first(site: Message) -> Tensor:
        if init_loc_fn is not None:
            return init_loc_fn(site)
        infer, fn = site["infer"], site["fn"]
        found: Tensor = infer["init"] if "init" in infer else fn() if fn.support.is_discrete else init_to_median(site)
        return found

    return first


def per_row(name: str, value: Tensor, site: GuideSite) -> Tensor:
    """Return a setting, a number or one for each row of a site, so that it broadcasts against the site."""
    layout = RowLayout(site.start.shape, site.row_dim if site.kind == "weight" else "all")
    layout.check_per_row(f"{name} of {site.name}", value)
    return value if value.numel() == 1 else layout.per_row(value)


def _kind(name: str, infer: Message, real: bool, free: Tensor, in_plates: bool) -> str:
    if infer.get("kind") is not None:
        check_choice(f"infer['kind'] of {name!r}", infer["kind"], ("weight", "bias", "other"))
        if infer["kind"] == "weight" and in_plates:
            raise PyroDropoutError(
                f"site {name!r} is marked as a weight and is in a plate, but a weight is one tensor whose rows a guide"
                " may drop. Sample it outside of all plates, or mark it as 'other'."
            )
        return str(infer["kind"])
    if not real or in_plates or not free.dim():
        return "other"
    return "weight" if free.dim() >= 2 else "bias"


def _rows(name: str, infer: Message, chosen: BySite | None, sites: list[str], shape: Size, kind: str) -> RowDim:
    """Return the dimension of a site (of one element of its plates) that indexes rows."""
    found: RowDim = infer.get("row_dim", min(1, max(0, len(shape) - 1)))
    said: object = by_site("row_dim", chosen, name, sites)
    if said is not None:
        if isinstance(said, bool) or not isinstance(said, Integral):
            raise RangeError(f"row_dim of {name!r} must be a whole number; got {said!r}.")
        found = int(said)
    if kind == "weight" and isinstance(found, int) and not -len(shape) <= found < len(shape):
        raise RangeError(f"row_dim of {name!r} must index one of its {len(shape)} dimensions; got {found}.")
    return found


def _fan_in(kind: str, shape: Size, rows: RowDim, infer: Message) -> int:
    """Return how many products a weight sums into one output: what the model says, or else by its shape."""
    if kind != "weight":
        return 1
    outputs = next(
        (size for d, size in enumerate(shape) if d != (rows if isinstance(rows, int) else 0) % len(shape)), 1
    )
    found: int = infer.get("fan_in", max(1, shape.numel() // max(1, outputs)))
    return found


def _start(site: GuideSite, infer: Message, init: object, given: bool) -> tuple[Tensor, bool]:
    """Return where a site's mean starts, and whether the model or the user has set it."""
    value, name = site.start, site.name
    if isinstance(init, dict) and name in init:
        free = init[name] if site.transform is None else site.transform.inv(init[name].to(value))
        if free.shape != value.shape:
            raise ShapeError(f"init has shape {tuple(free.shape)} for {name!r}; it needs {tuple(value.shape)}.")
        check_finite(f"init[{name!r}]", free)
        return free.to(value), True
    if callable(init):
        chosen = init(name, value.shape)
        check_finite(f"init({name!r}, shape)", chosen)
        if chosen.shape != value.shape:
            raise RangeError(f"init gave shape {tuple(chosen.shape)} for {name!r}; it needs {tuple(value.shape)}.")
        return chosen.to(value), False
    if given or (init != "paper" and "init" in infer):
        return value, True
    if site.kind == "bias" and init == "paper":
        return torch.zeros_like(value), False
    if site.kind != "weight":
        return value, False
    return (torch.rand_like(value) * 2 - 1) * (3 / site.fan_in) ** 0.5, False


def _transform(name: str, fn: Distribution, guide: str) -> Transform:
    try:
        found: Transform = biject_to(fn.support)
        return found
    except NotImplementedError:
        advice = "Reparameterise it (pyro.poutine.reparam), or hide it and add a guide for it through AutoGuideList."
        if "sphere" in repr(fn.support).lower():
            reparam = "pyro.infer.reparam.ProjectedNormalReparam()"
            advice = f"Write poutine.reparam(model, config={{{name!r}: {reparam}}})."
        raise PyroDropoutError(
            f"site {name!r} ({type(fn).__name__}) has the support {fn.support}, which no bijection maps to"
            f" real numbers, so {guide} cannot draw it. {advice}"
        ) from None


def _is_real(support: constraints.Constraint) -> bool:
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    return support is constraints.real


_CONVERTED: dict[type, type] = {}  # a class of torch, and the one that also has Pyro's methods


class Image(Delta):
    """A draw mapped from unconstrained space; its divergence from the prior includes the log-determinant term."""


@register_kl(Image, PyroDistribution)  # type: ignore[untyped-decorator]
def _kl_image(q: Image, p: Distribution) -> Tensor:
    log_density: Tensor = q.log_density - p.log_prob(q.v)  # Pyro's KL of a Delta leaves log_density out
    return log_density


def pyro_distribution(q: Distribution) -> Distribution:
    """Return a distribution of torch as one of Pyro, with the same parameters; anything else as it is.

    Example:
        >>> import torch
        >>> q = pyro_distribution(torch.distributions.Independent(torch.distributions.Normal(torch.zeros(3), 1.0), 1))
        >>> q().shape, isinstance(q, torch.distributions.Independent)
        (torch.Size([3]), True)
    """
    if not isinstance(q, TorchDistribution) or isinstance(q, TorchDistributionMixin):
        return q
    converted, kind = copy.copy(q), type(q)
    if kind not in _CONVERTED:
        _CONVERTED[kind] = type(kind.__name__, (kind, TorchDistributionMixin), {"__module__": kind.__module__})
    converted.__class__ = _CONVERTED[kind]
    return converted


def check_distribution(q: object, site: GuideSite, guide: str) -> None:
    """Raise an error unless a guide can sample a site from q: see ``protocols.SiteDistribution``."""
    if not isinstance(q, SiteDistribution):
        raise PyroDropoutError(
            f"{guide} must give a distribution of Pyro or torch for {site.name!r}; it gave {describe(q)}, of type"
            f" {type(q).__module__}.{type(q).__qualname__}."
        )
    shape, event = q.batch_shape + q.event_shape, site.start.dim() if site.plain else site.free_dim
    if shape != site.start.shape or (len(q.event_shape) != event and not hasattr(q, "joint")):
        raise PyroDropoutError(
            f"{guide} must give {site.name!r} a distribution of shape {tuple(site.start.shape)} whose last {event}"
            f" dimensions are its event; it gave {type(q).__name__} with batch {tuple(q.batch_shape)} and event"
            f" {tuple(q.event_shape)}. Write .to_event({event})."
        )
    if not q.has_rsample and not isinstance(q, Delta):
        raise PyroDropoutError(
            f"{guide} gives {site.name!r} a {type(q).__name__}, whose draws have no gradient (rsample); training would"
            " not move it."
        )
