"""The precision of a network's products: float32, or half of it for speed.

With "bf16" the matrix products and convolutions of a network multiply numbers of 8 bits and add them up in float32, as
``torch.autocast`` does. Everything else stays in float32: parameters, draws of the weights, the optimiser's moments,
the outputs f, the KL and the loss. So do Linear layers with fewer than 8 inputs or outputs, often the first and the
last: they would gain nothing, and what a network is told and what it answers would lose digits.
"""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from pyro_dropout.engines.torch_internals import onednn
from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.mathematics.checks import check_choice

Precision = Literal["float32", "bf16", "fp16"]

_TYPES = {"float32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_THIN = 8  # inputs or outputs of a layer below which it stays in float32
_now: ContextVar[Precision] = ContextVar("the precision of products", default="float32")


def check_precision(
    precision: object, model: object, trains: bool = False, device: torch.device | str | None = None
) -> None:
    """Raise unless a model's products can have this precision; warn if this processor only imitates it.

    Args:
        precision: one of "float32", "bf16" and "fp16".
        model: the model.
        trains: whether gradients are taken.
        device: where the products are computed; by default, where the model is.
    """
    check_choice("precision", precision, tuple(_TYPES))
    if precision == "float32":
        return
    if precision == "fp16" and trains:
        raise PyroDropoutError(
            "precision='fp16' is for predictions: gradients are often too small for float16, and would become zero."
            " Train with precision='bf16'."
        )
    if not isinstance(model, nn.Module) or not getattr(getattr(model, "model", model), "lowers_products", False):
        raise PyroDropoutError(
            f"precision={precision!r} is for BayesianNet(net), inside Standardised too; {type(model).__name__} is none."
            " Use torch.autocast inside the model."
        )
    other = {value.dtype for value in model.parameters() if value.is_floating_point()} - {torch.float32}
    if other:
        raise PyroDropoutError(
            f"precision={precision!r} is for networks with parameters in float32; this one has"
            f" {', '.join(sorted(str(each).removeprefix('torch.') for each in other))}."
        )
    place = next((value.device for value in model.parameters()), "cpu") if device is None else device
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
def without_onednn(off: bool = True) -> Iterator[None]:
    """Within this context, torch computes on a CPU without oneDNN."""
    with onednn(not off):
        yield


@contextmanager
def products_in(precision: Precision) -> Iterator[None]:
    """Within this context the products of networks have another precision.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> model = pdrop.BayesianNet(torch.nn.Linear(16, 16, bias=False))
        >>> weights, x = {"weight": torch.eye(16)}, torch.full((1, 16), 1.001)
        >>> with products_in("bf16"):
        ...     low = model.evaluate(weights, x)
        >>> low[0, 0].item(), low.dtype, round(model.evaluate(weights, x)[0, 0].item(), 3)
        (1.0, torch.float32, 1.001)
    """
    before = _now.set(precision)
    try:
        # If oneDNN refuses a product, torch warns with a stack trace and turns oneDNN off for good.
        with without_onednn(_imitated(precision)):
            yield
    finally:
        _now.reset(before)


def lowered(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which torch's products have the precision of ``products_in``."""
    dtype = _TYPES[_now.get()]
    return nullcontext() if dtype is None else _autocast(device.type, dtype)


@contextmanager
def _autocast(device: str, dtype: torch.dtype) -> Iterator[None]:
    # torch would keep cast weights until the context ends, in a program that is recorded for ever.
    with torch.autocast(device, dtype, cache_enabled=False), _ThinLayers(device):
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
            return func(_whole(args[0]), *args[1:], **kwargs)


def is_thin(*sizes: int) -> bool:
    """Whether a Linear layer has so few inputs or outputs that it stays in float32.

    Example:
        >>> is_thin(7, 50), is_thin(50, 8)
        (True, False)
    """
    return min(sizes) < _THIN


def _whole(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def precision_now() -> Precision:
    """Return the precision of products here."""
    return _now.get()


HALF = (torch.float16, torch.bfloat16)


def plain_network(net: nn.Module) -> nn.Module:
    """Return the network inside ``torch.compile``; raise if its parameters have no shapes yet.

    Steps are compiled here, weight draws included, and a compiled network inside them cannot be looked into.
    """
    net = getattr(net, "_orig_mod", net) if type(net).__name__ == "OptimizedModule" else net
    for name, parameter in net.named_parameters():
        if is_lazy(parameter):
            raise PyroDropoutError(
                f"{name!r} has no shape before the network has seen data. Run it once, net(x[:2]), and then build the"
                " model."
            )
    return net


def check_types(net: nn.Module, sites: Iterable[str]) -> None:
    """Raise if a random parameter is complex."""
    for name in sites:
        kind = net.get_parameter(name).dtype
        if kind.is_complex:
            raise PyroDropoutError(
                f"{name!r} is complex ({kind}), and weights are real here. Hold its real and imaginary part as two"
                " parameters, or leave it out with Prior(hide=...)."
            )
