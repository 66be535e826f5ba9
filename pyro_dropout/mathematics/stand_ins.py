"""What stands in for weights and densities that do not exist: placeholders of draws, and densities not to be read."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from pyro_dropout.errors import SingularError

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
