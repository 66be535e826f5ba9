"""What the outputs of a function say about the data: p(y | f), for regression, classes, and counts."""

import pyro.distributions as dist
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyro_dropout.generative.likelihood import Likelihood, checked_numbers, likelihood_of
from pyro_dropout.generative.registration import buffered
from pyro_dropout.mathematics.checks import check_flag, check_positive, describe
from pyro_dropout.mathematics.errors import RangeError, ShapeError
from pyro_dropout.mathematics.normal import Normal
from pyro_dropout.protocols import Distribution

__all__ = ["Bernoulli", "Categorical", "Gaussian", "HeteroscedasticGaussian", "Likelihood", "Poisson", "likelihood_of"]


class Gaussian(Likelihood):
    """Targets with Gaussian noise of precision τ: y ~ N(f, τ⁻¹ I).

    Args:
        tau: observation precision; on standardised targets, that of the standardised target.
        learn: whether τ is a parameter, trained together with the guide.

    Example:
        >>> import pyro_dropout as pd
        >>> pd.Gaussian(tau=0.25).tau.item()
        0.25
    """

    def __init__(self, tau: float | Tensor = 1.0, learn: bool = False) -> None:
        super().__init__()
        check_positive("tau", tau)
        check_flag("learn", learn)
        log_tau = buffered(tau).log()
        if learn:
            self.log_tau = nn.Parameter(log_tau.to(torch.get_default_dtype()))
        else:
            self.register_buffer("log_tau", log_tau)

    @classmethod
    def of_log(cls, log_tau: Tensor) -> "Gaussian":
        """Return the likelihood with this log τ, which is not looked at: a tracer's tensor will do."""
        made = cls()
        made.register_buffer("log_tau", log_tau)
        return made

    @property
    def tau(self) -> Tensor:
        """The observation precision τ."""
        return self.log_tau.exp()

    def distribution(self, f: Tensor) -> Distribution:
        """Return N(f, τ⁻¹) over the last dimension of ``f``."""
        scale = torch.exp(-0.5 * self.log_tau).to(f)
        try:
            scale = scale.expand(f.shape)
        except RuntimeError:
            allowed = f"one number, or one for each of the model's {f.shape[-1]} outputs"
            raise ShapeError(f"tau must be {allowed}; got shape {tuple(scale.shape)}.") from None
        return Normal(f, scale).to_event(1)  # type: ignore[no-untyped-call]

    def checked(self, f: Tensor, y: Tensor) -> Tensor:
        """Return ``y`` if it holds numbers, as many as ``f``."""
        return super().checked(f, checked_numbers(y))

    def standardised_targets(self) -> bool:
        """Yes: τ is the precision of standardised targets."""
        return True

    def raw_outputs(self, f: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        """Return f·σ_y + mean."""
        return f * std + mean

    def raw_likelihood(self, std: Tensor) -> Likelihood:
        """Return the likelihood of precision τ/σ_y²."""
        log_tau = self.log_tau.detach().to(torch.float64)
        return Gaussian.of_log(log_tau - 2 * std.to(log_tau).log())


class HeteroscedasticGaussian(Likelihood):
    """Targets whose noise depends on the input: the network gives D means and then D log precisions.

    Example:
        >>> import torch, pyro_dropout as pd
        >>> f = torch.tensor([[2.0, 0.0]])  # one point: mean 2, log precision 0
        >>> pd.HeteroscedasticGaussian().distribution(f).variance
        tensor([[1.]])
    """

    def split(self, f: Tensor) -> tuple[Tensor, Tensor]:
        """Return the means and the log precisions in ``f``, (..., N, 2D)."""
        if f.shape[-1] % 2:
            raise ShapeError(f"the model must have 2·D outputs, means and log precisions; got {f.shape[-1]}.")
        mean, log_tau = f.chunk(2, dim=-1)
        return mean, log_tau

    def distribution(self, f: Tensor) -> Distribution:
        """Return N(mean, 1/precision)."""
        mean, log_tau = self.split(f)
        return Normal(mean, torch.exp(-0.5 * log_tau)).to_event(1)  # type: ignore[no-untyped-call]

    def checked(self, f: Tensor, y: Tensor) -> Tensor:
        """Return ``y``, which has half as many columns as ``f``."""
        return super().checked(self.split(f)[0], checked_numbers(y))

    def standardised_targets(self) -> bool:
        """Yes: means and log precisions are those of standardised targets."""
        return True

    def raw_outputs(self, f: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        """Return outputs whose means are shifted and scaled, and whose log precisions are shifted."""
        middle, log_tau = self.split(f)
        return torch.cat([middle * std + mean, log_tau - 2 * std.log().expand_as(log_tau)], -1)

    def raw_likelihood(self, std: Tensor) -> Likelihood:
        """Return itself: the outputs hold the precision."""
        return self


class _Classes(dist.Categorical):
    """Pyro's Categorical, with a log density whose gradient scatters nothing: it fuses where it is compiled."""

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log probability of class indices, (*batch_shape)."""
        if value.shape != self.batch_shape or value.is_floating_point():
            found: Tensor = super().log_prob(value)  # type: ignore[no-untyped-call]
            return found
        logits = self.logits.reshape(-1, self.logits.shape[-1])
        return -F.nll_loss(logits, value.reshape(-1), reduction="none").reshape(value.shape)


class Categorical(Likelihood):
    """One of C classes by the softmax of the outputs (eq. 5, Prop. 2); ``y`` holds class indices, (N,).

    Example:
        >>> import torch, pyro_dropout as pd
        >>> pd.Categorical().distribution(torch.zeros(3, 4)).probs[0].tolist()
        [0.25, 0.25, 0.25, 0.25]
    """

    def distribution(self, f: Tensor) -> Distribution:
        """Return the softmax of ``f`` over its last dimension."""
        return _Classes(logits=f, validate_args=False)

    def checked(self, f: Tensor, y: Tensor) -> Tensor:
        """Return ``y`` if it is a vector of whole numbers."""
        if y.shape != f.shape[-2:-1]:
            wanted = tuple(f.shape[-2:-1])
            raise ShapeError(f"y must hold one class index a point, shape {wanted}; got {tuple(y.shape)}.")
        if y.is_floating_point() or y.is_complex():
            raise RangeError(f"y must hold class indices of an integer type; got {y.dtype}. Write y.long().")
        return y.long()

    def standardised_targets(self) -> bool:
        """No: class indices stay as they are."""
        return False

    def check_values(self, f: Tensor, y: Tensor) -> None:
        """Raise unless every target is the index of a class."""
        low, high = int(y.min()), int(y.max())
        if low < 0 or high >= f.shape[-1]:
            raise RangeError(f"y must hold class indices from 0 to {f.shape[-1] - 1}; got {low} to {high}.")


class Bernoulli(Likelihood):
    """Yes or no by the sigmoid of the output; ``y`` holds 0 and 1, (N, D), or (N,) for one output.

    Example:
        >>> import torch, pyro_dropout as pd
        >>> pd.Bernoulli().distribution(torch.zeros(2, 1)).mean.tolist()
        [[0.5], [0.5]]
    """

    def distribution(self, f: Tensor) -> Distribution:
        """Return independent coin flips with log-odds ``f``."""
        return dist.Bernoulli(logits=f, validate_args=False).to_event(1)

    def checked(self, f: Tensor, y: Tensor) -> Tensor:
        """Return ``y`` as numbers of the model's type, with a column of its own when it came as a vector."""
        if y.shape == f.shape[-2:-1] and f.shape[-1] == 1:
            y = y.unsqueeze(-1)
        return super().checked(f, y).to(f.dtype)

    def standardised_targets(self) -> bool:
        """No: yes and no stay as they are."""
        return False

    def check_values(self, f: Tensor, y: Tensor) -> None:
        """Raise unless every target is 0 or 1."""
        if not bool(((y == 0) | (y == 1)).all()):
            raise RangeError(f"y must hold 0 and 1 only; got {describe(y)}.")


class Poisson(Likelihood):
    """Counts with rate exp(f); ``y`` is (N, D).

    Example:
        >>> import torch, pyro_dropout as pd
        >>> pd.Poisson().distribution(torch.zeros(2, 1)).mean.tolist()
        [[1.0], [1.0]]
    """

    def distribution(self, f: Tensor) -> Distribution:
        """Return independent Poisson counts with log rate ``f``."""
        return dist.Poisson(torch.exp(f), validate_args=False).to_event(1)

    def checked(self, f: Tensor, y: Tensor) -> Tensor:
        """Return ``y`` as numbers of the model's type."""
        return super().checked(f, y).to(f.dtype)

    def standardised_targets(self) -> bool:
        """No: counts stay as they are."""
        return False

    def check_values(self, f: Tensor, y: Tensor) -> None:
        """Raise unless every target is a count."""
        if not bool(((y >= 0) & (y == y.floor()) & torch.isfinite(y)).all()):
            raise RangeError(f"y must hold counts, whole numbers from 0; got {describe(y)}.")
