"""Exact covariance functions of wide layers, one layer and deeper (§3.1, §4.5).

A layer σ(wᵀx + b) with w ~ N(0, l⁻²I) and b ~ N(0, l'⁻²) has covariance K(x, y) = E[σ(wᵀx + b) σ(wᵀy + b)], in closed
form for ReLU (`ArcCosine`) and erf (`ArcSine`); `Layered` goes deeper. They are ``pyro.contrib.gp`` kernels:
``kernel(X, Z)`` is (N, M) for X (N, Q) and Z (M, Q), and ``kernel(X, diag=True)`` is (N,).
"""

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar, cast

import pyro
import torch
from pyro.contrib.gp.kernels import Kernel
from pyro.nn import PyroParam
from pyro.poutine.runtime import am_i_wrapped
from torch import Tensor
from torch.distributions import constraints

from pyro_dropout.errors import RangeError, ShapeError
from pyro_dropout.mathematics.checks import check_count, check_positive, check_shape
from pyro_dropout.mathematics.shapes import Float
from pyro_dropout.protocols import Context

Number = float | int | Tensor
Method = TypeVar("Method", bound=Callable[..., object])


def own_parameters(method: Method) -> Method:
    """Wrap a Pyro method so that, outside a model, it reads only this object's parameters.

    Pyro looks parameters up by name: a second standalone kernel would silently use the "variance" of the first.
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
        if X.dim() == 1 and self.input_dim == 1:
            return X.unsqueeze(1)
        columns = max(self.active_dims) + 1
        fits = X.dim() == 2 and (X.size(1) == columns or (self._given_dims and X.size(1) > columns))
        check_shape(fits, name, f"(N, {columns}{' or more' if self._given_dims else ''})", X)
        return X[:, self.active_dims] if self._given_dims else X


class _WideLayer(Covariance):
    """A covariance that knows its inputs by their inner products only: the frame of the two below."""

    def __init__(
        self,
        input_dim: int,
        variance: Number | None = None,
        length_scale: Number | None = None,
        bias_length_scale: Number | None = None,
        active_dims: Sequence[int] | None = None,
    ) -> None:
        scales = {"length_scale": length_scale, "bias_length_scale": bias_length_scale}
        super().__init__(input_dim, active_dims, variance=variance, **scales)

    def _expectation(self, s_xy: Tensor, s_xx: Tensor, s_yy: Tensor) -> Tensor:
        raise NotImplementedError  # E[σ(u)σ(v)] for normal (u, v) with these covariances, element by element

    @own_parameters
    def of_gram(self, k_xy: Tensor, k_xx: Tensor, k_yy: Tensor) -> Float[Tensor, "..."]:
        """Covariance variance · E[σ(f(x) + b) σ(f(y) + b)] of this layer on top of f ~ N(0, k), with b ~ N(0, l'⁻²).

        ``k_xy`` is (N, M), with the variances ``k_xx`` (N,) and ``k_yy`` (M,); or all three are (N,), for N pairs.
        """
        for name, k, size in (("k_xx", k_xx, k_xy.size(0)), ("k_yy", k_yy, k_xy.size(-1))):
            check_shape(k.shape == (size,), name, f"({size},)", k)
        k_xx = k_xx.unsqueeze(-1) if k_xy.dim() == 2 else k_xx
        from_bias = self.bias_length_scale**-2
        return self.variance * self._expectation(k_xy + from_bias, k_xx + from_bias, k_yy + from_bias)

    def forward(self, X: Tensor, Z: Tensor | None = None, diag: bool = False) -> Float[Tensor, "..."]:
        X = self._inputs("X", X) / self.length_scale
        s_xx = X.square().sum(-1)
        if diag:
            return self.of_gram(s_xx, s_xx, s_xx)
        Z = X if Z is None else self._inputs("Z", Z) / self.length_scale
        return self.of_gram(X @ Z.mT, s_xx, Z.square().sum(-1))


class _Angular(torch.autograd.Function):
    """J(c) = sin θ + (π − θ) cos θ with cos θ = c, and its slope π − θ.

    Term by term the slope is ∞ − ∞ at c = 1, which is every diagonal; as a whole it is at most π.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(c: Tensor) -> Tensor:
        c = c.clamp(-1.0, 1.0)
        return ((1 - c) * (1 + c)).sqrt() + c * torch.acos(-c)  # acos(−c) is π − θ, without cancellation

    @staticmethod
    def slope(c: Tensor) -> Tensor:
        # Constant beyond ±1: J'' is infinite there, but it multiplies (dc)², which vanishes faster.
        inside = c.abs() < 1
        return torch.where(inside, torch.acos(torch.where(inside, -c, 0.0)), math.pi * (c > 0).to(c))

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> Tensor:
        return grads[0] * _Angular.slope(*ctx.saved_tensors)

    jvp = backward  # a function of each element has one slope, forward and backward


class ArcCosine(_WideLayer):
    """Covariance of an infinitely wide layer of ReLU units, as a Pyro kernel.

    K(x, y) = (1/2π) √(s_xx s_yy) (sin θ + (π − θ) cos θ) with s_xy = Σ_q x_q y_q / l_q² + 1/l'² and
    cos θ = s_xy / √(s_xx s_yy): half of Cho and Saul's kernel of degree one. Gradients are finite everywhere, also
    where inputs repeat.

    Equation: sec3.1-relu.

    Args:
        input_dim: Number Q of inputs.
        variance: Factor of the whole covariance; 1 when absent.
        length_scale: l of the weights' prior N(0, l⁻²I), a number or (Q,); 1 when absent.
        bias_length_scale: l' of the bias's prior N(0, l'⁻²); 1 when absent.
        active_dims: Columns of the inputs that are used; all when absent.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> pdrop.paper.ArcCosine(input_dim=1)(torch.tensor([-1.0, 1.0])).detach().round(decimals=3)
        tensor([[1.0000, 0.3180],
                [0.3180, 1.0000]])
    """

    def _expectation(self, s_xy: Tensor, s_xx: Tensor, s_yy: Tensor) -> Tensor:
        tiny = torch.finfo(s_xy.dtype).tiny  # a huge l' can round 1/l'² to nothing, and x may be 0
        norms = s_xx.clamp(min=tiny).sqrt() * s_yy.clamp(min=tiny).sqrt()
        return norms * cast(Tensor, _Angular.apply(s_xy / norms)) / (2 * math.pi)  # type: ignore[no-untyped-call]


class ArcSine(_WideLayer):
    """Covariance of an infinitely wide layer of erf units, as a Pyro kernel with the arguments of `ArcCosine`.

    K(x, y) = (2/π) asin(2 s_xy / √((1 + 2 s_xx)(1 + 2 s_yy))) with s_xy = Σ_q x_q y_q / l_q² + 1/l'² (Williams, 1997).

    Equation: sec3.1-erf.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> kernel = pdrop.paper.ArcSine(input_dim=2, length_scale=torch.tensor([1.0, 2.0]))
        >>> kernel(torch.eye(2)).detach().round(decimals=3)
        tensor([[0.5900, 0.3170],
                [0.3170, 0.5060]])
    """

    def _expectation(self, s_xy: Tensor, s_xx: Tensor, s_yy: Tensor) -> Tensor:
        # asin z = atan2(z, √(1 − z²)), and (1 + 2s_xx)(1 + 2s_yy) − 4s_xy² ≥ 1: no slope is infinite
        gap = (s_xx * s_yy - s_xy.square()).clamp(min=0.0)
        return torch.atan2(2 * s_xy, (1 + 2 * (s_xx + s_yy) + 4 * gap).sqrt()) * (2 / math.pi)


class Layered(Kernel):
    """Covariance of a wide layer on top of another one, as a Pyro kernel.

    K(x, y) = E[σ(F₁(x) + b) σ(F₁(y) + b)] for F₁ ~ GP(0, K₁) and b ~ N(0, l'⁻²): §4.5 in the limit of wide
    layers. For a third layer let the inner covariance be a `Layered`, and so on.

    Equation: sec4.5-wide-limit.

    Args:
        outer: Covariance of the layer on top: `ArcCosine`, `ArcSine`, or another kernel with an ``of_gram``. Its input
            length-scale plays no part, for its inputs are F₁.
        inner: K₁, any Pyro kernel.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> kernel = pdrop.paper.Layered(pdrop.paper.ArcSine(1), pdrop.paper.ArcCosine(1))
        >>> kernel(torch.tensor([0.0, 1.0])).detach().round(decimals=3)
        tensor([[0.5400, 0.4810],
                [0.4810, 0.5900]])
    """

    __call__ = own_parameters(Kernel.__call__)

    def __init__(self, outer: Any, inner: object) -> None:
        if not isinstance(inner, Kernel):
            raise RangeError(f"inner must be a Pyro kernel; got {type(inner).__name__}.")
        if not isinstance(outer, Kernel) or not hasattr(outer, "of_gram"):
            allowed = "ArcCosine or ArcSine (deeper layers go in inner)"
            raise RangeError(f"outer must be {allowed}; got {type(outer).__name__}.")
        super().__init__(inner.input_dim, inner.active_dims)  # type: ignore[no-untyped-call]
        self.outer, self.inner = outer, inner

    def forward(self, X: Tensor, Z: Tensor | None = None, diag: bool = False) -> Float[Tensor, "..."]:
        """Covariances (N, M) between the rows of ``X`` and of ``Z``, or variances (N,) with ``diag``."""
        k_xx = self.inner(X, diag=True)
        k_xz = k_xx if diag else self.inner(X, Z)
        k_zz = k_xx if diag or Z is None else self.inner(Z, diag=True)
        return cast(Tensor, self.outer.of_gram(k_xz, k_xx, k_zz))
