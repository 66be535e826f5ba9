"""The precision of a network's products: float32, or half of it for speed.

With "bf16" the matrix products and convolutions of a network multiply numbers of 8 bits and add them up in float32, as
``torch.autocast`` does. Everything else stays in float32: parameters, draws of the weights, the optimiser's moments,
the outputs f, the KL and the loss. So do Linear layers with fewer than 8 inputs or outputs, often the first and the
last: they would gain nothing, and what a network is told and what it answers would lose digits.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from pyro_dropout.engines.torch_internals import onednn
from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.mathematics.checks import check_choice

Precision = Literal["float32", "bf16", "fp16"]

HALF = (torch.float16, torch.bfloat16)
_TYPES = {"float32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_THIN = 8  # inputs or outputs of a layer below which it stays in float32
_now: ContextVar[Precision] = ContextVar("the precision of products", default="float32")


def check_precision(
    precision: object, model: object, trains: bool = False, device: torch.device | str | None = None
) -> None:
    """Raise unless a model's products can have this precision; warn if this processor only imitates it."""
    check_choice("precision", precision, tuple(_TYPES))
    if precision == "float32":
        return
    if precision == "fp16" and trains:
        raise PyroDropoutError(
            "precision='fp16' is for predictions: gradients are often too small for float16, and would become zero."
            " Train with precision='bf16'."
        )
    ours = isinstance(model, nn.Module) and getattr(getattr(model, "model", model), "lowers_products", False)
    parameters = list(model.parameters()) if isinstance(model, nn.Module) else []
    kinds = {str(value.dtype).removeprefix("torch.") for value in parameters if value.is_floating_point()}
    if not ours or kinds - {"float32"}:
        raise PyroDropoutError(
            f"precision={precision!r} is for BayesianNet(net), inside Standardised too, with parameters in float32; got"
            f" {type(model).__name__} with {', '.join(sorted(kinds)) or 'none'}. Use torch.autocast inside the model."
        )
    place = next((value.device for value in parameters), "cpu") if device is None else device
    if str(place).startswith("cpu") and _imitated(str(precision)):
        warnings.warn(
            f"this processor has no instructions for precision={precision!r}: the results are right, but computed"
            " much more slowly than with precision='float32'.",
            stacklevel=5,
        )


def _imitated(precision: str) -> bool:
    """Whether oneDNN, torch's library of products on a CPU, refuses this precision because the processor lacks it."""
    if precision == "float32" or not torch.backends.mkldnn.is_available():
        return False
    return not getattr(torch.ops.mkldnn, f"_is_mkldnn_{precision}_supported")()


@contextmanager
def products_in(precision: Precision) -> Iterator[None]:
    """Within this context the products of networks have another precision."""
    before = _now.set(precision)
    try:
        # If oneDNN refuses a product, torch warns with a stack trace and turns oneDNN off for good.
        with onednn(not _imitated(precision)):
            yield
    finally:
        _now.reset(before)


@contextmanager
def lowered(device: torch.device) -> Iterator[None]:
    """Within this context torch's products have the precision of ``products_in``."""
    dtype = _TYPES[_now.get()]
    if dtype is None:
        yield
        return
    # torch would keep cast weights until the context ends, in a program that is recorded for ever.
    with torch.autocast(device.type, dtype, cache_enabled=False), _ThinLayers(device.type):
        yield


class _ThinLayers(TorchFunctionMode):
    """Within this context Linear layers with few inputs or outputs run in float32."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.linear or not is_thin(*args[1].shape[-2:]):
            return func(*args, **kwargs)
        with torch.autocast(self._device, enabled=False):
            return func(args[0].float() if args[0].dtype in HALF else args[0], *args[1:], **kwargs)


def is_thin(*sizes: int) -> bool:
    """Whether a Linear layer has so few inputs or outputs that it stays in float32."""
    return min(sizes) < _THIN


def precision_now() -> Precision:
    """Return the precision of products here."""
    return _now.get()
