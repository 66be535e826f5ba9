"""Exception types, and argument checks with readable messages.

Every message names the argument, what was given, and what is allowed. All types are ``ValueError`` as well, so code
that catches the usual exception keeps working.
"""

from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor


class PyroDropoutError(ValueError):
    """Base class of all errors that pyro_dropout raises.

    Example:
        >>> import pyro_dropout as pd
        >>> try:
        ...     pd.weight_decay(keep=1.5, tau=1.0, num_data=10)
        ... except pd.PyroDropoutError as mistake:
        ...     print(mistake)
        keep must lie in (0, 1]; got 1.5.
    """


class RangeError(PyroDropoutError):
    """A value is outside its allowed range.

    Example:
        >>> import pyro_dropout as pd
        >>> try:
        ...     pd.weight_decay(keep=0.9, tau=-1.0, num_data=10)
        ... except pd.RangeError as mistake:
        ...     print(mistake)
        tau must be positive and finite; got -1.0.
    """


class ShapeError(PyroDropoutError):
    """Tensors whose shapes do not fit together.

    Example:
        >>> import torch, pyro_dropout as pd
        >>> try:
        ...     pd.BernoulliMixture(torch.ones(3, 4), keep=0.9, row_dim=2)
        ... except pd.ShapeError as mistake:
        ...     print(mistake)
        row_dim must index a dimension of the weights, -2 to 1 for shape (3, 4); got 2.
    """


class SingularError(PyroDropoutError):
    """A density was requested from a distribution that has none, such as dropout at ``scale=0``.

    Example:
        >>> import torch, pyro_dropout as pd
        >>> try:
        ...     pd.BernoulliMixture(torch.ones(2, 3), keep=0.9).log_prob(torch.zeros(2, 3))
        ... except pd.SingularError as mistake:
        ...     print("no density at scale=0" if "scale=0" in str(mistake) else mistake)
        no density at scale=0
    """


class NotFollowedError(PyroDropoutError):
    """The model does not support a separate weight draw for each data point, so all points must share each draw.

    Args:
        message: what was wrong, and what to do.
        site: the site that caused the error, if known.
        reason: the message without its advice, for the warning about falling back to shared draws.

    Example:
        >>> import pyro, torch, pyro_dropout as pd
        >>> from pyro_dropout.mathematics.errors import NotFollowedError
        >>> def model(y):
        ...     theta = pyro.sample("theta", pyro.distributions.Normal(torch.zeros(8), 1.0).to_event(1))
        ...     pyro.sample("y", pyro.distributions.Normal(theta, 1.0).to_event(1), obs=y)
        >>> try:
        ...     pd.ELBO().loss(model, pd.AutoMeanField(model), torch.zeros(8))
        ... except NotFollowedError as mistake:
        ...     print(mistake.site)
        theta
    """

    def __init__(self, message: str = "", site: str | None = None, reason: str | None = None) -> None:
        super().__init__(message)
        self._site, self._reason = site, reason

    def _told(self) -> "NotFollowedError":
        """Return the original error: Pyro raises it again with the shapes of the trace."""
        return self.__cause__._told() if isinstance(self.__cause__, NotFollowedError) else self

    @property
    def site(self) -> str | None:
        """The site that caused the error, if known."""
        return self._told()._site

    @property
    def reason(self) -> str:
        """The message without its advice, if given separately; otherwise the whole message."""
        first = self._told()
        return str(first).rstrip(".") if first._reason is None else first._reason


def describe(value: Any) -> str:
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


def _holds(condition: bool | Tensor) -> bool:
    return bool(condition.all()) if isinstance(condition, Tensor) else condition


def check_number(name: str, value: Any) -> None:
    """Raise unless ``value`` is a real number or a real tensor (a bool is neither)."""
    if isinstance(value, Tensor):
        if not value.is_floating_point() and value.dtype not in (torch.int32, torch.int64):
            raise RangeError(f"{name} must be a real number or a real tensor; got a tensor of {value.dtype}.")
    elif isinstance(value, bool) or not isinstance(value, Real):  # numpy's numbers are Real too
        raise RangeError(f"{name} must be a real number or a real tensor; got {type(value).__name__} {value!r}.")


def check_positive(name: str, value: Any) -> None:
    """Raise unless every element of ``value`` is positive and finite."""
    check_number(name, value)
    if not _holds((value > 0) & (value < float("inf"))):
        raise RangeError(f"{name} must be positive and finite; got {describe(value)}.")


def check_non_negative(name: str, value: Any) -> None:
    """Raise unless every element of ``value`` is zero or positive, and finite."""
    check_number(name, value)
    if not _holds((value >= 0) & (value < float("inf"))):
        raise RangeError(f"{name} must be zero or positive, and finite; got {describe(value)}.")


def check_keep(name: str, value: Any) -> None:
    """Raise unless every element of ``value`` is a probability of keeping a row: in (0, 1]."""
    check_number(name, value)
    if not _holds((value > 0) & (value <= 1)):
        raise RangeError(f"{name} must lie in (0, 1]; got {describe(value)}.")


def check_dense(name: str, value: Tensor) -> None:
    """Raise if a tensor has a sparse or other non-strided layout, which few operations support."""
    if value.layout is not torch.strided:
        words = f"Write {name.split()[-1]}.to_dense()."
        raise ShapeError(f"{name} must be a dense tensor; got one of layout {value.layout}. {words}")


def check_finite(name: str, value: Tensor) -> None:
    """Raise unless every element of the tensor is finite."""
    if not isinstance(value, Tensor):
        raise ShapeError(f"{name} must be a tensor; got {type(value).__name__} {value!r}.")
    check_dense(name, value)
    if not value.is_floating_point():
        raise RangeError(f"{name} must be a floating-point tensor; got {value.dtype}.")
    if not bool(torch.isfinite(value).all()):
        raise RangeError(f"{name} must be finite; got {describe(value)}.")


def check_pairs(name: str, x: Any, y: Any) -> None:
    """Raise unless inputs and targets are dense tensors with the same number of points, at least one."""
    lengths = [len(part) if isinstance(part, Tensor) and part.dim() else None for part in (x, y)]
    if None in lengths or lengths[0] != lengths[1] or not lengths[0]:
        got = [
            type(part).__name__ if length is None else f"{length} points"
            for part, length in zip((x, y), lengths, strict=True)
        ]
        raise ShapeError(
            f"{name} must be tensors with the same number of points, at least one; got {got[0]} and {got[1]}."
        )
    for part, value in (("x", x), ("y", y)):
        check_dense(part if name == "x and y" else f"{name}: {part}", value)


def check_flag(name: str, value: Any) -> None:
    """Raise unless ``value`` is True or False: any other value would silently be read as one of them."""
    if not isinstance(value, bool):
        raise RangeError(f"{name} must be True or False; got {value!r}.")


def check_seed(seed: Any, least: int = -(2**63), most: int = 2**64 - 1) -> None:
    """Raise unless ``seed`` is None or a whole number in the range of the generator (torch's by default)."""
    if isinstance(seed, bool) or not isinstance(seed, Integral | None):
        raise RangeError(f"seed must be a whole number or None; got {seed!r}.")
    if seed is not None and not least <= int(seed) <= most:
        raise RangeError(f"seed must be a whole number from {least} to {most}; got {seed!r}.")


def check_count(name: str, value: Any) -> None:
    """Raise unless ``value`` is a whole number of at least one."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise RangeError(f"{name} must be a whole number of at least 1; got {value!r}.")


def check_device(name: str, value: Any) -> torch.device:
    """Return ``value`` as a torch device; raise with the reason if it cannot be used here."""
    try:
        device = torch.device(value)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as cause:  # backends raise different types
        reason = (str(cause).splitlines() or [type(cause).__name__])[0]
        raise PyroDropoutError(
            f"{name} must be a torch device that can be used here, such as 'cpu' or 'cuda'; got {value!r}: {reason}"
        ) from None
    return device
