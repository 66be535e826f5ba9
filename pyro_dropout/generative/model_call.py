"""A Pyro model with the arguments it is called with: any that its signature takes, as trees of tensors.

Networks of this package are called as ``model(x, y, num_data)``. Other Pyro models have their own arguments, which the
public functions of this package (``fit``, ``predict``, ``to_arviz``, ...) pass on unchanged.
"""

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from pyro.infer.autoguide import AutoGuide
from pyro.nn import PyroModule
from pyro.poutine.messenger import _bound_partial, _context_wrap
from torch import Tensor, nn

from pyro_dropout.errors import PyroDropoutError, ShapeError
from pyro_dropout.generative.inputs import Inputs, inputs_of, takes_all
from pyro_dropout.generative.likelihoods.likelihood import is_likelihood
from pyro_dropout.mathematics.checks import describe, did_you_mean
from pyro_dropout.protocols import Posterior, PyroModel, Trace, Tree


def is_network(model: object) -> bool:
    """Whether a model is a module that returns its outputs f and has a likelihood of this package for them.

    A likelihood attached to a plain function is ignored: the trace of such a model shows what it observes.
    """
    return isinstance(model, nn.Module) and is_likelihood(getattr(model, "likelihood", None))


def name_of(model: object) -> str:
    """Return what a model is called: the name of a function, or the class of a module."""
    inner = _unwrapped(model)
    return str(getattr(inner, "__name__", type(inner).__name__))


def signature_of(model: object) -> inspect.Signature | None:
    """Return the signature of a model, that of ``forward`` for a module; None if it is unknown."""
    inner = _unwrapped(model)
    try:
        return inspect.signature(inner.forward if isinstance(inner, nn.Module) else inner)
    except (TypeError, ValueError):  # written in C, or otherwise without a signature
        return None


def _unwrapped(model: Any) -> Any:
    """Return the model inside Pyro's handlers or other wrappers that name it; they hide its signature."""
    inner = model.func if isinstance(model, _bound_partial) else None
    wrapped = vars(model).get("__wrapped__") if isinstance(model, nn.Module) else None
    if isinstance(inner, partial) and inner.func is _context_wrap:
        return _unwrapped(inner.args[1])
    return _unwrapped(wrapped[0]) if isinstance(wrapped, tuple) else model


def check_programs(model: object, guide: object, label: str = "guide") -> None:
    """Raise unless a model and its guide are programs, not their classes, and each is in its own place."""
    for name, value in (("model", model), (label, guide)):
        if isinstance(value, type):
            made = f"{value.__name__}({'...' if name == 'model' else 'model'})"
            raise PyroDropoutError(f"{name} must be made first; got the class {value.__name__}. Write {made}.")
    if isinstance(model, AutoGuide | Posterior):
        raise PyroDropoutError(
            f"model and {label} must not be swapped: the model comes first; got {name_of(model)}, which is a guide."
        )


def takes(model: object, name: str) -> bool:
    """Whether a parameter of the model has this name."""
    known = signature_of(model)
    return known is not None and name in known.parameters


def check_keywords(door: Callable[..., object], model: object, kwargs: Iterable[str]) -> None:
    """Raise if a keyword is neither an option (a keyword-only parameter) of a public function nor one of the model."""
    known = signature_of(model)
    if known is None or any(each.kind is each.VAR_KEYWORD for each in known.parameters.values()):
        return
    own = inspect.signature(door).parameters
    options = [name for name, each in own.items() if each.kind is each.KEYWORD_ONLY]
    for name in kwargs:
        if name not in known.parameters:
            raise PyroDropoutError(
                f"{door.__name__} has no option {name!r}, and {name_of(model)}{known} has no parameter of that name."
                + (did_you_mean(name, [*options, *known.parameters]) or f" The options are {', '.join(options)}.")
            )


@dataclass(frozen=True)
class ModelCall:
    """A model with its arguments: trees of tensors, numbers and anything else."""

    model: Any
    args: tuple[Tree, ...] = ()
    kwargs: dict[str, Tree] = field(default_factory=dict)

    def __call__(self) -> Tree:
        """Run the model."""
        return self.model(*self.args, **self.kwargs)

    def of(self, other: PyroModel) -> Trace:
        """Run another program, such as a guide, with the same arguments."""
        return other(*self.args, **self.kwargs)

    def as_pair(self) -> "ModelCall":
        """Return the call of a network with x and y as positional arguments; they may have been given by name."""
        names = ("x", "y")[len(self.args) :]
        given = (*self.args, *(self.kwargs[name] for name in names if name in self.kwargs))
        if len(given) != 2 or set(self.kwargs) - set(names):
            got = [*(type(arg).__name__ for arg in self.args), *(f"{name}=..." for name in self.kwargs)]
            raise PyroDropoutError(f"a network takes its data as (x, y); got ({', '.join(got)}).")
        x, y = given
        return replace(self, args=(inputs_of(x, whole=takes_all(self.model)), y), kwargs={})

    def leaves(self) -> Iterator[Tensor]:
        """Yield all tensors in the arguments, in order."""
        return iter(Inputs(self.args, self.kwargs).leaves())

    @property
    def count(self) -> int | None:
        """The number N of data points: the length of the first tensor that has one; None if there is none."""
        return next((len(leaf) for leaf in self.leaves() if leaf.dim()), None)

    @property
    def dtype(self) -> torch.dtype:
        """The floating-point type of the arguments; torch's default where they have none."""
        return next((leaf.dtype for leaf in self.leaves() if leaf.is_floating_point()), torch.get_default_dtype())

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "ModelCall":
        """Return the same call with every tensor changed."""
        found = Inputs(self.args, self.kwargs).mapped(change)
        return replace(self, args=found.args, kwargs=found.kwargs)

    def to(self, device: torch.device | str) -> "ModelCall":
        """Return the same call with every tensor on a device."""
        return self.mapped(lambda leaf: leaf.to(device))

    def trainable(self) -> "ModelCall":
        """Return the same call with copies of tensors that were made in ``torch.inference_mode()``."""
        return self.mapped(lambda leaf: leaf.clone() if leaf.is_inference() else leaf)

    def at(self, index: Tensor | slice) -> "ModelCall":
        """Return the call with a mini-batch: these rows of every tensor that has N of them."""
        count = self.count
        return self.mapped(lambda leaf: leaf[index] if leaf.dim() and len(leaf) == count else leaf)

    def with_num_data(self, only_if_needed: bool = False) -> "ModelCall":
        """Return the call with N as ``num_data``, where the model has such a parameter and it was not given.

        With ``only_if_needed``, a parameter that has a default keeps it.
        """
        known = signature_of(self.model)
        if known is None or "num_data" not in known.parameters or "num_data" in self._bound(known.bind_partial):
            return self
        asked = known.parameters["num_data"]
        if only_if_needed and asked.default is not asked.empty:
            return self
        if self.count is None:
            raise ShapeError(
                f"{name_of(self.model)} takes num_data, but none of its arguments is a tensor with a row for each data"
                f" point; got {describe(self.args)}."
            )
        in_turn = list(known.parameters).index("num_data") == len(self.args)
        if in_turn and asked.kind is asked.POSITIONAL_OR_KEYWORD:
            return replace(self, args=(*self.args, self.count))  # positional: a guide may name it otherwise
        return replace(self, kwargs={**self.kwargs, "num_data": self.count})

    def check_bound(self) -> None:
        """Raise unless the model can be called with these arguments."""
        if not callable(self.model):
            raise PyroDropoutError(f"model must be a Pyro model, a function or a module; got {describe(self.model)}.")
        known = signature_of(self.model)
        if known is not None:
            self._bound(known.bind)

    def _bound(self, bind: Callable[..., inspect.BoundArguments]) -> Collection[str]:
        """Return the names of the parameters that are given; raise if the arguments do not fit."""
        try:
            return bind(*self.args, **self.kwargs).arguments
        except TypeError as cause:
            given = [type(arg).__name__ for arg in self.args]
            given += [f"{name}={type(value).__name__}" for name, value in self.kwargs.items()]
            network = isinstance(self.model, nn.Module) and not isinstance(self.model, PyroModule)
            raise PyroDropoutError(
                f"model must be a Pyro model that takes the arguments given, ({', '.join(given)}); got"
                f" {name_of(self.model)}, which takes {signature_of(self.model)}: {cause}."
                + (" Write BayesianNet(net, likelihood=...)." if network else "")
            ) from None


def call_of(
    door: Callable[..., object], model: object, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> ModelCall:
    """Return the model call that a public function was given; raise an error for an unknown keyword."""
    check_keywords(door, model, kwargs)
    return ModelCall(model, args, dict(kwargs))
