"""Whether a network gives each point its output whatever the other points are, so that they can be run in parts."""

import weakref
from typing import cast

from torch import Tensor, finfo, nn

from pyro_dropout.generative.inputs import AnyInputs, copies, leaves_of
from pyro_dropout.generative.networks import BayesianNet
from pyro_dropout.generative.own_noise import silent
from pyro_dropout.generative.standardised import Standardised
from pyro_dropout.generative.trial_run import aside, can_run, evaluating
from pyro_dropout.mathematics.errors import PyroDropoutError

# The shapes of inputs that a model has been checked with.
_CHECKED: "weakref.WeakKeyDictionary[nn.Module, set[object]]" = weakref.WeakKeyDictionary()
_BY_ROW: set[type[nn.Module]] = {nn.Sequential, nn.Linear, nn.Identity, nn.Dropout, nn.LayerNorm}
_BY_ROW |= {nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SELU, nn.SiLU, nn.Softplus, nn.Tanh, nn.Sigmoid}
_ADVICE = "If it needs all its points at once, as a graph network does, write BayesianNet(net, whole_batch=True)."


def runs_by_row(net: nn.Module) -> bool:
    """Whether a network is a stack of layers that, in evaluation mode, give one row of units for each row of units."""
    return all(type(module) in _BY_ROW for module in net.modules())


def check_single_points(model: object, x: AnyInputs) -> None:
    """Raise if a network cannot run on one of its points, or if its output there depends on the next point.

    The network runs with its own parameters, in evaluation mode and without noise of its own, once for inputs of a
    shape. One that draws random numbers all the same is not checked.
    """
    if isinstance(model, Standardised):
        x, model = model.standard_x(cast(Tensor, x)), model.model
    if not isinstance(model, BayesianNet) or model.whole_batch or len(x) < 2 or not can_run(x):
        return
    first = next((module for module in model.net.modules() if isinstance(module, nn.Linear)), None)
    if first is not None and runs_by_row(model.net) and isinstance(x, Tensor) and x.shape[1:] == (first.in_features,):
        return
    known, key = _CHECKED.setdefault(model, set()), tuple(leaf.shape[1:] for leaf in leaves_of(x))
    if key in known:
        return
    with aside(model.net), evaluating(model.net), silent():
        try:
            # Copies, as a prediction makes them: an expanded tensor has no view.
            one, again, two = (model.evaluate({}, copies(x[:rows], 1)) for rows in (1, 1, 2))
        except (RuntimeError, LookupError, ValueError) as cause:
            model.evaluate({}, copies(x, 1))  # not at fault if this fails too
            reason = (str(cause).splitlines() or [type(cause).__name__])[0]
            raise PyroDropoutError(
                f"net runs on {len(x)} points, but not on one of them: {reason} {_ADVICE}"
            ) from cause
    if _apart(one, again) <= 0 and _apart(one, two[:1]) > 8 * finfo(one.dtype).eps ** 0.5:
        raise PyroDropoutError(
            "the output of net at one point changes with the point beside it, so predictions of it would depend on how"
            f" the points are divided. {_ADVICE}"
        )
    known.add(key)


def _apart(one: Tensor, other: Tensor) -> float:
    """Return the largest difference between two outputs, relative to the largest of them."""
    return float((one - other).abs().max() / other.abs().max().clamp_min(1e-30))
