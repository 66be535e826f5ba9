"""What the outputs of a function say about the data: p(y | f), for regression, classes, and counts."""

import pyro.distributions as dist
import torch
import torch.nn.functional as F
from torch import Size, Tensor, nn

from pyro_dropout.generative.likelihood import Dims, Likelihood, OutputShape, checked_numbers, likelihood_of
from pyro_dropout.generative.registration import buffered
from pyro_dropout.mathematics.checks import check_flag, check_positive, describe
from pyro_dropout.mathematics.errors import RangeError, ShapeError
from pyro_dropout.mathematics.normal import Normal
from pyro_dropout.protocols import Distribution

__all__ = ["Bernoulli", "Categorical", "Gaussian", "HeteroscedasticGaussian", "Likelihood", "Poisson", "likelihood_of"]


_LARGEST_LOG = 170.0  # of a precision, so that its root and its inverse are numbers


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

    def curvature_root(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        """Return diag √τ."""
        return torch.diag_embed(self.distribution(f).stddev.reciprocal())

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

    Args:
        dims: the shape of the network's output at one point if it is a sequence or a map, such as (T, 2·D) or
            (2·D, H, W); one size may be None, if it differs from batch to batch. Targets have D in the place of 2·D;
            if D is 1, they may be without it.
        dim: which of ``dims`` holds the means and then the log precisions.

    Example:
        >>> import torch, pyro_dropout as pd
        >>> f = torch.tensor([[2.0, 0.0]])  # one point: mean 2, log precision 0
        >>> pd.HeteroscedasticGaussian().distribution(f).variance
        tensor([[1.]])
        >>> depth = pd.HeteroscedasticGaussian(dims=(2, 8, 8), dim=0)
        >>> depth.distribution(depth.flattened(torch.zeros(5, 2, 8, 8))).event_shape
        torch.Size([1, 8, 8])
    """

    def __init__(self, dims: Dims | None = None, dim: int = -1) -> None:
        super().__init__()
        self.shape = None if dims is None else OutputShape(dims, dim)
        if self.shape is not None and self.shape.parts % 2:
            raise ShapeError(f"dims must have an even size at dim, for means and log precisions; got {dims}.")

    def split(self, f: Tensor) -> tuple[Tensor, Tensor]:
        """Return the means and the log precisions in ``f``, (..., N, 2D)."""
        if self.shape is not None:
            mean, log_tau = self.shape.whole(f).chunk(2, dim=self.shape.from_end)
            return mean, log_tau
        if f.shape[-1] % 2:
            raise ShapeError(f"the model must have 2·D outputs, means and log precisions; got {f.shape[-1]}.")
        mean, log_tau = f.chunk(2, dim=-1)
        return mean, log_tau

    def distribution(self, f: Tensor) -> Distribution:
        """Return N(mean, 1/precision)."""
        mean, log_tau = self.split(f)
        event = 1 if self.shape is None else len(self.shape.dims)
        scale = torch.exp(-0.5 * log_tau.clamp(-_LARGEST_LOG, _LARGEST_LOG))  # far from the data it would be 0 or inf
        return Normal(mean, scale).to_event(event)  # type: ignore[no-untyped-call]

    def checked(self, f: Tensor, y: Tensor) -> Tensor:
        """Return ``y``, which has half as many columns as ``f``."""
        mean = self.split(f)[0]
        if self.shape is None:
            return super().checked(mean, checked_numbers(y))
        wanted = mean.shape[f.dim() - 2 :]
        if self.shape.parts == 2 and y.dim() == len(wanted) - 1:
            y = y.unsqueeze(self.shape.from_end)
        if y.shape != wanted or y.is_complex():
            raise ShapeError(f"y must hold real numbers, shape {tuple(wanted)}; got {tuple(y.shape)}.")
        return checked_numbers(y)

    def curvature_root(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        """Return diag(√τ, √½) for a mean and its log τ: the Hessian would be negative where y is near the mean."""
        _, log_tau = self.split(f)
        where = -1 if self.shape is None else self.shape.from_end
        roots = torch.cat([torch.exp(0.5 * log_tau), torch.full_like(log_tau, 0.5**0.5)], where)
        return torch.diag_embed(roots.reshape(f.shape))

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
    """Pyro's Categorical, with a log density whose gradient scatters nothing: it fuses where it is compiled.

    Targets with the value ``ignored`` have the log density 0: they are not data.
    """

    ignored: int | None = None

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log probability of class indices, (*batch_shape)."""
        if self.ignored is not None:
            known = value != self.ignored
            return torch.where(known, self._log_prob(torch.where(known, value, 0)), 0.0)
        return self._log_prob(value)

    def _log_prob(self, value: Tensor) -> Tensor:
        if value.shape != self.batch_shape or value.is_floating_point():
            found: Tensor = super().log_prob(value)  # type: ignore[no-untyped-call]
            return found
        logits = self.logits.reshape(-1, self.logits.shape[-1])
        return -F.nll_loss(logits, value.reshape(-1), reduction="none").reshape(value.shape)

    def expand(self, batch_shape: Size | list[int] | tuple[int, ...], _instance: object = None) -> "_Classes":
        """Return the same distribution in larger plates."""
        made: _Classes = super().expand(batch_shape, _instance)  # type: ignore[no-untyped-call]
        made.ignored = self.ignored
        return made


class Categorical(Likelihood):
    """One of C classes by the softmax of the outputs (eq. 5, Prop. 2); ``y`` holds class indices, (N,).

    Args:
        dims: the shape of the network's output at one point if every point has many targets, such as (T, C) for the
            tokens of a text or (C, H, W) for a map of classes; one size may be None, if it differs from batch to batch.
            ``y`` is then (N, T) or (N, H, W), and probabilities are (N, T, C) or (N, H, W, C).
        dim: which of ``dims`` holds the classes.
        ignore_index: a value of ``y`` that is not a class: such targets have no likelihood, and no score counts them.

    Example:
        >>> import torch, pyro_dropout as pd
        >>> pd.Categorical().distribution(torch.zeros(3, 4)).probs[0].tolist()
        [0.25, 0.25, 0.25, 0.25]
        >>> tokens = pd.Categorical(dims=(None, 4), ignore_index=-100)
        >>> p = tokens.distribution(tokens.flattened(torch.zeros(1, 3, 4)))  # a text of three tokens
        >>> torch.allclose(p.log_prob(torch.tensor([[2, 0, -100]])).exp(), torch.tensor([0.25**2]))
        True
    """

    def __init__(self, dims: Dims | None = None, dim: int = -1, ignore_index: int | None = None) -> None:
        super().__init__()
        self.shape = None if dims is None else OutputShape(dims, dim)
        if ignore_index is not None and (isinstance(ignore_index, bool) or not isinstance(ignore_index, int)):
            raise RangeError(f"ignore_index must be a whole number, such as -100, or None; got {ignore_index!r}.")
        self.ignore_index = ignore_index

    def distribution(self, f: Tensor) -> Distribution:
        """Return the softmax of ``f`` over its classes."""
        logits = f if self.shape is None else self.shape.whole(f).movedim(self.shape.from_end, -1)
        classes = _Classes(logits=logits, validate_args=False)
        classes.ignored = self.ignore_index
        event = 0 if self.shape is None else len(self.shape.dims) - 1
        return classes.to_event(event) if event else classes  # type: ignore[no-untyped-call]

    def checked(self, f: Tensor, y: Tensor) -> Tensor:
        """Return ``y`` if it holds whole numbers, one for each position of each point."""
        wanted = tuple(f.shape[-2:-1]) + (() if self.shape is None else self.shape.positions(f))
        if y.shape != wanted:
            where = "a point" if self.shape is None else "a position"
            raise ShapeError(f"y must hold one class index {where}, shape {wanted}; got {tuple(y.shape)}.")
        if y.is_floating_point() or y.is_complex():
            raise RangeError(f"y must hold class indices of an integer type; got {y.dtype}. Write y.long().")
        return y.long()

    def curvature_root(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        """Return the Cholesky root of diag p - p pᵀ at each position, C - 1 columns; zero where ``y`` is ignored."""
        p = self.distribution(f).base_dist.probs if self.shape is not None else self.distribution(f).probs
        root = _class_root(p)  # (..., N, *positions, C, C - 1)
        if y is not None and self.ignore_index is not None:
            root = root * (y != self.ignore_index)[..., None, None]
        if self.shape is None:
            return root
        # One block for each position, in the order that the outputs have in a row.
        places = self.shape.whole(torch.arange(f.shape[-1], device=f.device)).movedim(self.shape.from_end, -1)
        at = places.reshape(-1, self.shape.parts)
        whole = f.new_zeros(*f.shape, f.shape[-1])
        whole[..., at[:, :, None], at[:, None, :-1]] = root.flatten(f.dim() - 1, -3)
        return whole

    def standardised_targets(self) -> bool:
        """No: class indices stay as they are."""
        return False

    def check_values(self, f: Tensor, y: Tensor) -> None:
        """Raise unless every target is the index of a class."""
        classes = f.shape[-1] if self.shape is None else self.shape.parts
        known = y if self.ignore_index is None else y[y != self.ignore_index]
        if not known.numel():
            raise RangeError(f"y must hold class indices, and not ignore_index={self.ignore_index} alone.")
        low, high = int(known.min()), int(known.max())
        if low < 0 or high >= classes:
            raise RangeError(f"y must hold class indices from 0 to {classes - 1}; got {low} to {high}.")


def _class_root(p: Tensor) -> Tensor:
    """Return L, (..., C, C - 1), with L Lᵀ = diag p - p pᵀ; no difference of numbers near 1 is taken.

    With the tails s_j = Σ_{k≥j} p_k, L_jj² = p_j s_{j+1}/s_j and L_ij = -p_i √(p_j/(s_j s_{j+1})) below.
    """
    tails = p.flip(-1).cumsum(-1).flip(-1)
    tiny = torch.finfo(p.dtype).tiny
    own, rest, whole = p[..., :-1], tails[..., 1:], tails[..., :-1].clamp_min(tiny)
    diagonal = (own * (rest / whole)).sqrt()
    # p_i/√s_{j+1} is at most √s_{j+1}: the quotient is taken first, so that nothing overflows.
    below = -(p.unsqueeze(-1) / rest.clamp_min(tiny).sqrt().unsqueeze(-2)) * (own / whole).sqrt().unsqueeze(-2)
    return below.tril(-1) + F.pad(torch.diag_embed(diagonal), (0, 0, 0, 1))


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

    def curvature_root(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        """Return diag √(p(1 - p))."""
        return torch.diag_embed(torch.exp(0.5 * (F.logsigmoid(f) + F.logsigmoid(-f))))

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

    def curvature_root(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        """Return diag √rate."""
        return torch.diag_embed(torch.exp(0.5 * f))

    def standardised_targets(self) -> bool:
        """No: counts stay as they are."""
        return False

    def check_values(self, f: Tensor, y: Tensor) -> None:
        """Raise unless every target is a count."""
        if not bool(((y >= 0) & (y == y.floor()) & torch.isfinite(y)).all()):
            raise RangeError(f"y must hold counts, whole numbers from 0; got {describe(y)}.")
