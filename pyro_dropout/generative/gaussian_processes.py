"""Gaussian processes whose covariance has finite rank, one layer or many: the models of §3.1 and §4.5.

Two forms give the same prior over functions. In weight space f = Φ W with a normal W, and the model is a
neural network; in function space W has been integrated out, and f is drawn from N(0, ΦΦᵀ) as a whole.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, cast

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor, nn

from pyro_dropout.errors import NotFollowedError, RangeError
from pyro_dropout.generative.layers import one_for_each_point
from pyro_dropout.generative.likelihoods import Gaussian
from pyro_dropout.generative.likelihoods.likelihood import is_likelihood, observe
from pyro_dropout.generative.registration import buffered
from pyro_dropout.mathematics.checks import check_choice, check_count, check_positive, check_shape
from pyro_dropout.mathematics.finite_rank import FiniteRankNormal, Nonlinearity, nonlinearity_of
from pyro_dropout.mathematics.per_data_point import drawn_per_data_point
from pyro_dropout.mathematics.shapes import Float
from pyro_dropout.protocols import Likelihood


class DeepGP(nn.Module):
    """A deep Gaussian process with as many layers as ``widths`` has entries, as a Pyro model.

    Layer i has features Φᵢ = √(1/Kᵢ) σᵢ(Fᵢ₋₁ + bᵢ) and values Fᵢ | Fᵢ₋₁ ~ N(0, ΦᵢΦᵢᵀ) in each column; the first has
    Φ₁ = √(1/K₁) σ₁(x W₁ᵀ + b₁). In weight space Fᵢ = Φᵢ Wᵢ₊₁ᵀ, so that L layers have L + 1 weight matrices: a network.

    Equation: sec4.5-model.

    Calling it as ``model(x, y=None, num_data=None)`` with x (N, Q) returns the latent function f, (N, D), or (P, N, D)
    where the weights come as P draws at once. Its sites are W1, b1, W2, b2, …; in function space W1, b1, F1, b2, F2, …

    Args:
        in_features: Number Q of inputs.
        widths: Numbers K₁, K₂, … of hidden units.
        out_features: Number D of outputs.
        nonlinearity: σ, one of "relu", "tanh", "erf", "cos", or an elementwise callable; or a list, one per layer.
        space: "weight" or "function". Function space draws F at all points of x at once: it cannot be mini-batched, and
            what is learned about F at some points says nothing about others.
        length_scale: l of the prior N(0, l⁻²) of W1, a number or (Q,).
        bias_length_scale: l' of the prior N(0, l'⁻²) of the biases.
        jitter: Variance added to F in function space, as a fraction of its own, so that F has a density at more points
            than there are units. A guide that ignores the correlations in F needs far more than the default.
        likelihood: The distribution of y given f; ``Gaussian(tau=1.0)`` by default.

    Example:
        >>> import pyro, torch, pyro_dropout as pdrop
        >>> model = pdrop.paper.DeepGP(2, [50, 30], 1, nonlinearity="tanh", likelihood=pdrop.Gaussian(tau=4.0))
        >>> trace = pyro.poutine.trace(model).get_trace(torch.zeros(10, 2))
        >>> {name: tuple(trace.nodes[name]["value"].shape) for name in model.sites}
        {'W1': (50, 2), 'b1': (50,), 'W2': (30, 50), 'b2': (30,), 'W3': (1, 30)}
        >>> trace.nodes["_RETURN"]["value"].shape
        torch.Size([10, 1])
    """

    _value_site = "F{}"

    def __init__(
        self,
        in_features: int,
        widths: Sequence[int],
        out_features: int,
        *,
        nonlinearity: Nonlinearity | Sequence[Nonlinearity] = "relu",
        space: Literal["weight", "function"] = "weight",
        length_scale: float | Tensor = 1.0,
        bias_length_scale: float | Tensor = 1.0,
        jitter: float = 1e-6,
        likelihood: Likelihood | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(widths, list | tuple) or not widths:
            raise RangeError(f"widths must be a list of at least one number of units; got {widths!r}.")
        sizes = [("in_features", in_features), ("out_features", out_features), *(("widths", each) for each in widths)]
        for name, size in sizes:
            check_count(name, size)
        check_choice("space", space, ("weight", "function"))
        check_positive("jitter", jitter)
        if likelihood is not None and not is_likelihood(likelihood):
            raise RangeError(f"likelihood must be one of pyro_dropout's; got {type(likelihood).__name__}.")
        given: Any = nonlinearity
        each = list(given) if isinstance(given, list | tuple) else [given] * len(widths)
        if len(each) != len(widths):
            raise RangeError(f"nonlinearity must be one, or a list of {len(widths)}; got a list of {len(each)}.")
        self.in_features, self.widths, self.out_features = in_features, tuple(widths), out_features
        self.space, self.jitter = space, jitter
        self.activations = [nonlinearity_of(one) for one in each]
        self.likelihood: Likelihood = Gaussian(1.0) if likelihood is None else likelihood
        self.sites: dict[str, tuple[int, ...]] = {}
        self.columns = (*widths[1:], out_features)
        self._declare("W1", (widths[0], in_features), "length_scale", length_scale)
        for i, (width, after) in enumerate(zip(widths, self.columns, strict=True), start=1):
            self._declare(f"b{i}", (width,), "bias_length_scale", bias_length_scale)
            if space == "weight":
                self._declare(f"W{i + 1}", (after, width), "scale", 1.0)

    def _declare(self, site: str, shape: tuple[int, ...], name: str, given: float | Tensor) -> None:
        """Add a site and its prior N(0, l⁻²), with l from the argument ``name``: a number, or one for each column."""
        check_positive(name, given)
        length = buffered(given).detach().to(torch.get_default_dtype())
        check_positive(name, length)  # once more: in float32, 1e-50 is 0
        check_shape(length.shape in [(), shape[-1:]], name, f"() or {shape[-1:]} for {site}", length)
        self.register_buffer(f"{site}_std", 1 / length)
        self.sites[site] = shape

    def _draw(self, site: str) -> Tensor:
        """Sample a site from its prior, with the metadata that guides read."""
        std, shape = cast(Tensor, getattr(self, f"{site}_std")), self.sites[site]
        prior = dist.Normal(torch.zeros_like(std), std).expand(shape).to_event(len(shape))
        infer: Any = {"row_dim": 1, "kind": "weight"} if len(shape) == 2 else {"kind": "bias"}
        return pyro.sample(site, prior, infer=infer)

    def forward(
        self, x: Float[Tensor, "n q"], y: Tensor | None = None, num_data: int | None = None
    ) -> Float[Tensor, "*draws n d"]:
        """Draw the latent function at the rows of ``x``, observe ``y`` (or draw it, when None), and return f."""
        check_shape(x.dim() == 2 and x.size(1) == self.in_features, "x", f"(N, {self.in_features})", x)
        ours = cast(Tensor, self.W1_std).dtype
        if x.dtype != ours:
            raise RangeError(f"x must be of the model's type {ours}; got {x.dtype}. Write model.to(x) or x.to({ours}).")
        if self.space == "function" and y is not None and num_data not in (None, len(x)):
            raise RangeError(
                f"num_data must be the number of points in x, {len(x)}, in function space; got {num_data}. "
                "Write space='weight' for mini-batches."
            )
        drawn = {site: self._draw(site) for site in self.sites}
        if self.space == "function" and any(drawn_per_data_point(value) is not None for value in drawn.values()):
            reason = "function space has one for all data points"
            advice = "function space has one W1 for all data points; use shared draws, or space='weight'."
            raise NotFollowedError(advice, "W1", reason)
        own = {site: len(shape) for site, shape in self.sites.items()}
        weights, h, particles = one_for_each_point(drawn, own, x)
        weights = {site: _beside_rows(value, own[site]) for site, value in weights.items()}
        for i, width in enumerate(self.widths, start=1):
            inside = (h @ weights["W1"].mT if i == 1 else h) + weights[f"b{i}"]
            phi = self.activations[i - 1](inside) / math.sqrt(width)  # Φᵢ, (..., N, Kᵢ)
            if self.space == "weight":
                h = phi @ weights[f"W{i + 1}"].mT
                continue
            plated = phi if phi.dim() == 2 else phi.unsqueeze(-3)
            values = FiniteRankNormal(plated, self.columns[i - 1], self.jitter)
            h = _beside_rows(pyro.sample(self._value_site.format(i), values), 2)
        f = h.reshape(*particles, len(x), self.out_features) if particles else h
        observe(self.likelihood, f, y, num_data)
        return f


def _beside_rows(value: Tensor, own: int) -> Tensor:
    """Return a matrix without the place of the data plate, and a bias with one for rows, where draws are in front."""
    if value.dim() == own:
        return value
    if own == 2:
        return value.squeeze(-3)
    return value if value.size(-2) == 1 else value.unsqueeze(-2)


class FiniteRankGP(DeepGP):
    """A Gaussian process with the Monte Carlo covariance of one layer of K units, as a Pyro model.

    f = Φ W₂ᵀ with Φ = √(1/K) σ(x W₁ᵀ + b₁), in weight space, and F | x, W₁, b₁ ~ N(0, ΦΦᵀ) in each column, in function
    space: a `DeepGP` of depth one, whose function values are the site F.

    Equation: sec3.1-model.

    Args:
        in_features: Number Q of inputs.
        width: Number K of hidden units.
        out_features: Number D of outputs.
        options: As in `DeepGP`: nonlinearity, space, length_scale, bias_length_scale, jitter, likelihood.

    Example:
        >>> import pyro, torch, pyro_dropout as pdrop
        >>> classes = pdrop.Categorical()
        >>> model = pdrop.paper.FiniteRankGP(1, width=20, out_features=3, space="function", likelihood=classes)
        >>> trace = pyro.poutine.trace(model).get_trace(torch.zeros(50, 1))
        >>> [(name, tuple(trace.nodes[name]["value"].shape)) for name in ("W1", "b1", "F", "y")]
        [('W1', (20, 1)), ('b1', (20,)), ('F', (50, 3)), ('y', (50,))]
    """

    _value_site = "F"

    def __init__(self, in_features: int, width: int, out_features: int, **options: Any) -> None:
        check_count("width", width)
        super().__init__(in_features, [width], out_features, **options)
