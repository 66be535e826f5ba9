"""A model of standardised data that takes raw data and answers in raw units.

Priors and precisions assume inputs and targets of unit scale; data come in years or parts per million. The inner model
sees standardised data, and its callers see the units of the data, precision included.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pyro_dropout.errors import PyroDropoutError, RangeError, ShapeError
from pyro_dropout.generative.likelihoods.likelihood import check_standardised, likelihood_of
from pyro_dropout.mathematics.checks import check_finite, describe
from pyro_dropout.protocols import Likelihood

_PASSED_ON = ("whole_batch", "sites", "prior_of", "set_prior_scales", "sample_sites")
_SMALLEST, _LARGEST = 1e-150, 1e150  # standard deviations whose squares float64 can hold


class Standardised(nn.Module):
    """A model that takes x and y in the units of the data, standardises them for ``model``, and answers in those units.

    Means and standard deviations are those of the data given here, for each input and each target; a constant column is
    shifted and not scaled. Targets that are classes or counts stay as they are; a custom likelihood declares this with
    ``Likelihood.standardised_targets``. Train, predict and compare with raw data: densities, variances, intervals and
    ``elbo_report`` are those of the raw targets. Only the loss that ``fit`` minimises is that of the standardised
    targets; it differs by the constant N Σ log σ_y.

    Args:
        model: a ``BayesianNet`` or another model of this package; its ``Gaussian(tau)`` is in standardised units.
        x: the training inputs, (N, ...).
        y: the training targets, (N, D), or class indices.

    Attributes:
        model: the model of standardised data.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> year = torch.arange(1960.0, 1980.0).unsqueeze(-1)
        >>> ppm = 316 + 1.2 * (year - 1960)
        >>> inner = pdrop.BayesianNet(torch.nn.Linear(1, 1), likelihood=pdrop.Gaussian(tau=4.0))
        >>> model = pdrop.Standardised(inner, year, ppm)
        >>> answer = pdrop.predict(model, pdrop.AutoDropout(model, keep=0.9), year, samples=50, seed=0)
        >>> bool((answer.mean > 250).all()), round((answer.aleatoric[0] / ppm.var()).item(), 3)
        (True, 0.25)
    """

    x_mean: Tensor
    x_std: Tensor
    y_mean: Tensor
    y_std: Tensor

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse a class with a ``forward`` of its own: predictions of it would be of standardised targets."""
        super().__init_subclass__(**kwargs)
        if cls.forward is not Standardised.forward:
            raise PyroDropoutError(
                f"{cls.__name__} must not define forward: Standardised maps data and outputs between two scales there."
                " Define it in the network, or in a class below BayesianNet, and put that into Standardised."
            )

    def __init__(self, model: Any, x: Tensor, y: Tensor) -> None:
        super().__init__()
        if isinstance(model, Standardised):
            raise PyroDropoutError("model is already Standardised; pass the model inside it.")
        check_standardised(likelihood_of(model))
        self.model = model
        if not all(isinstance(each, Tensor) for each in (x, y)):
            got = f"{type(x).__name__} and {type(y).__name__}"
            raise ShapeError(f"x and y must be tensors; got {got}. Write torch.as_tensor(x, dtype=torch.float32).")
        if len(x) != len(y) or len(x) < 2:
            raise ShapeError(f"x and y must have the same number of points, at least two; got {len(x)} and {len(y)}.")
        if x.dim() < 2 or (self._scales_targets and y.dim() != 2):
            raise ShapeError(
                f"x must be (N, ...) and y (N, D), each input and target in its own column; got {tuple(x.shape)}"
                f" and {tuple(y.shape)}. Write x.unsqueeze(-1) for one column."
            )
        buffers = {"x": moments("x", x), "y": (torch.zeros(()), torch.ones(()))}
        if self._scales_targets:
            check_finite("y", y, data=True)
            self.model.likelihood.check_values(y, y)
            buffers["y"] = moments("y", self._mapped("free", y))
        for name, (mean, std) in buffers.items():
            self.register_buffer(f"{name}_mean", mean)
            self.register_buffer(f"{name}_std", std)

    @property
    def _scales_targets(self) -> bool:
        return bool(self.model.likelihood.standardised_targets())

    def _mapped(self, which: str, y: Tensor) -> Tensor:
        """Return targets mapped by a method of the likelihood, ``free`` or ``bound``; as they are if it has none."""
        change = getattr(self.model.likelihood, which, None)
        return y if change is None else change(y)

    @property
    def likelihood(self) -> Likelihood:
        """p(y | f) of raw targets: of a ``Gaussian``, that of precision τ/σ_y²."""
        inner = self.model.likelihood
        raw: Likelihood = inner.raw_likelihood(self.y_std) if self._scales_targets else inner
        return raw

    def __getattr__(self, name: str) -> Any:
        """Pass on the network's interface for guides and predictions."""
        return getattr(self.model, name) if name in _PASSED_ON else super().__getattr__(name)

    def evaluate(self, weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Run the network with the given weights on raw x; outputs are in the units of y."""
        return self.raw(self.model.evaluate(weights, self.standard_x(x)))

    def standard_x(self, x: Tensor) -> Tensor:
        """Return (x - mean)/σ_x."""
        _check_alike("x", x, self.x_mean)
        return (x - self.x_mean.to(x)) / self.x_std.to(x)

    def standard_y(self, y: Tensor) -> Tensor:
        """Return (y - mean)/σ_y; on the scale of a ``Transformed`` likelihood; classes and counts as they are."""
        if not self._scales_targets or y.dtype == torch.bool:  # the likelihood rejects bool targets itself
            return y
        _check_alike("y", y, self.y_mean)
        return self._mapped("bound", (self._mapped("free", y) - self.y_mean.to(y)) / self.y_std.to(y))

    def raw(self, f: Tensor) -> Tensor:
        """Return outputs in the units of y, as the likelihood says: means are shifted and scaled."""
        if not self._scales_targets:
            return f
        outputs: Tensor = self.model.likelihood.raw_outputs(f, self.y_mean.to(f), self.y_std.to(f))
        return outputs

    def forward(self, x: Tensor, y: Tensor | None = None, num_data: int | None = None) -> Tensor:
        """Draw the weights, run the network and observe ``y``; returns the outputs in the units of y."""
        observed = None if y is None else self.standard_y(y)
        return self.raw(self.model(self.standard_x(x), observed, num_data))


def network_in(model: Any) -> Any:
    """Return the network of a model that may standardise its data."""
    return model.model if isinstance(model, Standardised) else model


def moments(name: str, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and the standard deviation of each column, 1 for a constant one.

    Distances are squared in units of the largest: float32 cannot hold the squares of 1e-27 or 1e22.
    """
    check_finite(name, value, data=True)
    mean = value.mean(0, dtype=torch.float64).to(value)
    apart = value - mean
    unit = apart.abs().amax(0)
    std = unit * torch.nan_to_num(apart / unit).std(0)
    # The spread of a constant column is rounding, not always zero; dividing by it would make noise of size one.
    limits = torch.finfo(value.dtype)
    spread = std[std > 8 * limits.eps * mean.abs()]
    low, high = max(1e3 * limits.tiny, _SMALLEST), min(1e-3 * limits.max, _LARGEST)
    if limits.bits >= 32 and not bool(((spread > low) & (spread < high)).all()):
        raise RangeError(
            f"{name} must spread over more than {low:.0e} and less than {high:.0e}, which {value.dtype} can compute"
            f" with; got a standard deviation of {describe(spread)}. Give it in another unit"
            + (", or in float64." if limits.bits == 32 else ".")
        )
    return mean, torch.where(std > 8 * limits.eps * mean.abs(), std, 1.0)


def _check_alike(name: str, value: Tensor, mean: Tensor) -> None:
    """Raise unless points have the shape of the standardised data; a single column would be broadcast to all."""
    if not isinstance(value, Tensor):
        raise ShapeError(f"{name} of a Standardised model must be one tensor; got {type(value).__name__}.")
    if value.shape[1:] != mean.shape:
        raise ShapeError(
            f"{name} must have shape (N, {', '.join(map(str, mean.shape))}), as in the data that the model was"
            f" standardised with; got {tuple(value.shape)}."
        )
