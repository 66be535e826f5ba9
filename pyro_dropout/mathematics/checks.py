"""Checks of arguments, made once where a caller hands them in, and second names of arguments.

Every message names the argument, what is allowed, and what was given.
"""

import difflib
import functools
import inspect
import math
from collections.abc import Callable, Iterable
from numbers import Integral, Real
from typing import Any, TypeVar

import torch
from torch import Tensor

from pyro_dropout.errors import PyroDropoutError, RangeError, ShapeError, warn_caller


def describe(value: object) -> str:
    """Format ``value`` for an error message: small values in full, large tensors by shape and range."""
    if not isinstance(value, Tensor):
        return repr(value)
    if value.numel() == 1:
        return repr(value.item())
    if value.numel() <= 8:
        return repr(value.tolist())
    finite = value[torch.isfinite(value)]
    odd = value.numel() - finite.numel()
    span = f"from {finite.min().item():.6g} to {finite.max().item():.6g}" if finite.numel() else "with no finite value"
    return f"a tensor of shape {tuple(value.shape)} {span}" + (f" and {odd} not finite" if odd else "")


def check_number(name: str, value: object) -> float | Tensor:
    """Return ``value``; raise unless it is a real number or a real tensor (a bool is neither)."""
    if isinstance(value, Tensor):
        if not value.is_floating_point() and value.dtype not in (torch.int32, torch.int64):
            raise RangeError(f"{name} must be a real number or a real tensor; got a tensor of {value.dtype}.")
        return value
    if isinstance(value, bool) or not isinstance(value, Real):  # numpy's numbers are Real too
        raise RangeError(f"{name} must be a real number or a real tensor; got {type(value).__name__} {value!r}.")
    return float(value)


def _in_range(allowed: str, inside: Callable[[float | Tensor], bool | Tensor]) -> Callable[[str, object], None]:
    """Return a check that every element of a value is a number ``inside`` a range; ``allowed`` is it in words."""

    def check(name: str, value: object) -> None:
        holds = inside(check_number(name, value))
        if not (bool(holds.all()) if isinstance(holds, Tensor) else holds):
            raise RangeError(f"{name} must {allowed}; got {describe(value)}.")

    return check


check_positive = _in_range("be positive and finite", lambda v: (v > 0) & (v < math.inf))
check_non_negative = _in_range("be zero or positive, and finite", lambda v: (v >= 0) & (v < math.inf))
check_keep = _in_range("lie in (0, 1]", lambda v: (v > 0) & (v <= 1))
check_rate = _in_range("lie in [0, 1]", lambda v: (v >= 0) & (v <= 1))
# Of any type: 455.0 is whole.
check_whole = _in_range("be a whole number of at least 1", lambda v: (v >= 1) & (v < math.inf) & (v // 1 == v))


def check_held(name: str, value: object) -> None:
    """Raise if a tensor is on the device "meta", where it has a shape and no numbers."""
    if isinstance(value, Tensor) and value.is_meta:
        raise ShapeError(
            f"{name} must hold numbers; got a tensor on the device 'meta', which has none. Make it on 'cpu', or fill it"
            " first, as load_state_dict(..., assign=True) does."
        )


def check_dense(name: str, value: object) -> None:
    """Raise if a tensor has no numbers, or a sparse or other non-strided layout, which few operations support."""
    check_held(name, value)
    if isinstance(value, Tensor) and value.layout is not torch.strided:
        got = f"one of layout {value.layout}. Write {name.split()[-1]}.to_dense()."
        raise ShapeError(f"{name} must be a dense tensor; got {got}")


def check_finite(name: str, value: object, *, data: bool = False) -> None:
    """Raise unless every element of the tensor is finite; of data the message names the rows that are not."""
    if not isinstance(value, Tensor):
        raise ShapeError(f"{name} must be a tensor; got {type(value).__name__} {value!r}.")
    check_dense(name, value)
    if not value.is_floating_point():
        raise RangeError(f"{name} must be a floating-point tensor; got {value.dtype}.")
    if data:
        check_data_finite(name, value)
    elif not bool(torch.isfinite(value).all()):
        raise RangeError(f"{name} must be finite; got {describe(value)}.")


def check_data_finite(name: str, value: Tensor) -> None:
    """Raise unless every number of some data, (N, ...), is finite; the message names the rows that are not."""
    good = torch.isfinite(value)
    if bool(good.all()):
        return
    rows = [] if value.dim() == 0 else (~good).reshape(len(value), -1).any(1).nonzero().flatten().tolist()
    listed, more = ", ".join(map(str, rows[:5])), f" and {len(rows) - 5} more" if len(rows) > 5 else ""
    advice = f" Leave out row{'s' * (len(rows) > 1)} {listed}{more}, or fill in what is missing there." if rows else ""
    raise RangeError(f"{name} must be finite; got {describe(value)}.{advice}")


def check_shape(fits: bool, name: str, allowed: str, value: Tensor) -> None:
    """Raise a ShapeError that names the allowed shape, unless the tensor fits."""
    if not fits:
        raise ShapeError(f"{name} must have shape {allowed}; got {tuple(value.shape)}.")


def check_flag(name: str, value: object) -> None:
    """Raise unless ``value`` is True or False: any other value would silently be read as one of them."""
    if not isinstance(value, bool):
        raise RangeError(f"{name} must be True or False; got {value!r}.")


def check_seed(seed: object, least: int = -(2**63), most: int = 2**64 - 1) -> None:
    """Raise unless ``seed`` is None or a whole number in the range of the generator (torch's by default)."""
    if isinstance(seed, bool) or not isinstance(seed, Integral | None):
        raise RangeError(f"seed must be a whole number or None; got {seed!r}.")
    if seed is not None and not least <= int(seed) <= most:
        raise RangeError(f"seed must be a whole number from {least} to {most}; got {seed!r}.")


def check_count(name: str, value: object, least: int = 1) -> None:
    """Raise unless ``value`` is a whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
        raise RangeError(f"{name} must be a whole number of at least {least}; got {value!r}.")


def check_choice(name: str, value: object, choices: Iterable[object], otherwise: str = "") -> None:
    """Raise unless ``value`` is one of ``choices``; ``otherwise`` names what else the caller accepts, in words."""
    listed = list(choices)
    if any(value is choice or (type(value) is type(choice) and value == choice) for choice in listed):
        return
    words = [*map(repr, listed), *([otherwise] if otherwise else [])]
    allowed = " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
    raise RangeError(f"{name} must be {allowed}; got {value!r}.")


def check_level(name: str, value: object) -> None:
    """Raise unless ``value`` is a number strictly between 0 and 1, such as the probability of an interval."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) < 1:
        raise RangeError(f"{name} must lie strictly between 0 and 1; got {value!r}.")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a question for the end of a message, if a misspelt name is close to a known one; else ""."""
    close = difflib.get_close_matches(name, list(known), 1)
    return f" Did you mean {close[0]!r}?" if close else ""


def check_device(name: str, value: object) -> torch.device:
    """Return ``value`` as a torch device; raise with the reason if it cannot be used here."""
    try:
        device: torch.device = torch.device(value)  # type: ignore[call-overload]  # what is not a device raises
        torch.empty(0, device=device).sum().item()  # "meta" holds no numbers
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as cause:  # backends raise different types
        reason = (str(cause).splitlines() or [type(cause).__name__])[0]
        allowed = "a torch device that can be used here, such as 'cpu' or 'cuda'"
        raise PyroDropoutError(f"{name} must be {allowed}; got {value!r}: {reason}") from None
    return device


Called = TypeVar("Called", bound=Callable[..., Any])  # a function, or a class with its constructor
GONE_IN = "2.0"


def also(**names: str) -> Callable[[Called], Called]:
    """Let arguments be given by other names too, as in ``also(num_samples="samples")``; both is a ``TypeError``."""
    return functools.partial(_renamed, names, False)


def formerly(**names: str) -> Callable[[Called], Called]:
    """Do the same for names that will be removed, as in ``formerly(old="new")``: each use warns."""
    return functools.partial(_renamed, names, True)


def _renamed(names: dict[str, str], warn: bool, called: Called) -> Called:
    if isinstance(called, type):  # a class: by its constructor, and the class stays itself
        called.__init__ = _renamed(names, warn, called.__init__)  # type: ignore[misc]
        return called
    label = called.__qualname__.removesuffix(".__init__")
    taken = inspect.signature(called).parameters.values()
    places = [each.name for each in taken if each.kind is each.POSITIONAL_OR_KEYWORD]

    @functools.wraps(called)
    def with_names(*args: object, **kwargs: object) -> object:
        for name in names.keys() & kwargs.keys():
            ours = names[name]
            if ours in kwargs or ours in places[: len(args)]:
                raise TypeError(f"{label}() got both {name!r} and {ours!r}, two names of one argument; give one.")
            if warn:
                said = f"the argument {name!r} of {label}() will be removed in version {GONE_IN}; use {ours!r}."
                warn_caller(said, DeprecationWarning)
            kwargs[ours] = kwargs.pop(name)
        return called(*args, **kwargs)

    return with_names  # type: ignore[return-value]
