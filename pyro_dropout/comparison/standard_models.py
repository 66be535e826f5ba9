"""The models and guides that the command line compares: reasonable defaults for unknown data."""

import math
from collections.abc import Callable

import torch
from pyro.contrib.gp.kernels import Kernel
from torch import Tensor, nn
from torch.nn import functional

from pyro_dropout.generative.exact_gp import GP
from pyro_dropout.generative.likelihoods import Gaussian
from pyro_dropout.generative.networks import BayesianNet
from pyro_dropout.generative.priors import Prior
from pyro_dropout.generative.standardised import Standardised
from pyro_dropout.protocols import Model, PyroModel
from pyro_dropout.references.exact import gp_posterior
from pyro_dropout.registry import resolve_guide

Data = tuple[Tensor, Tensor]

_SLOW, _FAST = 2.0, 40.0  # standard deviations of a wave's frequency, in radians per standard deviation of the input


class Waves(nn.Linear):
    """Random waves √2 sin(s ωx + φ), half of them slow and half fast.

    With ω ~ N(0, 1) and weights N(0, 1/K) after them, the variance of f is about 1. As K grows, f becomes a Gaussian
    process with two length-scales: a trend and a cycle.
    """

    scales: Tensor

    def __init__(self, inputs: int, waves: int) -> None:
        super().__init__(inputs, waves)
        self.register_buffer("scales", torch.where(torch.arange(waves) < waves // 2, _SLOW, _FAST))

    def reset_parameters(self) -> None:
        """Draw frequencies from their prior, and phases uniformly from the circle."""
        nn.init.normal_(self.weight)
        nn.init.uniform_(self.bias, -math.pi, math.pi)

    def forward(self, x: Tensor) -> Tensor:
        """Return the waves at x."""
        return math.sqrt(2) * torch.sin(self.scales * functional.linear(x, self.weight) + self.bias)


def wave_model(train: Data, width: int = 100, tau: float = 20.0) -> Standardised:
    """Return a network of waves for a series with a trend and a cycle, in the units of its data."""
    x, y = train
    net = nn.Sequential(Waves(x.shape[1], width), nn.Linear(width, y.shape[1]))
    return Standardised(BayesianNet(net, Prior(), Gaussian(tau)), x, y)


class WaveKernel(Kernel):
    """Covariance of ``wave_model`` under its prior, whatever its width; with many waves it is a Gaussian process.

    With ω and φ ~ N(0, 1), E[2 sin(sωx + φ) sin(sωz + φ)] = exp(-s²|x - z|²/2) - exp(-s²|x + z|²/2 - 2). Half of the
    waves are slow and half fast, and the bias after them adds 1.
    """

    def __init__(self, input_dim: int) -> None:
        super().__init__(input_dim)  # type: ignore[no-untyped-call]

    def forward(self, X: Tensor, Z: Tensor | None = None, diag: bool = False) -> Tensor:
        """Return the covariances of the rows of X and Z, (N, M), or the variances of those of X, (N,)."""
        x, z = X.unsqueeze(1), (X if Z is None else Z).unsqueeze(0)
        if diag:
            x, z = X, X
        apart, sums = (part.square().sum(-1) for part in (x - z, x + z))
        waves = [torch.exp(-(s**2) * apart / 2) - torch.exp(-(s**2) * sums / 2 - 2) for s in (_SLOW, _FAST)]
        return 1 + (waves[0] + waves[1]) / 2


class WaveProcess:
    """The exact posterior of the Gaussian process that ``wave_model`` becomes with many waves; ``predict`` takes it.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> x = torch.linspace(1960, 1980, 30).unsqueeze(-1)
        >>> model = wave_model((x, 3 * x))
        >>> answer = pdrop.predict(model, WaveProcess(model, (x, 3 * x)), x, samples=300, seed=0)
        >>> bool(((answer.mean - 3 * x).abs() < 3).all())
        True
    """

    whole_functions = True  # each draw is one function at all points

    def __init__(self, model: Standardised, train: Data) -> None:
        x, y = train
        gp = GP(WaveKernel(x.shape[1]), model.model.likelihood.tau.item())
        self._model, self._posterior = model, gp_posterior(gp.fit(model.standard_x(x), model.standard_y(y), steps=0))

    def sample_functions(self, x: Tensor, n: int) -> Tensor:
        """Return ``n`` draws of the function at all rows of ``x`` together, (n, M, D), in the units of y."""
        return self._model.raw(self._posterior.sample_functions(self._model.standard_x(x), n))


def kept(model: Model, keep: float = 0.9) -> Callable[[str], float]:
    """Return the probability of keeping a row, by site: a layer's only input is not dropped."""

    def of(name: str) -> float:
        site = model.sites[name]
        inputs = site[-1] if isinstance(site, tuple) else site.fan_in  # a deep Gaussian process knows (out, in) alone
        return 1.0 if inputs == 1 else keep

    return of


def standard_guide(name: str, keep: float = 0.9, **options: int) -> Callable[[Model], PyroModel]:
    """Return what builds the guide of this name for a model of this file; options are those of its registry entry."""
    entry = resolve_guide(name)
    return lambda model: entry.make(model, kept(model, keep), **options)
