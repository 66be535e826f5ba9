"""Where a guide starts: at another guide's mean or at given weights, and how wide its learned widths are."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pyro_dropout.mathematics.checks import check_choice, check_finite, check_positive, describe
from pyro_dropout.mathematics.errors import PyroDropoutError, ShapeError
from pyro_dropout.protocols import HasMean, Weights

InitScale = float | Literal["auto"]

SHARE = 0.1  # with "auto", the noise of a layer's outputs beside its inputs


def check_init_scale(init_scale: object) -> None:
    """Raise an error unless this is a positive number or "auto"."""
    if isinstance(init_scale, str):
        check_choice("init_scale", init_scale, ("auto",), "a positive number")
    else:
        check_positive("init_scale", init_scale)


def first_width(init_scale: InitScale, fan_in: int) -> float:
    """Return the width at which the numbers of a site start; with "auto", 0.1/√fan_in.

    A layer's output sums ``fan_in`` products, so independent noise of this width in the weights adds noise of a tenth
    of the inputs' size to it, however wide the layer is.
    """
    return SHARE / fan_in**0.5 if init_scale == "auto" else float(init_scale)


class Given:
    """Weights to start from, by site; a site that is not among them starts as it would without."""

    def __init__(self, values: Weights) -> None:
        self.values = values

    def check(self, sites: Sequence[str]) -> None:
        """Raise an error if a name is not a site."""
        unknown = [name for name in self.values if name not in sites]
        if unknown:
            raise PyroDropoutError(f"init names {unknown[0]!r}, which is not a site; the sites are {', '.join(sites)}.")

    def at(self, name: str, start: Tensor, transform: Any) -> Tensor:
        """Return the value of a site in unconstrained space, in the shape and type of ``start``."""
        value = self.values[name]
        free = value if transform is None else transform.inv(value.to(start))
        if free.shape != start.shape:
            raise ShapeError(f"init has shape {tuple(free.shape)} for {name!r}; it needs {tuple(start.shape)}.")
        check_finite(f"init[{name!r}]", free)
        return free.to(start)


def given_weights(init: object, model: object) -> object:
    """Return ``init`` as it is, or, if it is a fitted guide or a dict of weights, the weights that it stands for."""
    if isinstance(init, Mapping):
        wrong = next((name for name, value in init.items() if not isinstance(value, Tensor)), None)
        if wrong is not None:
            raise PyroDropoutError(f"init must hold a tensor for each site; got {describe(init[wrong])} for {wrong!r}.")
        return Given({name: value.detach().clone() for name, value in init.items()})
    if not isinstance(init, HasMean):
        if isinstance(init, nn.Module):
            raise PyroDropoutError(
                f"init must be a guide or a dict of weights; got a network, {type(init).__name__}. The model's own"
                " network is init='module'; of another one give dict(net.named_parameters())."
            )
        return init
    if hasattr(init, "members"):
        raise PyroDropoutError(
            "init must be one guide: the mean of an Ensemble is no network that was trained. Give a dict of weights."
        )
    _check_rest(model, getattr(init, "model", None))
    return Given({name: value.detach().clone() for name, value in init.mean().items()})


def _check_rest(model: object, other: object) -> None:
    """Raise if a guide was fitted in another network, whose ordinary parameters or statistics are not those of this."""
    mine, theirs = _ordinary(model), _ordinary(other)
    for name, value in mine.items():
        if name in theirs and not (value.shape == theirs[name].shape and torch.equal(value, theirs[name].to(value))):
            raise PyroDropoutError(
                f"init was fitted in another network, whose {name!r} is not a site and differs from that of this one:"
                " at its weights this network would be another function. Use the same model, or copy its state_dict."
            )


def _ordinary(model: Any) -> Weights:
    """Return what a network computes with besides its sites: ordinary parameters, and buffers such as statistics."""
    inner = getattr(model, "model", model)  # Standardised
    net = getattr(inner, "net", None)
    if not isinstance(net, nn.Module):
        return {}
    everything = (*net.named_parameters(), *net.named_buffers())
    return {name: value.detach() for name, value in everything if name not in inner.sites}
