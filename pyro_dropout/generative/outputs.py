"""What a network returns, and which part of it are the outputs f: one tensor, (N, D), of whatever it gives."""

import dataclasses
from collections.abc import Mapping

from torch import Tensor

from pyro_dropout.mathematics.errors import PyroDropoutError, ShapeError

Output = str | int | None


def check_output(output: object) -> None:
    """Raise unless ``output`` can name a part of what a network returns."""
    if isinstance(output, bool) or not isinstance(output, str | int | None):
        raise PyroDropoutError(f"output must be a key, the name of an attribute or an index; got {output!r}.")


def picked(given: object, output: Output) -> object:
    """Return the part of a network's result that ``output`` names: a key, an attribute or an index.

    Example:
        >>> import torch
        >>> picked({"logits": torch.zeros(2, 3), "loss": None}, "logits").shape
        torch.Size([2, 3])
    """
    if output is None:
        if isinstance(given, Tensor) or not _names(given):
            return given
        raise ShapeError(
            f"net returns a {type(given).__name__} with {_listed(given)}; say which of them are its outputs, as in"
            f" BayesianNet(net, output={_names(given)[0]!r})."
        )
    if isinstance(given, Tensor):
        raise ShapeError(f"output is {output!r}, but net returns one tensor, {tuple(given.shape)}; leave output out.")
    try:
        if isinstance(output, str) and not isinstance(given, Mapping):
            return getattr(given, output)
        return given[output]  # type: ignore[index]  # whatever has no parts raises
    except (AttributeError, LookupError, TypeError):
        parts = _listed(given) or "no parts"
        raise ShapeError(f"net has no output {output!r}; it returns a {type(given).__name__} with {parts}.") from None


def _names(given: object) -> list[str | int]:
    """Return the names of the parts of a network's result; none if it is one thing."""
    if isinstance(given, Mapping):
        return [key for key in given if isinstance(key, str | int)]
    if isinstance(given, tuple | list):
        return list(getattr(given, "_fields", range(len(given))))
    return [field.name for field in dataclasses.fields(given)] if dataclasses.is_dataclass(given) else []


def _listed(given: object) -> str:
    return ", ".join(map(repr, _names(given)))
