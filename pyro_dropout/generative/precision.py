"""The precision of a network's products: float32, or half of it for speed.

With "bf16" the matrix products and convolutions of a network multiply numbers of 8 bits and add them up in float32, as
``torch.autocast`` does. Everything else stays in float32: parameters, draws of the weights, the optimiser's moments,
the outputs f, the KL and the loss. So do Linear layers with fewer than 8 inputs or outputs, often the first and the
last: they would gain nothing, and what a network is told and what it answers would lose digits.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from pyro_dropout.engines.torch_internals import onednn
from pyro_dropout.errors import PyroDropoutError, warn_caller
from pyro_dropout.generative.process_state import bound
from pyro_dropout.mathematics.checks import check_choice

Precision = Literal["float32", "bf16"]

HALF = (torch.float16, torch.bfloat16)
_THIN = 8  # inputs or outputs of a layer below which it stays in float32
_now: ContextVar[Precision] = ContextVar("the precision of products", default="float32")


def check_precision(precision: object, model: object, device: torch.device | str | None = None) -> None:
    """Raise unless a model's products can have this precision; warn if this processor only imitates it."""
    check_choice("precision", precision, get_args(Precision))
    if precision == "float32":
        return
    ours = isinstance(model, nn.Module) and getattr(getattr(model, "model", model), "lowers_products", False)
    parameters = list(model.parameters()) if isinstance(model, nn.Module) else []
    kinds = {str(value.dtype).removeprefix("torch.") for value in parameters if value.is_floating_point()}
    if not ours or kinds - {"float32"}:
        raise PyroDropoutError(
            f"precision={precision!r} is for BayesianNet(net), inside Standardised too, with parameters in float32; got"
            f" {type(model).__name__} with {', '.join(sorted(kinds)) or 'none'}. Use torch.autocast inside the model."
        )
    place = next((value.device for value in parameters), "cpu") if device is None else device
    if str(place).startswith("cpu") and _imitated():
        warn_caller(
            "this processor has no instructions for precision='bf16': the results are right, but computed"
            " much more slowly than with precision='float32'.",
        )


def _imitated() -> bool:
    """Whether oneDNN, torch's library of products on a CPU, refuses bfloat16 because the processor lacks it."""
    return torch.backends.mkldnn.is_available() and not torch.ops.mkldnn._is_mkldnn_bf16_supported()


@contextmanager
def products_in(precision: Precision) -> Iterator[None]:
    """Within this context the products of networks have another precision."""
    # If oneDNN refuses a product, torch warns with a stack trace and turns oneDNN off for good.
    with bound(_now, precision), onednn(precision == "float32" or not _imitated()):
        yield


@contextmanager
def lowered(device: torch.device) -> Iterator[None]:
    """Within this context torch's products have the precision of ``products_in``."""
    if _now.get() == "float32":
        yield
        return
    # torch would keep cast weights until the context ends, in a program that is recorded for ever.
    with torch.autocast(device.type, torch.bfloat16, cache_enabled=False), _ThinLayers(device.type):
        yield


class _ThinLayers(TorchFunctionMode):
    """Within this context Linear layers with few inputs or outputs run in float32."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.linear or min(args[1].shape[-2:]) >= _THIN:
            return func(*args, **kwargs)
        with torch.autocast(self._device, enabled=False):
            return func(args[0].float() if args[0].dtype in HALF else args[0], *args[1:], **kwargs)


def precision_now() -> Precision:
    """Return the precision of products here."""
    return _now.get()
