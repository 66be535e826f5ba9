"""Covariance by Monte Carlo features: finite-rank layers for any nonlinearity, and §4.5's second layer.

K draws of (w, b) give features Φ with K̂ = ΦΦᵀ, which tends to the exact covariance as K grows; that finite rank is what
makes a Gaussian process a neural network with K hidden units.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pyro_dropout.errors import RangeError
from pyro_dropout.mathematics.checks import check_choice, check_count, check_positive, check_seed, check_shape
from pyro_dropout.mathematics.covariance import Covariance, Number, own_parameters
from pyro_dropout.mathematics.shapes import Float, broadcast_shape
from pyro_dropout.mathematics.weight_distribution import WeightDistribution

Nonlinearity = str | Callable[[Tensor], Tensor]
_NAMED = {"relu": torch.relu, "tanh": torch.tanh, "erf": torch.erf, "cos": torch.cos}


def nonlinearity_of(given: Nonlinearity) -> Callable[[Tensor], Tensor]:
    """Return the function that a name stands for, or the function itself."""
    if isinstance(given, str) and given in _NAMED:
        return _NAMED[given]
    if callable(given):
        return given
    raise RangeError(f"nonlinearity must be one of {', '.join(_NAMED)} or a callable; got {given!r}.")


def _activated(pre: Tensor, bias: Tensor, nonlinearity: Nonlinearity) -> Tensor:
    """Return √(1/K) σ(pre + b) for K pre-activations."""
    width = pre.size(-1)
    check_shape(bias.dim() >= 1 and bias.size(-1) == width, "bias", f"(..., {width})", bias)  # one would broadcast
    return nonlinearity_of(nonlinearity)(pre + bias.unsqueeze(-2)) / math.sqrt(width)


def finite_rank_features(
    x: Tensor, weight: Tensor, bias: Tensor, nonlinearity: Nonlinearity
) -> Float[Tensor, "... n k"]:
    """Features Φ, (..., N, K), of a layer of K units, whose products ΦΦᵀ are its covariance K̂.

    Φ = √(1/K) σ(x W₁ᵀ + b), with the weights as torch holds them. Leading dimensions broadcast.

    Equation: sec3.1-features.

    Args:
        x: Inputs, (..., N, Q).
        weight: Draws of the weights, (..., K, Q).
        bias: Draws of the biases, (..., K).
        nonlinearity: σ, one of "relu", "tanh", "erf", "cos", or an elementwise callable.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> weight = torch.tensor([[1.0], [-1.0], [2.0], [0.0]])
        >>> pdrop.paper.finite_rank_features(torch.tensor([[1.0], [2.0]]), weight, torch.zeros(4), "relu")
        tensor([[0.5000, 0.0000, 1.0000, 0.0000],
                [1.0000, 0.0000, 2.0000, 0.0000]])
    """
    check_shape(x.dim() >= 2, "x", "(..., N, Q)", x)
    q = x.size(-1)
    check_shape(weight.dim() >= 2 and weight.size(-1) == q, "weight", f"(..., K, {q})", weight)
    return _activated(x @ weight.mT, bias, nonlinearity)


def second_layer_features(h: Tensor, bias: Tensor, nonlinearity: Nonlinearity) -> Float[Tensor, "... n k"]:
    """Features Φ₂, (..., N, K₂), of a deep Gaussian process's second layer, given the outputs of its first.

    Φ₂ = √(1/K₂) σ₂(h + b): the first layer's outputs are the K₂ pre-activations. Leading dimensions broadcast.

    Equation: sec4.5-features.

    Args:
        h: Outputs of the first layer, (..., N, K₂).
        bias: One draw of the biases, (..., K₂).
        nonlinearity: σ₂, as in `finite_rank_features`.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> pdrop.paper.second_layer_features(torch.tensor([[1.0, -2.0, 3.0, 0.0]]), torch.ones(4), "relu")
        tensor([[1.0000, 0.0000, 2.0000, 0.5000]])
    """
    check_shape(h.dim() >= 2, "h", "(..., N, K₂)", h)
    return _activated(h, bias, nonlinearity)


class _Featured(Covariance):
    """Base class of the two covariances below, each given by its features."""

    standard_weight: Tensor
    standard_bias: Tensor

    def _draw(self, nonlinearity: Nonlinearity, seed: int | None, rows: int, columns: int) -> Tensor:
        nonlinearity_of(nonlinearity)
        check_seed(seed)
        self.nonlinearity = nonlinearity
        # In float64 and then rounded, so that a seed means the same draws in either precision.
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        drawn = torch.randn((rows, columns), generator=generator, dtype=torch.float64, device="cpu")
        return drawn.to(torch.get_default_device(), torch.get_default_dtype())

    def features(self, X: Tensor) -> Float[Tensor, "n k"]:
        raise NotImplementedError

    def forward(self, X: Tensor, Z: Tensor | None = None, diag: bool = False) -> Float[Tensor, "..."]:
        phi = self.features(X)
        return phi.square().sum(-1) if diag else phi @ (phi if Z is None else self.features(Z)).mT


class FiniteRank(_Featured):
    """Monte Carlo covariance of a layer of finitely many units, as a Pyro kernel with its features.

    K̂(x, y) = (1/K) Σ_k σ(w_kᵀx + b_k) σ(w_kᵀy + b_k) with w_k ~ N(0, l⁻²I) and b_k ~ N(0, l'⁻²). The draws are held in
    standard form, so that the length-scales can be learned. Memory is (N, K).

    With "cos", ``bias_prior="uniform"`` and ``variance=2`` it tends to the squared-exponential kernel
    exp(−‖x − y‖² / 2l²), since 2 E_b[cos(u + b) cos(v + b)] = cos(u − v).

    Equation: sec3.1-finite-rank.

    Args:
        nonlinearity: σ, one of "relu", "tanh", "erf", "cos", or an elementwise callable.
        width: Number K of units.
        input_dim: Number Q of inputs.
        variance: Factor of the whole covariance; 1 by default.
        length_scale: l, a number or (Q,); 1 by default.
        bias_length_scale: l', 1 by default; a uniform prior has none.
        seed: Seed of the draws; torch's global generator by default.
        bias_prior: "normal", or "uniform" for b_k ~ U[0, 2π).

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> x, kernel = torch.tensor([0.0, 1.0]), pdrop.paper.FiniteRank("relu", width=100_000, seed=0)
        >>> bool((kernel(x) - pdrop.paper.ArcCosine(1)(x)).abs().max() < 0.02)
        True
        >>> kernel.features(x).shape
        torch.Size([2, 100000])
    """

    def __init__(
        self,
        nonlinearity: Nonlinearity,
        width: int,
        input_dim: int = 1,
        variance: Number | None = None,
        length_scale: Number | None = None,
        bias_length_scale: Number | None = None,
        seed: int | None = None,
        bias_prior: str = "normal",
    ) -> None:
        check_count("width", width)
        check_choice("bias_prior", bias_prior, ("normal", "uniform"))
        if bias_prior == "uniform" and bias_length_scale is not None:
            raise RangeError(f"bias_length_scale must be absent for a uniform prior; got {bias_length_scale}.")
        of_bias = {"bias_length_scale": bias_length_scale} if bias_prior == "normal" else {}
        super().__init__(input_dim, None, variance=variance, length_scale=length_scale, **of_bias)
        self.width, self.bias_prior = width, bias_prior
        draws = self._draw(nonlinearity, seed, width, input_dim + 1)
        self.register_buffer("standard_weight", draws[:, :-1].contiguous())
        self.register_buffer("standard_bias", draws[:, -1].contiguous())

    @own_parameters
    def features(self, X: Tensor) -> Float[Tensor, "n k"]:
        """Φ, (N, K), with the root of the variance in it, so that ΦΦᵀ is the covariance."""
        X = self._inputs("X", X)
        weight, bias = self.standard_weight.to(X.dtype) / self.length_scale, self.standard_bias.to(X.dtype)
        uniform = self.bias_prior == "uniform"
        bias = 2 * math.pi * torch.special.ndtr(bias) if uniform else bias / self.bias_length_scale
        return finite_rank_features(X, weight, bias, self.nonlinearity) * self.variance.sqrt()


class SecondLayer(_Featured):
    """Covariance between hidden vectors with which a deep Gaussian process matches a dropout network, as a Pyro kernel.

    K₂(x, y) = (1/K₂) ∫ p(b₂) σ₂(x + b₂)ᵀ σ₂(y + b₂) db₂ for vectors x, y of length K₂ and b₂ ~ N(0, l'⁻²I). The kernel
    is its Monte Carlo estimate with ``terms`` draws, one in the paper.

    Equation: sec4.5-covariance.

    Args:
        nonlinearity: σ₂, as in `FiniteRank`.
        width: Number K₂ of hidden units, the columns of the inputs.
        bias_length_scale: l'; 1 by default.
        terms: Number of draws of b₂ that are averaged.
        seed: Seed of the draws; torch's global generator by default.
        variance: Factor of the whole covariance; 1 by default.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> hidden = torch.tensor([[0.0, 1.0, 2.0], [1.0, 1.0, -1.0]])
        >>> pdrop.paper.SecondLayer("tanh", width=3, terms=100_000, seed=0)(hidden).detach().round(decimals=1)
        tensor([[0.6000, 0.1000],
                [0.1000, 0.6000]])
    """

    def __init__(
        self,
        nonlinearity: Nonlinearity,
        width: int,
        bias_length_scale: Number | None = None,
        terms: int = 1,
        seed: int | None = None,
        variance: Number | None = None,
    ) -> None:
        check_count("width", width)
        check_count("terms", terms)
        super().__init__(width, None, variance=variance, bias_length_scale=bias_length_scale)
        self.width, self.terms = width, terms
        self.register_buffer("standard_bias", self._draw(nonlinearity, seed, terms, width))

    @own_parameters
    def features(self, X: Tensor) -> Float[Tensor, "n k"]:
        """Φ₂, (N, terms · K₂), with the root of the variance in it, so that Φ₂Φ₂ᵀ is the covariance."""
        X = self._inputs("X", X)
        bias = self.standard_bias.to(X.dtype) / self.bias_length_scale
        phi = second_layer_features(X, bias, self.nonlinearity)  # (terms, N, K₂)
        return (phi * (self.variance / self.terms).sqrt()).transpose(0, 1).flatten(1)


def finite_rank_log_marginal(y: Tensor, features: Tensor, tau: Number) -> Float[Tensor, "..."]:
    """Log evidence of a Gaussian process of finite rank, its weights integrated out, in nats: one number for each Φ.

    log N(y; 0, ΦΦᵀ + τ⁻¹I) = log ∫ N(y; Φw, τ⁻¹I) N(w; 0, I) dw, by K×K matrices when K < N, else by N×N.

    Equation: eq9.

    Args:
        y: Targets, (N,), or (N, D) for D independent outputs, whose logs are summed.
        features: Φ, (..., N, K).
        tau: Precision τ of the observations.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> pdrop.paper.finite_rank_log_marginal(torch.zeros(2), torch.eye(2), tau=1.0)  # y ~ N(0, 2I)
        tensor(-2.5310)
    """
    check_positive("tau", tau)
    check_shape(features.dim() >= 2, "features", "(..., N, K)", features)
    n = features.shape[-2]
    check_shape(y.dim() in (1, 2) and y.size(0) == n, "y", f"({n},) or ({n}, D)", y)
    precision = torch.as_tensor(tau, dtype=torch.float64, device=features.device)
    check_shape(precision.numel() == 1, "tau", "()", precision)
    return _log_marginal(y.reshape(n, -1), features, precision.reshape(()))


def _log_marginal(y: Float[Tensor, "*#b n d"], features: Float[Tensor, "*#b n k"], tau: Tensor) -> Float[Tensor, "*b"]:
    # In float64 throughout: a Gram matrix squares the condition number, and float32 fails from τ ~ 10⁶ on.
    n, k = features.shape[-2:]
    root = tau.double().sqrt()
    phi, target = features.double() * root[..., None, None], y.double() * root[..., None, None]
    gram = phi.mT @ phi if k < n else phi @ phi.mT  # |I + τΦΦᵀ| = |I + τΦᵀΦ|
    chol = torch.linalg.cholesky(gram + torch.eye(min(n, k), dtype=gram.dtype, device=gram.device))
    if k < n:
        w = torch.cholesky_solve(phi.mT @ target, chol)
        # yᵀΣ⁻¹y = min_w τ‖y − Φw‖² + ‖w‖²: a sum of squares, where Woodbury's difference would cancel
        quadratic = (target - phi @ w).square().sum((-2, -1)) + w.square().sum((-2, -1))
    else:
        quadratic = torch.linalg.solve_triangular(chol, target, upper=False).square().sum((-2, -1))
    log_det = 2 * chol.diagonal(dim1=-2, dim2=-1).log().sum(-1) - 2 * n * root.log()  # log|ΦΦᵀ + τ⁻¹I|
    log_density: Tensor = -0.5 * (quadratic + y.shape[-1] * (log_det + n * math.log(2 * math.pi)))
    return log_density.to(features.dtype)


class FiniteRankNormal(WeightDistribution):
    """D independent columns from N(0, ΦΦᵀ + εI), side by side: an event is (N, D).

    Args:
        features: Φ, (..., N, K).
        columns: Number D of columns.
        jitter: ε as a fraction of the mean of ΦΦᵀ's diagonal, or of ``jitter`` where that is larger (rectifiers that
            are all off).
    """

    has_rsample = True

    def __init__(self, features: Float[Tensor, "... n k"], columns: int, jitter: float = 1e-6) -> None:
        self.features = features
        self.noise = jitter * features.square().sum(-1).mean(-1).clamp(min=jitter)  # ε, one per batch element
        super().__init__(features.shape[:-2], torch.Size((features.shape[-2], columns)), validate_args=False)

    @property
    def mean(self) -> Tensor:
        """Zero at every point."""
        return self.features.new_zeros(self.batch_shape + self.event_shape)

    @property
    def variance(self) -> Tensor:
        """The diagonal of ΦΦᵀ + εI, the same in each column."""
        diagonal = self.features.square().sum(-1) + self.noise.unsqueeze(-1)
        return diagonal.unsqueeze(-1).expand(self.batch_shape + self.event_shape)

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Draw Φ times standard normal weights, and noise of variance ε."""
        shape, phi = self._extended_shape(torch.Size(sample_shape)), self.features
        white = torch.randn(shape, dtype=phi.dtype, device=phi.device)
        weights = torch.randn((*shape[:-2], phi.shape[-1], shape[-1]), dtype=phi.dtype, device=phi.device)
        return phi @ weights + self.noise.sqrt()[..., None, None] * white

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density of each event."""
        lead = self._check_value(value)
        found = _log_marginal(value, self.features, self.noise.reciprocal())  # ε is the noise of observations
        return found.expand(broadcast_shape(lead, self.batch_shape))
