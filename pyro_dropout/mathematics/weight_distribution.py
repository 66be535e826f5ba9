"""What distributions over weights share: batches hold no copies, and a draw remembers what it was made of.

Placeholders stand for draws, and for densities, that do not exist.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Self

import torch
from pyro.distributions import TorchDistribution
from torch import Size, Tensor
from torch.distributions import constraints

from pyro_dropout.errors import PyroDropoutError, SingularError
from pyro_dropout.mathematics.checks import check_shape

LOG_2PI = 1.8378770664093453


class Draw(NamedTuple):
    """The parts that a sample was made from: in float32 m + σε may round to m, and then only ε gives its density."""

    value: weakref.ref[Tensor]
    labels: Tensor | None
    noise: Tensor
    coefficients: Tensor | None


class WeightDistribution(TorchDistribution):
    """A distribution over a weight tensor. Copies with a larger batch share its parameters."""

    arg_constraints: dict[str, constraints.Constraint] = {}  # noqa: RUF012 - torch reads a class attribute
    joint = False  # whether a draw shares noise with the draws of other sites
    _draw: Draw | None = None  # the last one, and what it was made from

    @constraints.dependent_property(is_discrete=False)
    def support(self) -> constraints.Constraint:
        """Every real tensor of the event's shape."""
        return constraints.independent(constraints.real, len(self.event_shape))

    def expand(self, batch_shape: Sequence[int], _instance: Self | None = None) -> Self:
        """Return the same distribution with a larger batch; the parameters are shared, not copied."""
        new = type(self).__new__(type(self)) if _instance is None else _instance
        new.__dict__.update(self.__dict__)
        new._batch_shape, new._draw = Size(batch_shape), None
        return new

    def _check_value(self, value: Tensor) -> Size:
        """Return the shape of a batch of values; raise unless each has the shape of an event."""
        lead, event = value.dim() - len(self.event_shape), tuple(self.event_shape)
        check_shape(lead >= 0 and value.shape[lead:] == event, "value", f"(..., *{event})", value)
        return value.shape[:lead]

    def _made_of(self, value: Tensor) -> Draw | None:
        """Return what a value was made of if it is the last draw, which has a density even if other sites share it."""
        if self._draw is not None and self._draw.value() is value:
            return self._draw
        if self.joint:
            raise PyroDropoutError(
                "sites that are drawn together have a density for whole draws only; guide.posterior(name) has one for"
                " each site."
            )
        return None


def drawn(random: Callable[..., Tensor], shape: Sequence[int], like: Tensor) -> Tensor:
    """Return random numbers of a shape in the type of ``like``."""
    return random(shape, dtype=like.dtype, device=like.device)


def as_like(value: float | Tensor, like: Tensor) -> Tensor:
    """Return a number or a tensor in the type of ``like``."""
    return value.to(like) if isinstance(value, Tensor) else like.new_full((), value)


# --- placeholders -----------------------------------------------------------------------------------------------------

Kwargs = Mapping[str, object] | None
MARK = "_pyro_dropout_per_data_point"
# Operations that Pyro applies to every log density of a trace, whether or not the loss reads it.
_IN_PASSING = {"sum", "mul", "__mul__", "__rmul__", "expand", "reshape", "detach", "clone", "dim", "size", "numel"}
_QUESTIONS = {"isnan", "isinf", "isfinite", "any", "all", "eq", "__eq__", "__bool__", "is_floating_point"}


def is_placeholder(value: object) -> bool:
    """Whether ``value`` stands for weights that are drawn for every data point."""
    return getattr(value, MARK, None) is not None


class NoDensity(Tensor):
    """A log density that must not be read: a trace may carry it, but using its value raises an error."""

    site: str

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., object], types: object, args: Sequence[object] = (), kwargs: Kwargs = None
    ) -> object:
        name = getattr(func, "__name__", "")
        if name in _QUESTIONS or name == "__get__":
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        site = next((found for each in args if (found := getattr(each, "site", ""))), "")
        if name in _IN_PASSING:
            passed = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
            if isinstance(passed, NoDensity):
                passed.site = site
            return passed
        of = f" of site {site!r}" if site else ""
        raise SingularError(
            f"log q(w) does not exist for these draws{of}: at scale=0 they lie on a set of volume zero, and a draw for"
            " each data point has no joint density. Use pyro_dropout.ELBO, which needs none;"
            " pyro.infer.TraceMeanField_ELBO, which needs none for real-valued sites; or scale > 0 with shared draws."
        )


def no_density(like: Tensor, shape: torch.Size, site: str = "") -> Tensor:
    """Return a placeholder for the log density of a draw of ``site``, of shape ``shape``."""
    found = torch.zeros((), dtype=like.dtype, device=like.device).expand(shape).as_subclass(NoDensity)
    found.site = site
    return found
