"""What a guide knows about one latent variable: its kind, its shape, and where it starts.

A *weight* is a site that the model marks as one, or else a real-valued site of two dimensions or more outside all
plates. A *bias* is a site that the model marks as one, or else a real-valued vector outside all plates. Everything else
(a scalar, a constrained site, a site in a plate) is an *other* latent variable, and is never dropped.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Literal

import torch
from pyro.distributions.util import sum_rightmost
from pyro.infer.autoguide.initialization import init_to_median
from pyro.ops.tensor_utils import periodic_repeat
from pyro.poutine.indep_messenger import CondIndepStackFrame
from torch import Size, Tensor
from torch.distributions import Transform, biject_to, constraints

from pyro_dropout.generative.half_precision import HALF
from pyro_dropout.generative.priors import BySite, by_site
from pyro_dropout.guides.starts import Given
from pyro_dropout.mathematics.checks import check_choice, check_finite
from pyro_dropout.mathematics.errors import PyroDropoutError, RangeError
from pyro_dropout.mathematics.row_layout import RowDim, RowLayout
from pyro_dropout.protocols import Distribution, HasMean, Message

Init = Literal["module", "paper"] | Callable[[str, Size], Tensor] | Mapping[str, Tensor] | HasMean
InitLoc = Callable[[Message], Tensor]


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

    def element(self) -> "GuideSite":
        """Return the site of one element of its plates."""
        lead = self.start.dim() - self.free_dim
        return replace(self, start=self.start[(0,) * lead], plates=())

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
    shape = known.element().start.shape if plates else free.shape
    rows = _rows(name, infer, row_dim, sites, shape, kind)
    known = replace(known, row_dim=rows, fan_in=_fan_in(kind, shape, rows, infer))
    if isinstance(init, Given):
        init.check(sites)
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
    if isinstance(init, Given) and name in init.values:
        return init.at(name, value, site.transform), True
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
