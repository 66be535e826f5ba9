"""Base class of the package's covariance functions as ``pyro.contrib.gp`` kernels; it checks parameters and inputs."""

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TypeVar, cast

import pyro
import torch
from pyro.contrib.gp.kernels import Kernel
from pyro.nn import PyroParam
from pyro.poutine.runtime import am_i_wrapped
from torch import Tensor
from torch.distributions import constraints

from pyro_dropout.mathematics.checks import check_count, check_finite, check_positive
from pyro_dropout.mathematics.errors import ShapeError
from pyro_dropout.mathematics.shapes import Float

Number = float | int | Tensor
Method = TypeVar("Method", bound=Callable[..., object])


def check_values(check: Callable[[str, object], None], **values: object) -> None:
    """Check values, except where reading them is impossible: in compiled, captured and vmapped code."""
    for name, value in values.items():
        captured = isinstance(value, Tensor) and value.is_cuda and torch.cuda.is_current_stream_capturing()
        if not captured and not torch.compiler.is_compiling():
            try:
                check(name, value)
            except RuntimeError:  # vmap cannot be detected beforehand; our own errors are ValueErrors
                continue


def check_shape(fits: bool, name: str, allowed: str, value: Tensor) -> None:
    """Raise a ShapeError that names the allowed shape, unless the tensor fits."""
    if not fits:
        raise ShapeError(f"{name} must have shape {allowed}; got {tuple(value.shape)}.")


def own_parameters(method: Method) -> Method:
    """Wrap a Pyro method so that, outside a model, it reads only this object's parameters.

    Pyro looks parameters up by name, and a standalone kernel calls its own just "variance": a second standalone kernel
    would silently use the values of the first.
    """

    @functools.wraps(method)
    def call(self: Kernel, *args: object, **kwargs: object) -> object:
        alone = not self._pyro_context.active and not am_i_wrapped()
        with pyro.get_param_store().scope() if alone else nullcontext(), self._pyro_context:
            return method(self, *args, **kwargs)

    return cast(Method, call)


class Covariance(Kernel):
    """Base class of the package's covariances; it checks parameters and inputs."""

    variance: Tensor
    length_scale: Tensor
    bias_length_scale: Tensor
    __call__ = own_parameters(Kernel.__call__)

    def __init__(self, input_dim: int, active_dims: Sequence[int] | None, **positive: Number | None) -> None:
        check_count("input_dim", input_dim)
        dims = list(range(input_dim) if active_dims is None else active_dims)
        if len(dims) != input_dim or min(dims) < 0:
            raise ShapeError(f"active_dims must name {input_dim} columns, counted from 0; got {dims}.")
        super().__init__(input_dim, dims)  # type: ignore[no-untyped-call]
        self._given_dims = active_dims is not None
        for name, given in positive.items():
            check_positive(name, 1.0 if given is None else given)
            value = torch.as_tensor(1.0 if given is None else given)
            value = value if value.is_floating_point() else value.to(torch.get_default_dtype())
            check_positive(name, value)  # once more: in float32, 1e-50 is 0 and 1e50 is infinite
            shapes = [(), (input_dim,)] if name == "length_scale" else [()]
            check_shape(value.shape in [*shapes, (1,)], name, " or ".join(map(str, shapes)), value)
            setattr(self, name, PyroParam(value, constraints.positive))

    def _inputs(self, name: str, X: Tensor) -> Float[Tensor, "n q"]:
        check_values(check_finite, **{name: X})
        if X.dim() == 1 and self.input_dim == 1:
            return X.unsqueeze(1)
        columns = max(self.active_dims) + 1
        fits = X.dim() == 2 and (X.size(1) == columns or (self._given_dims and X.size(1) > columns))
        check_shape(fits, name, f"(N, {columns}{' or more' if self._given_dims else ''})", X)
        return X[:, self.active_dims] if self._given_dims else X
