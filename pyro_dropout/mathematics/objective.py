"""The dropout objective, and conversions between a prior and a weight decay (§2.1, §4.2, §4.3).

Dropout training minimises (1/2N) Σ‖y − ŷ‖² + Σ λ_i ‖W_i‖². Minus the ELBO of the paper's model, divided by
Nτ, is the same function of the weights when λ_i = l² p_i / (2Nτ): p_i is ``keep``, and 1 for a bias that is
not dropped. Numbers give a ``float``; a tensor among the arguments gives a ``Tensor`` in their broadcast shape.
"""

import math
from collections.abc import Iterable, Mapping
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_dropout.errors import RangeError, ShapeError
from pyro_dropout.mathematics.checks import (
    check_choice,
    check_finite,
    check_flag,
    check_keep,
    check_non_negative,
    check_number,
    check_positive,
    check_whole,
    describe,
)
from pyro_dropout.mathematics.shapes import Float, broadcast_shape

Number = float | Tensor
# What the converters return: a Tensor where an argument is one. mypy cannot see that from the arithmetic.
Result = TypeVar("Result", float, Tensor)


def weight_decay(
    keep: Result | float, tau: Result | float, num_data: Result | float, length_scale: Result | float = 1.0
) -> Result:
    """The weight decay λ = l² p / (2Nτ) under which dropout training is inference with this prior and noise.

    λ is the factor of ‖W‖² in (1/2N) Σ‖y − ŷ‖² + λ‖W‖²; for ``torch.optim`` use ``optimizer_weight_decay``.

    Equation: sec4.2-weight-decay.

    Args:
        keep: probability in (0, 1] that a row of the layer is kept; 1 for a bias, which is not dropped.
        tau: observation precision, positive.
        num_data: number of data points, whole and at least 1 (``455.0`` is whole, ``455.5`` is an error).
        length_scale: the l of the prior N(0, l⁻² I), positive.

    Example:
        >>> import pyro_dropout as pdrop
        >>> print(f"{pdrop.paper.weight_decay(keep=0.95, tau=0.15, num_data=455, length_scale=1e-2):.6e}")
        6.959707e-07
    """
    _check(keep=keep, tau=tau, num_data=num_data, length_scale=length_scale)
    return length_scale * length_scale * keep / (2 * num_data * tau)  # type: ignore[return-value]


def implied_tau(
    keep: Result | float, weight_decay: Result | float, num_data: Result | float, length_scale: Result | float = 1.0
) -> Result:
    """The observation precision τ = l² p / (2Nλ) that training with weight decay λ implies.

    Equation: sec4.2-precision.

    The arguments are those of `weight_decay`, with λ > 0 in the place of τ: λ = 0 would mean data without noise.

    Example:
        >>> import pyro_dropout as pdrop
        >>> round(pdrop.paper.implied_tau(keep=0.9, weight_decay=1e-6, num_data=272), 1)
        1654.4
    """
    _check(keep=keep, weight_decay=weight_decay, num_data=num_data, length_scale=length_scale)
    return length_scale * length_scale * keep / (2 * num_data * weight_decay)  # type: ignore[return-value]


def implied_length_scale(
    keep: Result | float, tau: Result | float, weight_decay: Result | float, num_data: Result | float
) -> Result:
    """The prior length-scale l = √(2Nτλ / p) that a weight decay and a precision imply.

    Equation: sec4.2-length-scale.

    The arguments are those of `weight_decay` and `implied_tau`.

    Example:
        >>> import pyro_dropout as pdrop
        >>> round(pdrop.paper.implied_length_scale(keep=0.9, tau=1e5, weight_decay=1e-6, num_data=272), 4)
        7.7746
    """
    _check(keep=keep, tau=tau, weight_decay=weight_decay, num_data=num_data)
    square = 2 * num_data * tau * weight_decay / keep
    return square.sqrt() if isinstance(square, Tensor) else math.sqrt(square)  # type: ignore[return-value]


def optimizer_weight_decay(
    keep: Result | float,
    tau: Result | float,
    num_data: Result | float,
    length_scale: Result | float = 1.0,
    loss: str = "half_mse",
    out_features: int = 1,
    rescaled: bool = False,
) -> Result:
    """The ``weight_decay`` to pass to ``torch.optim``, for the loss that you train with.

    ``SGD`` and ``Adam`` add c·w to the gradient, and the gradient of λ‖w‖² is 2λ·w: for the loss that λ belongs to,
    c = 2λ, and for a multiple of that loss, the same multiple of c. (No c makes ``AdamW`` minimise this objective.)
    Weights and biases need separate parameter groups: a bias that is not dropped has ``keep=1``.

    The paper multiplies by masks of zeros and ones. ``nn.Dropout`` and Keras also divide by ``keep``, so that their
    weights are keep·M, and λ‖M‖² is λ‖w‖²/keep²: pass ``rescaled=True`` for a network with such layers.

    Equation: sec4.2-optimizer-weight-decay.

    Args:
        keep: as in `weight_decay`, as are ``num_data`` (of all points, not of a batch) and ``length_scale``.
        tau: observation precision, positive; 1 for ``"cross_entropy"``, since labels have no such noise.
        num_data: N.
        length_scale: l.
        loss: the data term beside λ‖W‖², a mean over points in each case. ``"half_mse"``: (1/2N) Σ‖y − ŷ‖², a sum
            over the D outputs; c = 2λ. ``"mse"``: torch's ``MSELoss``, (1/ND) Σ‖y − ŷ‖², a mean over the
            outputs and so 2/D times the former; c = 4λ/D. ``"cross_entropy"``: −(1/N) Σ log p̂(y); c = 2λ.
        out_features: the D of ``"mse"``, a whole number; the other losses do not depend on it.
        rescaled: whether dropout divides what it keeps by ``keep``, as ``nn.Dropout`` does.

    Example:
        >>> import pyro_dropout as pdrop
        >>> [pdrop.paper.optimizer_weight_decay(0.5, 2.0, 100, loss=loss) for loss in ("half_mse", "mse")]
        [0.0025, 0.005]
        >>> pdrop.paper.optimizer_weight_decay(0.5, 2.0, 100, loss="mse", out_features=4)
        0.00125
        >>> pdrop.paper.optimizer_weight_decay(0.5, 2.0, 100, rescaled=True)  # the layers are nn.Dropout(0.5)
        0.01
    """
    check_choice("loss", loss, ("half_mse", "mse", "cross_entropy"))
    check_flag("rescaled", rescaled)
    check_whole("out_features", out_features)
    decay: Result = weight_decay(keep, tau, num_data, length_scale)
    if loss == "cross_entropy" and bool((torch.as_tensor(tau) != 1).any()):
        raise RangeError(
            f"tau must be 1 with loss='cross_entropy', as labels have no observation precision; got {describe(tau)}."
        )
    if rescaled:
        decay = decay / (keep * keep)
    return 4 * decay / out_features if loss == "mse" else 2 * decay


def standardised_tau(tau: Result | float, target_std: Result | float) -> Result:
    """The precision τ·σ_y² of targets standardised to (y − mean)/σ_y, when the raw targets have precision τ.

    Dividing y by σ_y divides the noise's variance τ⁻¹ by σ_y². For standardised targets, this is the τ of all formulas.

    Equation: sec4.2-standardised-precision.

    Args:
        tau: observation precision in the targets' own units, positive.
        target_std: the σ_y by which the targets were divided, positive.

    Example:
        >>> import pyro_dropout as pdrop
        >>> pdrop.paper.standardised_tau(tau=0.25, target_std=8.0)
        16.0
    """
    _check(tau=tau, target_std=target_std)
    return tau * target_std * target_std  # type: ignore[return-value]


def dropout_objective(
    y: Tensor,
    y_hat: Tensor,
    weights: Mapping[str, Tensor] | Iterable[Tensor],
    weight_decays: Number | Mapping[str, Number] | Iterable[Number],
) -> Float[Tensor, ""]:
    """What dropout training minimises: (1/2N) Σ‖y − ŷ‖² + Σ λ_i ‖W_i‖², with the softmax loss for classes.

    A scalar, differentiable in ``y_hat`` and ``weights``; for tests and teaching.

    Equation: eq3.

    Args:
        y: real targets (N, D), or (N,), or (N, ...) with the squares summed over all but the first dimension;
            or integer class indices (N,), for which the first term is −(1/N) Σ log softmax(ŷ)[y].
        y_hat: predictions under one draw of the masks: the shape of ``y``, or logits (N, C) for classes.
        weights: the W_i, and the biases if they decay too: a dict by name, or an iterable of tensors.
        weight_decays: the λ_i ≥ 0, as ``weight_decay`` gives them: one number for all, an iterable in the
            order of ``weights``, or a dict with the same keys.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> y, y_hat, w = torch.tensor([[1.0], [3.0]]), torch.tensor([[1.0], [1.0]]), torch.ones(1, 4)
        >>> pdrop.paper.dropout_objective(y, y_hat, {"w": w}, {"w": 0.25})
        tensor(2.)
        >>> pdrop.paper.dropout_objective(torch.tensor([0, 1, 1]), torch.zeros(3, 2), [w], 0.0)
        tensor(0.6931)
    """
    _check_targets(y, y_hat)
    # for real targets (1/2N) Σ‖y − ŷ‖², for classes −(1/N) Σ log p̂(y)
    objective = (y - y_hat).square().sum() / (2 * len(y)) if y.is_floating_point() else F.cross_entropy(y_hat, y.long())
    for weight, decay in _pairs(weights, weight_decays):
        objective = objective + decay * weight.square().sum()
    return objective


def _pairs(weights: object, weight_decays: object) -> list[tuple[Tensor, Number]]:
    """Pair each weight with its decay, for any of the accepted forms."""
    if isinstance(weights, Tensor) or not isinstance(weights, Iterable):
        raise ShapeError(f"weights must be a dict or a list of tensors; got {type(weights).__name__}; write [w].")
    named = dict(weights) if isinstance(weights, Mapping) else dict(enumerate(weights))
    decays: dict[object, Number] = dict.fromkeys(named, weight_decays)  # type: ignore[arg-type]  # a number for all
    if isinstance(weight_decays, Mapping):
        decays = dict(weight_decays)
    elif isinstance(weight_decays, Iterable) and getattr(weight_decays, "shape", None) != ():
        decays = dict(zip(named, listed := list(weight_decays), strict=False))
        if len(listed) != len(named):
            raise ShapeError(f"weight_decays must hold one per weight; got {len(listed)} for {len(named)} weights.")
    if decays.keys() != named.keys():
        raise ShapeError(f"weight_decays must have the keys of weights, {list(named)}; got {list(decays)}.")
    for key, decay in decays.items():
        if not isinstance(named[key], Tensor) or (isinstance(decay, Tensor) and decay.dim() > 0):
            got = f"{type(named[key]).__name__} and {describe(decay)}"
            raise ShapeError(f"weights[{key!r}] must be a tensor and its weight decay one number; got {got}.")
        check_non_negative(f"weight_decays[{key!r}]", decay)
    return [(weight, decays[key]) for key, weight in named.items()]


def _check_targets(y: object, y_hat: object) -> None:
    if not isinstance(y, Tensor) or not isinstance(y_hat, Tensor):
        raise ShapeError(f"y and y_hat must be tensors; got {type(y).__name__} and {type(y_hat).__name__}.")
    shapes = f"got {tuple(y.shape)} and {tuple(y_hat.shape)}"
    if y.dim() == 0 or y.numel() == 0 or y_hat.numel() == 0:
        raise ShapeError(f"y and y_hat must hold at least one point each, shape (N, D); {shapes}.")
    if y.is_floating_point():
        if y.shape != y_hat.shape:
            advice = "With (N, 1), an (N,) broadcasts to (N, N). Write y.reshape(y_hat.shape)."
            raise ShapeError(f"y and y_hat must share one shape; {shapes}. {advice}")
        check_finite("y", y)
        return
    check_number("y", y)
    if y.dim() != 1 or y_hat.dim() != 2 or len(y) != len(y_hat):
        raise ShapeError(
            f"an integer y holds class indices, shape (N,), and y_hat their logits, shape (N, C); {shapes}. "
            "Convert y to floating point if it holds real targets."
        )
    if not bool(((y >= 0) & (y < y_hat.shape[1])).all()):
        raise RangeError(f"y must hold classes from 0 to {y_hat.shape[1] - 1}; got {describe(y)}.")


def _check(**values: Number) -> None:
    """Raise unless each value is in its range and the tensors among them broadcast to one shape."""
    for name, value in values.items():
        {"keep": check_keep, "num_data": check_whole}.get(name, check_positive)(name, value)
    shapes = {name: tuple(value.shape) for name, value in values.items() if isinstance(value, Tensor)}
    try:
        broadcast_shape(*shapes.values())
    except ValueError:
        given = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ShapeError(f"{' and '.join(shapes)} must broadcast to one shape; got {given}.") from None
