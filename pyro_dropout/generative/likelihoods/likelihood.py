"""What a likelihood is: the last step of a model, from the outputs of a function to the observed data.

``observe`` declares the plate ``"data"`` and the observed site ``"y"``, and scales a mini-batch up to the whole data.
"""

import contextlib
import math
from abc import abstractmethod
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, cast

import pyro
import torch
from pyro import poutine
from torch import Tensor, nn

from pyro_dropout import protocols
from pyro_dropout.errors import PyroDropoutError, RangeError, ShapeError
from pyro_dropout.generative.likelihoods.moments import said_of
from pyro_dropout.generative.registration import tell_pyro
from pyro_dropout.mathematics.checks import check_count, check_data_finite
from pyro_dropout.protocols import Distribution

Dims = tuple[int | None, ...]


@dataclass(frozen=True)
class OutputShape:
    """The shape of a network's output at one point. Between the network and its likelihood it is one row, (N, D).

    Of the sizes ``dims`` one may be None, if it differs from batch to batch; ``dim`` is the place of the parts of one
    position, such as its classes.
    """

    dims: Dims
    dim: int

    def __post_init__(self) -> None:
        sizes = self.dims if isinstance(self.dims, tuple) else ()
        whole = all(size is None or (type(size) is int and size > 0) for size in sizes)
        if not sizes or not whole or sizes.count(None) > 1:
            raise ShapeError(
                "dims must be the shape of the network's output at one point, such as (T, C) or (C, H, W), with at most"
                f" one None for a size that differs; got {self.dims!r}."
            )
        if type(self.dim) is not int or not -len(sizes) <= self.dim < len(sizes) or sizes[self.dim] is None:
            raise RangeError(f"dim must be the place of a size in dims, {self.dims}; got {self.dim!r}.")

    @property
    def parts(self) -> int:
        """The size of the dimension that holds the parts of a position."""
        return cast(int, self.dims[self.dim])

    @property
    def from_end(self) -> int:
        """That dimension, counted from the last one."""
        return self.dim if self.dim < 0 else self.dim - len(self.dims)

    def flat(self, f: Tensor) -> Tensor:
        """Return outputs (N, *dims) as rows, (N, D)."""
        pairs = zip_longest(self.dims, f.shape[1:], fillvalue=0)
        if not all(b if a is None else a == b for a, b in pairs):
            wanted = ", ".join(str(size or "any") for size in self.dims)
            raise ShapeError(f"net must give outputs (N, {wanted}), as dims says; it gave {tuple(f.shape)}.")
        return f.flatten(1)

    def whole(self, f: Tensor) -> Tensor:
        """Return rows (..., N, D) as outputs, (..., N, *dims)."""
        known = math.prod(size for size in self.dims if size is not None)
        if f.shape[-1] % known or (None not in self.dims and f.shape[-1] != known):
            raise ShapeError(f"the model's {f.shape[-1]} outputs do not have the shape {self.dims} that dims gives.")
        found: Tensor = f.unflatten(-1, [f.shape[-1] // known if size is None else size for size in self.dims])
        return found

    def positions(self, f: Tensor) -> tuple[int, ...]:
        """Return the sizes of the other dimensions, for outputs in rows."""
        sizes = list(self.whole(f).shape[f.dim() - 1 :])
        del sizes[self.dim]
        return tuple(sizes)


class Likelihood(nn.Module):
    """The last step of a model: outputs ``f`` of shape (..., N, D) in, the observed site ``"y"`` out.

    A new likelihood defines ``distribution``; it may define ``checked``, what a valid ``y`` is. To stand inside
    ``Standardised`` it says whether its targets are standardised (``standardised_targets``), and if they are, what its
    outputs and the likelihood itself are in the units of y (``raw_outputs``, ``raw_likelihood``). Any other class with
    the methods of ``protocols.Likelihood`` will do as well.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> noise = pdrop.Gaussian(tau=4.0)
        >>> isinstance(noise, pdrop.generative.Likelihood), noise.distribution(torch.zeros(5, 1))
        (True, Independent(Normal(loc: torch.Size([5, 1]), scale: torch.Size([5, 1])), 1))
    """

    shape: OutputShape | None = None  # of the network's output at one point, where it has more than one dimension

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Leave a class that has its own ``distribution`` without the curvature of another one."""
        super().__init_subclass__(**kwargs)
        own = next(kind for kind in cls.__mro__ if {"distribution", "curvature_root"} & vars(kind).keys())
        if "curvature_root" not in vars(own):
            cls.curvature_root = Likelihood.curvature_root  # type: ignore[method-assign]

    def flattened(self, f: Tensor) -> Tensor:
        """Return the network's outputs as rows, (N, D); those of a shape of their own, (N, *dims), are flattened."""
        return f if self.shape is None else self.shape.flat(f)

    @abstractmethod
    def distribution(self, f: Tensor) -> Distribution:
        """Return p(y | f) with one batch element for each data point."""

    def checked(self, f: Tensor, y: Tensor) -> Tensor:
        """Return ``y`` as the distribution wants it, or say what is wrong with it."""
        check_real(y)
        if y.shape != f.shape[-2:]:
            advice = " Write y.unsqueeze(-1)." if y.shape == f.shape[-2:-1] and f.shape[-1] == 1 else ""
            if f.shape[-1] > 1 and y.shape == f.shape[-2:-1] and not y.is_floating_point():
                advice = " For whole numbers, as class indices are, write likelihood=Categorical()."
            raise ShapeError(
                f"y must have shape (N, D) = {tuple(f.shape[-2:])}, as the model's outputs have for the likelihood"
                f" {type(self).__name__}; got {tuple(y.shape)}.{advice}"
            )
        return y

    def check_values(self, f: Tensor, y: Tensor) -> None:
        """Raise unless every target is possible; asked once, before training: a compiled step cannot look at values."""
        check_data_finite("y", y)

    def curvature_root(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        """Return R with R Rᵀ = ``curvature(f, y)``, (..., N, D, columns); of ``y`` some may not count as data."""
        raise PyroDropoutError(
            f"likelihood {type(self).__name__} does not say how its log density bends in the outputs. Define in it"
            " curvature_root(self, f, y=None), a root R of its Fisher information R Rᵀ in f, (..., N, D, D)."
        )

    def curvature(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        """Return how -log p(y | f) bends in the outputs: its Fisher information, (..., N, D, D), never negative.

        Where f are natural parameters (a ``Gaussian``, classes, yes or no, counts) it is the Hessian too, whatever y.

        Equation: laplace-curvature.

        Example:
            >>> import torch, pyro_dropout as pdrop
            >>> pdrop.Gaussian(tau=4.0).curvature(torch.zeros(1, 2))
            tensor([[[4., 0.],
                     [0., 4.]]])
        """
        root = self.curvature_root(f, y)
        return root @ root.mT

    def free(self, y: Tensor) -> Tensor:
        """Return targets on the scale that ``Standardised`` shifts and scales: y itself, or a function of it."""
        return y

    def bound(self, z: Tensor) -> Tensor:
        """Return the y of ``free``'s values."""
        return z

    def standardised_targets(self) -> bool:
        """Whether ``Standardised`` shifts and scales y: yes for real numbers; classes and counts stay as they are."""
        raise _undeclared(self)

    def raw_outputs(self, f: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        """Return outputs in the units of y, (..., N, D), from those that speak of (y - mean)/std."""
        raise _undeclared(self)

    def raw_likelihood(self, std: Tensor) -> protocols.Likelihood:
        """Return p(y | f) in the units of y, for outputs in these units; itself, where the outputs say it all."""
        raise _undeclared(self)

    def forward(self, f: Tensor, y: Tensor | None = None, num_data: int | None = None) -> Tensor:
        """Observe ``y`` (or draw it, when None) and return it."""
        return observe(self, f, y, num_data)


def stays(likelihood: Likelihood) -> bool:
    """No: classes and counts stay as they are (``standardised_targets`` of their likelihoods)."""
    return False


def check_real(y: Tensor) -> None:
    """Raise if targets are complex, or yes and no, where a likelihood takes real numbers."""
    if y.is_complex():
        raise RangeError(f"y must hold real numbers; got {y.dtype}. Write y.real, or y.abs().")
    if y.dtype == torch.bool:
        raise RangeError(f"y must hold numbers; got {y.dtype}. Write y.float(), or Bernoulli() as the likelihood.")


def observe(likelihood: protocols.Likelihood, f: Tensor, y: Tensor | None, num_data: int | None) -> Tensor:
    """Observe ``y`` (or draw it, when None) at the outputs ``f`` of a function, and return it."""
    if isinstance(likelihood, nn.Module):
        tell_pyro(likelihood, dict(likelihood.named_parameters()))
    if f.dim() < 2:
        raise ShapeError(f"the model's output must have shape (..., N, D); got {tuple(f.shape)}.")
    if y is not None and not isinstance(y, Tensor):
        raise ShapeError(f"y must be a tensor; got {type(y).__name__}. Write torch.as_tensor(y).")
    count = f.shape[-2]
    if num_data is not None:
        check_count("num_data", num_data)
    scaled = (
        contextlib.nullcontext() if num_data is None or num_data == count else poutine.scale(scale=num_data / count)
    )
    with scaled, pyro.plate("data", count, dim=-1):
        observed = None if y is None else likelihood.checked(f, y)
        value: Tensor = pyro.sample("y", likelihood.distribution(f), obs=observed)
    return value


def is_likelihood(value: object) -> bool:
    """Whether an object has the methods of a likelihood; a class, which has them too, is not one."""
    return isinstance(value, protocols.Likelihood) and not isinstance(value, type)


def likelihood_of(model: object) -> protocols.Likelihood:
    """Return what a model's outputs mean, or say that it does not tell."""
    likelihood: protocols.Likelihood | None = getattr(model, "likelihood", None)
    if likelihood is None or not is_likelihood(likelihood):
        raise PyroDropoutError(
            f"model must be a network or a process of this package; {type(model).__name__} has no likelihood of this"
            " package for its outputs. Write BayesianNet(net, likelihood=...)."
        )
    return likelihood


def check_standardised(likelihood: Any) -> None:
    """Raise unless the class that defines ``distribution`` says what becomes of it on standardised targets."""
    said = said_of(likelihood)
    whole = {"raw_outputs", "raw_likelihood"} <= said
    if "standardised_targets" not in said or (likelihood.standardised_targets() and not whole):
        raise _undeclared(likelihood)


def _undeclared(likelihood: object) -> PyroDropoutError:
    return PyroDropoutError(
        f"likelihood {type(likelihood).__name__} does not say what becomes of it on standardised targets. Define in it"
        " standardised_targets(self) -> bool: False if y stays as it is, such as classes and counts; True if y is"
        " standardised, and then also raw_outputs(self, f, mean, std), the outputs in the units of y, and"
        " raw_likelihood(self, std), the likelihood in these units."
    )
