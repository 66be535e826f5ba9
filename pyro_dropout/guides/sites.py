"""What a guide knows about one latent variable: its kind, its shape, and where it starts.

A *weight* is a site that the model marks as one, or else a real-valued site of two dimensions or more outside all
plates. A *bias* is a site that the model marks as one, or else a real-valued vector outside all plates. Everything else
(a scalar, a constrained site, a site in a plate) is an *other* latent variable, and is never dropped.
"""

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Literal, TypedDict

import torch
from pyro.distributions import Delta
from pyro.distributions import Distribution as PyroDistribution
from pyro.distributions.util import sum_rightmost
from pyro.infer.autoguide.initialization import init_to_median
from pyro.ops.tensor_utils import periodic_repeat
from pyro.poutine.indep_messenger import CondIndepStackFrame
from torch import Size, Tensor, nn
from torch.distributions import IndependentTransform, Transform, biject_to, constraints, register_kl

from pyro_dropout.errors import PyroDropoutError, RangeError, ShapeError
from pyro_dropout.generative.precision import HALF
from pyro_dropout.generative.priors import BySite, by_site
from pyro_dropout.mathematics.checks import check_choice, check_finite, describe, did_you_mean
from pyro_dropout.mathematics.shapes import RowDim, RowLayout
from pyro_dropout.protocols import Distribution, HasMean, Message, SiteDistribution

InitScale = float | Literal["auto"]

SHARE = 0.1  # with "auto", the noise of a layer's outputs beside its inputs, times 2 and 3 with so many hidden layers


def first_width(init_scale: InitScale, fan_in: int, hidden: int) -> float:
    """Return the width at which the numbers of a site start; with "auto", 0.1/√fan_in.

    Then a layer's output has noise of a tenth of the inputs' size, however wide the layer is. With two and three hidden
    layers it is twice and three times as wide, because such networks overfit sooner; deeper ones would drown in it.
    """
    return SHARE * (hidden if hidden in (2, 3) else 1) / fan_in**0.5 if init_scale == "auto" else float(init_scale)


def given_weights(init: object) -> object:
    """Return ``init`` after a check of it; a fitted guide or a dict of weights as copies of the weights by site."""
    if hasattr(init, "members"):
        raise PyroDropoutError(
            "init must be one guide: the mean of an Ensemble is no network that was trained. Give a dict of weights."
        )
    weights = init.mean() if isinstance(init, HasMean) else init
    if callable(weights) and not isinstance(weights, nn.Module):
        return init
    if not isinstance(weights, Mapping):
        check_choice("init", init, ("module", "paper"), "a function of name and shape, a guide or a dict of weights")
        return init
    return {name: value.detach().clone() if isinstance(value, Tensor) else value for name, value in weights.items()}


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


_OF_DROPPING = ("p", "rate", "drop", "dropout", "drop_rate", "dropout_rate", "drop_prob", "dropout_prob", "p_drop")


def unknown_option(guide: type, given: Mapping[str, object]) -> str:
    """Return the error message for a keyword that no guide of this class takes, with what to write for it."""
    own = inspect.signature(guide).parameters.values()
    named = [each.name for each in own if each.name != "model" and each.kind is not each.VAR_KEYWORD]
    options, (name, value) = [*dict.fromkeys([*named, *Options.__annotations__])], next(iter(given.items()))
    advice = did_you_mean(name, options) or f" The options are {', '.join(options)}."
    if "keep" in options and name in _OF_DROPPING:
        kept = f"{1 - value:.4g}" if isinstance(value, float | int) else f"1 - {name}"
        advice = f" Write keep={kept}, the probability that a row is kept: torch's p is that of dropping it."
    return f"{guide.__name__} has no option {name!r}.{advice}"


def check_unless_by_site(check: Check, **options: BySite) -> None:
    """Check options that are given as numbers; those given by site are checked where they are read."""
    for name, value in options.items():
        if not callable(value) and not isinstance(value, Mapping):
            check(name, value)


@dataclass(frozen=True)
class GuideSite:
    """What a guide knows about one latent variable; shapes are those of unconstrained space."""

    name: str
    kind: str  # "weight", "bias" or "other"
    row_dim: RowDim
    start: Tensor  # the value to start from, (*plates, *event), with the plates at their full size
    transform: Transform | None = None  # from unconstrained space to the site's support; None for real-valued sites
    event_dim: int = 0  # how many dimensions the model's site has beyond its plates
    free_dim: int = 0  # the same in unconstrained space
    plates: tuple[CondIndepStackFrame, ...] = ()
    reused: bool = False  # whether several layers share it
    own: bool = False  # whether ``start`` is a value that the model or the user has given
    fan_in: int = 1  # of a weight, how many products are summed into one output

    @property
    def key(self) -> str:
        """The site's name as torch allows it for a submodule, which may hold no dot."""
        return self.name.replace(".", "/")

    @property
    def plain(self) -> bool:
        """Whether the guide can sample the site as one tensor: real-valued, and in no plate."""
        return self.transform is None and not self.plates

    def shown_in_part(self, subsampled: Collection[str] = ()) -> bool:
        """Whether a plate of the site is subsampled: its elements are never seen together."""
        return any((f.full_size or f.size) != f.size or f.name in subsampled for f in self.plates)

    @property
    def increasing(self) -> bool:
        """Whether each element grows with one number of unconstrained space, and depends on no other."""
        inner = self.transform
        while isinstance(inner, IndependentTransform):
            inner = inner.base_transform
        try:
            return inner is None or (inner.domain.event_dim == 0 and bool(torch.as_tensor(inner.sign > 0).all()))
        except NotImplementedError:
            return False

    def image(self, free: Tensor) -> Tensor:
        """Map a value from unconstrained space to the support of the site."""
        return free if self.transform is None else torch.as_tensor(self.transform(free))

    def log_volume(self, free: Tensor, value: Tensor) -> float | Tensor:
        """Return the transform's log-determinant term for a draw, one number for each element of a plate."""
        if self.transform is None:
            return 0.0
        found = self.transform.inv.log_abs_det_jacobian(value, free)
        return torch.as_tensor(sum_rightmost(found, found.dim() - value.dim() + self.event_dim))


def first_value(init_loc_fn: InitLoc | None) -> InitLoc:
    """Return the function that gives a site its value while a guide reads the model.

    By default that is the median of some draws of the prior, and of a wide prior on real numbers a point near its mean:
    the median of N(0, 1000²) is hundreds of units away, and training would not arrive.
    """

    def first(site: Message) -> Tensor:
        if init_loc_fn is not None:
            return init_loc_fn(site)
        infer, fn = site["infer"], site["fn"]
        found: Tensor = infer["init"] if "init" in infer else fn() if fn.support.is_discrete else init_to_median(site)
        return found if "init" in infer else near_mean(fn, found)

    return first


def near_mean(fn: Distribution, drawn: Tensor) -> Tensor:
    """Return a draw of a wide prior on real numbers at a point near the prior's mean, and any other as it is."""
    if not is_real(fn.support):
        return drawn
    try:
        mean = fn.mean.expand(drawn.shape)
    except NotImplementedError:  # as of a distribution that is a flow
        return drawn
    return near(mean, drawn).where(mean.isfinite(), drawn)


def is_real(support: object) -> bool:
    """Whether a support is all real numbers, or vectors of them."""
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    return support is constraints.real


def near(center: Tensor, drawn: Tensor) -> Tensor:
    """Return draws that are no further than two units from a center: those outside are folded back, evenly spread.

    Two units of unconstrained space are how far chains of Stan and of Pyro's NUTS start from zero.
    """
    return center + (drawn - center + 2).remainder(4) - 2


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
    transform = None if is_real(fn.support) else _transform(name, fn, guide)
    free = value if transform is None else transform.inv(value).detach()
    plates = tuple(frame for frame in site["cond_indep_stack"] if frame.vectorized)
    free_dim = fn.event_dim + free.dim() - value.dim()
    for frame in plates:  # a subsampled plate shows some elements, and every one of them has its own numbers
        size = frame.full_size or frame.size
        if size != frame.size:
            free = periodic_repeat(free, size, frame.dim - free_dim).contiguous()
    found = "other" if transform is not None or plates or not free.dim() else "weight" if free.dim() >= 2 else "bias"
    kind = infer.get("kind") or found
    check_choice(f"infer['kind'] of {name!r}", kind, ("weight", "bias", "other"))
    if kind == "weight" and plates:
        raise PyroDropoutError(
            f"site {name!r} is marked as a weight and is in a plate, but a weight is one tensor whose rows a guide"
            " may drop. Sample it outside of all plates, or mark it as 'other'."
        )
    shape = free.shape
    rows = _rows(name, infer, by_site("row_dim", row_dim, name, sites), shape, kind)
    across = (rows if isinstance(rows, int) else 0) % max(1, len(shape))
    outputs = next((size for d, size in enumerate(shape) if d != across), 1)
    fan_in = infer.get("fan_in", max(1, shape.numel() // max(1, outputs))) if kind == "weight" else 1
    unknown = [given_name for given_name in init if given_name not in sites] if isinstance(init, dict) else []
    if unknown:
        raise PyroDropoutError(f"init names {unknown[0]!r}, which is not a site; the sites are {', '.join(sites)}.")
    event, reused = fn.event_dim, bool(infer.get("reused", False))
    known = GuideSite(name, kind, rows, free, transform, event, free_dim, plates, reused, fan_in=fan_in)
    start, own = _start(known, infer, init, given)
    return replace(known, start=start, own=own)


def _rows(name: str, infer: Message, chosen: object, shape: Size, kind: str) -> RowDim:
    """Return the dimension of a site (of one element of its plates) that indexes rows."""
    found: RowDim = infer.get("row_dim", min(1, max(0, len(shape) - 1)))
    if chosen is not None:
        if isinstance(chosen, bool) or not isinstance(chosen, Integral):
            raise RangeError(f"row_dim of {name!r} must be a whole number; got {chosen!r}.")
        found = int(chosen)
    if kind == "weight" and isinstance(found, int) and not -len(shape) <= found < len(shape):
        raise RangeError(f"row_dim of {name!r} must index one of its {len(shape)} dimensions; got {found}.")
    return found


def _start(site: GuideSite, infer: Message, init: object, given: bool) -> tuple[Tensor, bool]:
    """Return where a site's mean starts, and whether the model or the user has set it."""
    value, name = site.start, site.name
    by_name = isinstance(init, dict) and name in init
    if by_name or callable(init):
        chosen = init[name] if by_name else init(name, value.shape)  # type: ignore[index,operator]
        check_finite(f"init of {name!r}", chosen)
        if by_name and site.transform is not None:
            chosen = site.transform.inv(chosen.to(value))
        if chosen.shape != value.shape:
            raise ShapeError(f"init has shape {tuple(chosen.shape)} for {name!r}; it needs {tuple(value.shape)}.")
        check_finite(f"init of {name!r}", chosen)
        return chosen.to(value), by_name
    if given or (init != "paper" and "init" in infer):
        return value, True
    if site.kind == "bias" and init == "paper":
        return torch.zeros_like(value), False
    if site.kind != "weight":
        return value, False
    return (torch.rand_like(value) * 2 - 1) * (3 / site.fan_in) ** 0.5, False


def row_layout(site: GuideSite) -> RowLayout:
    """Return the rows of a site; all but a weight are one row."""
    return RowLayout(site.start.shape, site.row_dim if site.kind == "weight" else "all")


def per_row(name: str, value: Tensor, site: GuideSite) -> Tensor:
    """Return a setting, a number or one for each row of a site, so that it broadcasts against the site."""
    layout = row_layout(site)
    layout.check_per_row(f"{name} of {site.name}", value)
    return value if value.numel() == 1 else layout.per_row(value)


def over_rows(value: float | Tensor, site: GuideSite) -> float | Tensor:
    """Return a setting with one number for each row of a weight laid out over rows; of other shapes it broadcasts."""
    if site.kind != "weight" or not isinstance(value, Tensor):
        return value
    layout = row_layout(site)
    return layout.per_row(value) if tuple(value.shape) == (layout.rows,) else value


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


class Image(Delta):
    """A draw mapped from unconstrained space; its divergence from the prior includes the log-determinant term."""


@register_kl(Image, PyroDistribution)  # type: ignore[untyped-decorator]
def _kl_image(q: Image, p: Distribution) -> Tensor:
    log_density: Tensor = q.log_density - p.log_prob(q.v)  # Pyro's KL of a Delta leaves log_density out
    return log_density


def check_distribution(q: object, site: GuideSite, guide: str) -> None:
    """Raise an error unless a guide can sample a site from q: see ``protocols.SiteDistribution``."""
    if not isinstance(q, SiteDistribution):
        raise PyroDropoutError(
            f"{guide} must give a distribution of Pyro for {site.name!r}; it gave {describe(q)}, of type"
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
