"""One weight draw for every data point, at the cost of a mask: an effect handler for guides of row mixtures.

The handler gives each weight site of the guide a placeholder tensor instead of a draw. When a layer of the model uses
the placeholder, the layer is rewritten: masks on its inputs, noise on its outputs. A placeholder that reaches ``y`` in
any other way is an error, never a silent approximation.
"""

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import torch
import torch.nn.functional as F
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pyro_dropout.mathematics.per_data_point import Layer, Lookup, MatrixProduct, PerDataPoint, drawn_per_data_point
from pyro_dropout.mathematics.row_mixture_distribution import RowMixture
from pyro_dropout.protocols import Message
from pyro_dropout.training.loss.row_tracking import QUESTIONS, Args, Kwargs, Operation, Record, not_followed, tensors

_TRANSPOSED = "_pyro_dropout_transposed"  # on a placeholder

_CONVOLUTIONS = (torch.conv1d, torch.conv2d, torch.conv3d)
_TRANSPOSED_CONVOLUTIONS = (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)
_MATMULS = (torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__)
_ADDS = (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__)
_TIMES = (torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__)
_TRANSPOSES = (Tensor.t, torch.t, getattr(Tensor.T, "__get__"), getattr(Tensor.mT, "__get__"))  # noqa: B009 - properties


class per_example(Messenger):
    """Within this context every data point gets its own weights, drawn from the guide.

    The distribution for each data point is that of drawing whole weights; the cost is that of a mask. Works with the
    package's guides on Linear, ConvNd and Embedding layers, and on plain Pyro models that use ``F.linear`` or ``@``.
    Data points must come first in every input, and the distribution of each must depend only on its own outputs: a
    model that sums or compares data points is rejected. BatchNorm mixes them but is allowed. A ``BayesianNet`` is tried
    with known weights, whatever operations it has; ``ELBO``, and so ``fit``, tries other Pyro models too. Sites with
    other distributions than ``RowMixture``, as guides of your own may have, are drawn once for all data points.

    Args:
        reused: draw Gaussian noise so that one draw can be used on several inputs, for layers that are called again.

    Example:
        >>> import pyro, torch, pyro_dropout as pdrop
        >>> _ = torch.manual_seed(0)
        >>> model = pdrop.BayesianNet(torch.nn.Linear(3, 1, bias=False))
        >>> guide = pdrop.AutoDropout(model, keep=0.5)
        >>> x = torch.ones(4, 3)
        >>> with pdrop.per_example():
        ...     trace = pyro.poutine.trace(guide).get_trace(x)
        ...     f = pyro.poutine.replay(model, trace=trace)(x)
        >>> len(set(f.flatten().tolist())) > 1  # equal inputs, different weights
        True
    """

    def __init__(self, *, reused: bool = False) -> None:
        super().__init__()
        self._reused = reused
        self._mode = _RewriteLayers()

    def __enter__(self) -> Self:
        entered = super().__enter__()  # raises if entered twice
        self._mode = _RewriteLayers()  # a new record, which ends with the context
        self._mode.__enter__()  # type: ignore[no-untyped-call]
        return entered

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._mode.__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        super().__exit__(kind, error, traceback)

    def _pyro_sample(self, msg: Message) -> None:
        fn, name, infer = msg["fn"], msg["name"], msg["infer"] or {}
        if not infer.get("_deterministic"):  # such a site keeps its value, and has no density
            observed = msg["value"] if msg["is_observed"] else None
            self._mode.record.check(name, fn, observed, msg["scale"], msg["mask"])
        if msg["done"] or msg["is_observed"] or not isinstance(fn, RowMixture):
            return
        # A scalar or a constrained site is drawn once for all data points, as always.
        if infer.get("is_auxiliary") or not fn.event_shape:
            if fn.joint:
                advice = "Use shared draws (per_example=False), or AutoLowRank(per='layer')."
                raise not_followed(name, "it is drawn once for all of them, and shares its noise with weights", advice)
            return
        recipe = PerDataPoint(name, fn, self._reused or bool(infer.get("reused", False)))
        value = recipe.weight if not fn.batch_shape else recipe.mark(recipe.weight.expand(fn._extended_shape()))
        msg["value"], msg["done"] = value, True


class _RewriteLayers(TorchFunctionMode):
    """Rewrites the layers that use a placeholder, and records whatever else is made from one."""

    def __init__(self) -> None:
        super().__init__()
        self.record = Record()

    def __torch_function__(
        self, func: Operation, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        if func in QUESTIONS:
            return func(*args, **(kwargs or {}))
        kwargs = kwargs or {}
        drawn = known = False
        for value in tensors((*args, *kwargs.values())):
            drawn = drawn or drawn_per_data_point(value) is not None
            known = known or self.record.of(value) is not None
        if not drawn and not known:
            return func(*args, **kwargs)
        result = _REWRITES[func](func, *args, **kwargs) if drawn and func in _REWRITES else None
        if result is None:
            return self.record.run(func, args, kwargs)
        self.record.after_layer(result, args, kwargs)
        return result


def _plus_bias(y: Tensor, bias: Tensor | None, channel: int = -1) -> Tensor:
    """Add a bias, drawn for each data point if it is a placeholder."""
    return y if bias is None else y + _by_unit(y, bias, channel)


def _by_unit(y: Tensor, units: Tensor, channel: int) -> Tensor:
    """Return one number for each unit of y, drawn for each data point if ``units`` is a placeholder, to broadcast."""
    recipe = drawn_per_data_point(units)
    values = units.unsqueeze(0) if recipe is None else recipe.draws(len(y)).to(y.dtype)
    shape = [1] * y.dim()
    shape[0], shape[channel] = values.shape
    return values.reshape(shape)


def _product(x: Tensor, weight: Tensor, in_dim: int) -> Tensor | None:
    """Return x's product with a placeholder for a matrix, whose dimension ``in_dim`` matches x's last one."""
    recipe = drawn_per_data_point(weight)
    if recipe is None or drawn_per_data_point(x) is not None or weight.dim() != 2 or x.dim() < 2:
        return None
    if getattr(weight, _TRANSPOSED, False):
        in_dim = 1 - in_dim
    return recipe.product(x, MatrixProduct(in_dim, positions=x.dim() > 2))


def _linear(func: Operation, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    if drawn_per_data_point(weight) is None:
        result = None if drawn_per_data_point(input) is not None else func(input, weight)
    else:
        result = _product(input, weight, 1)
    return None if result is None else _plus_bias(result, bias)


def _convolution(
    func: Operation, input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any
) -> Tensor | None:
    names: tuple[str, ...] = ("stride", "padding", "dilation", "groups")
    if func in _TRANSPOSED_CONVOLUTIONS:
        names = ("stride", "padding", "output_padding", "groups", "dilation")
    options = {**dict(zip(names, args, strict=False)), **kwargs}
    recipe = drawn_per_data_point(weight)
    if drawn_per_data_point(input) is not None or input.dim() != weight.dim():
        return None
    if recipe is None:
        return _plus_bias(func(input, weight, None, **options), bias, 1)
    dims = (0, 1) if func in _TRANSPOSED_CONVOLUTIONS else (1, 0)
    groups = options.get("groups", 1)
    layer = Layer(lambda x, w: func(x, w, None, **options), *dims, channel=1, groups=groups, positions=True)
    return _plus_bias(recipe.product(input, layer), bias, 1)


def _with_units(func: Operation, input: object, other: object, **kwargs: object) -> Tensor | None:
    """Return a sum or a product of values with a number for each unit: a bias, or a scale."""
    units, values = (other, input) if drawn_per_data_point(other) is not None else (input, other)
    if kwargs or not isinstance(units, Tensor) or not isinstance(values, Tensor):
        return None
    if drawn_per_data_point(values) is not None or units.dim() != 1 or values.dim() < 2:
        return None
    own = _by_unit(values, units, -1)
    return values + own if func in _ADDS else values * own


def _prelu(func: Operation, input: Tensor, weight: Tensor) -> Tensor | None:
    if drawn_per_data_point(input) is not None or weight.dim() != 1 or input.dim() < 2:
        return None
    return torch.where(input > 0, input, input * _by_unit(input, weight, 1))


def _transpose(func: Operation, weight: Tensor) -> Tensor | None:
    recipe = drawn_per_data_point(weight)
    if recipe is None or weight.dim() != 2:
        return None
    turned = recipe.mark(func(weight))
    setattr(turned, _TRANSPOSED, not getattr(weight, _TRANSPOSED, False))
    return turned


def _embedding(
    func: Operation,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    *_: object,
    **__: object,
) -> Tensor | None:
    recipe = drawn_per_data_point(weight)
    assert recipe is not None
    if max_norm is not None:
        raise not_followed(recipe.site, "max_norm changes the embedding")
    if getattr(weight, _TRANSPOSED, False):
        return None
    layer = Lookup(lambda x, w: func(x, w, padding_idx), 0, 1, positions=True)
    return recipe.product(input, layer)


# Each takes the operation and its arguments, and returns its output, or None where it cannot be rewritten.
_REWRITES: dict[Operation, Callable[..., Tensor | None]] = {
    F.linear: _linear,
    F.embedding: _embedding,
    **dict.fromkeys((*_CONVOLUTIONS, *_TRANSPOSED_CONVOLUTIONS), _convolution),
    **dict.fromkeys(_MATMULS, lambda func, input, other: _product(input, other, 0)),
    **dict.fromkeys((*_ADDS, *_TIMES), _with_units),
    **dict.fromkeys((torch.prelu, Tensor.prelu), _prelu),
    **dict.fromkeys(_TRANSPOSES, _transpose),
}
