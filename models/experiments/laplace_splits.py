"""Laplace approximations of many small networks that were trained as one fleet, and what they say of other rows.

    Σ = (JᵀJ + 2Nλ I)⁻¹ / τ,    f(x) has the variance s(x)/τ,    log p(D) is largest at τ = N / (Σ(y - f)² + 2Nλ‖w‖²)

A weight decay λ determines the point, so everything else is in closed form in τ: the folds' best τ as well. At a point
that was found in another way, such as the mean of a guide that drops, Σ may have another λ than the training.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap
from tqdm import tqdm

import pyro_dropout as pd
from pyro_dropout.mathematics.errors import PyroDropoutError
from pyro_dropout.mathematics.shapes import Float

_NUMBERS = 2**25  # of Jacobians and inputs held at once


@dataclass(frozen=True)
class Answers:
    """What the Laplace approximations of a fleet say; the first dimension is that of its replicas.

    Attributes:
        mean: of f at the rows that were asked, in the units of y, (R, n).
        extra: s, the variance of f in units of the noise, for each λ, (R, K, n).
        tau: at which the evidence of each replica is largest, in the units of y, (R, K).
        log_evidence: log p(D) at that τ, (R, K).
        seconds: of training, compiling, curvature and predictions.
    """

    mean: Float[Tensor, "R n"]
    extra: Float[Tensor, "R K n"]
    tau: Float[Tensor, "R K"]
    log_evidence: Float[Tensor, "R K"]
    seconds: float


def laplace_fleet(
    build: Callable[..., tuple[Any, Any]],
    settings: dict[str, list[Any]],
    x: Tensor,
    y: Tensor,
    rows: Sequence[Tensor],
    asked: Tensor,
    multiples: Sequence[float] = (1.0,),
    **how: Any,
) -> Answers:
    """Train a fleet, and make the Laplace approximation of each mean, as ``pd.laplace`` does one by one.

    Args:
        build: builds one replica, (model, guide), from its training data and settings; the model is ``Standardised``,
            with Gaussian noise of precision 1.
        settings: of every replica, by name; "lr" is its learning rate.
        x: all inputs.
        y: all targets, (N, 1).
        rows: on which every replica trains, all of the same length.
        asked: at which it predicts, (R, n).
        multiples: of the λ that a replica trains with, K of them: those that Σ has.
        how: of ``Fleet.fit``.

    Example:
        >>> import torch, pyro_dropout as pd
        >>> from experiments.laplace_splits import laplace_fleet
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(-1)
        >>> def build(x, y):
        ...     model = pd.Standardised(pd.BayesianNet(torch.nn.Linear(1, 1)), x, y)
        ...     return model, pd.AutoDropout(model, keep=1.0)
        >>> rows = [torch.arange(0, 40, 2)] * 2
        >>> how = {"steps": 300, "lr": 0.05, "compile": False, "progress": False, "seed": 0}
        >>> found = laplace_fleet(build, {}, x, 2 * x, rows, torch.arange(1, 40, 2).expand(2, -1), **how)
        >>> found.mean.shape, bool((found.mean - 2 * x[1::2, 0]).abs().max() < 0.2)
        (torch.Size([2, 20]), True)
    """
    start = time.perf_counter()
    own = dict(settings)
    if "lr" in own:
        how = how | {"lr": torch.tensor(own.pop("lr"))}
    inputs, targets = x.cpu(), y.cpu()

    def built(row: Tensor, **setting: Any) -> tuple[Any, Any]:
        return build(inputs[row.unique()], targets[row.unique()], **setting)

    fleet = pd.Fleet(built, {"row": list(rows), **own}, progress=False)
    indices = torch.stack(list(rows)).to(x.device)
    fleet.fit(x, y, indices=indices, device=x.device, **how)
    size = sum(value.numel() for value in fleet[0][1].mean().values())
    together = max(1, min(_NUMBERS // (indices.shape[1] * x.shape[1]), 4 * _NUMBERS // size**2))
    found = []
    for first in tqdm(range(0, len(fleet), together), disable=not how.get("progress", True), desc="curvature"):
        some = range(first, min(first + together, len(fleet)))
        found.append(_answers([fleet[k] for k in some], x, y, indices[some], asked[some].to(x.device), multiples))
    mean, extra, tau, evidence = (torch.cat(each).cpu() for each in zip(*found, strict=True))
    return Answers(mean, extra, tau, evidence, time.perf_counter() - start)


def _answers(
    pairs: list[tuple[Any, Any]], x: Tensor, y: Tensor, rows: Tensor, asked: Tensor, multiples: Sequence[float]
) -> tuple[Tensor, ...]:
    """Return means, extra variances, the best τ and the evidence there, of several replicas at once."""
    models = [model.to(x.device) for model, _ in pairs]
    net = models[0].model.net
    means = [guide.mean() for _, guide in pairs]
    weights = {name: torch.stack([each[name] for each in means]).to(x.device) for name in means[0]}
    squares = torch.stack([value.double().flatten(1).square().sum(1) for value in weights.values()]).sum(0)
    precision = torch.stack([_precision(model) for model in models]).to(squares)
    inputs, others = (
        torch.stack([model.standard_x(x[own]) for model, own in zip(models, each, strict=True)])
        for each in (rows, asked)
    )
    targets = torch.stack([model.standard_y(y[own]) for model, own in zip(models, rows, strict=True)]).double()

    def output(own: dict[str, Tensor], point: Tensor) -> tuple[Tensor, Tensor]:
        f = functional_call(net, own, (point.unsqueeze(0),)).squeeze()
        return f, f

    slopes = vmap(vmap(grad(output, has_aux=True), in_dims=(None, 0)))
    per = max(1, _NUMBERS // (len(pairs) * sum(value[0].numel() for value in weights.values())))

    def jacobian(points: Tensor) -> tuple[Tensor, Tensor]:
        by_site, f = slopes(weights, points)
        return torch.cat([each.flatten(2) for each in by_site.values()], -1).double(), f.double()

    gram: Tensor | float = 0.0
    residual = torch.zeros_like(squares)
    for points, wanted in zip(inputs.split(per, 1), targets.split(per, 1), strict=True):
        slope, f = jacobian(points)
        gram = gram + slope.mT @ slope
        residual = residual + (wanted.squeeze(-1) - f).square().sum(1)
    assert isinstance(gram, Tensor)
    size, count = gram.shape[-1], inputs.shape[1]
    answers = [jacobian(points) for points in others.split(per, 1)]
    scale = torch.stack([model.y_std.flatten()[0] for model in models]).double()
    middle = torch.stack([model.y_mean.flatten()[0] for model in models]).double()
    found = []
    for multiple in multiples:
        own = multiple * precision
        root = torch.linalg.cholesky(gram + own[:, None, None] * torch.eye(size).to(gram))
        tau = count / (residual + own * squares)
        log_det = 2 * root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        evidence = 0.5 * (count * (tau.log() - 1 - math.log(2 * math.pi)) + size * own.log() - log_det)
        solved = [torch.linalg.solve_triangular(root, slope.mT, upper=False).square().sum(1) for slope, _ in answers]
        found.append((torch.cat(solved, 1), tau / scale.square(), evidence - count * scale.log()))
    mean = torch.cat([f for _, f in answers], 1) * scale[:, None] + middle[:, None]
    return mean, *(torch.stack(each, 1) for each in zip(*found, strict=True))


def _precision(model: Any) -> Tensor:
    """Return the precision of the prior, which all weights share."""
    found = torch.stack([model.prior_of(name).base_dist.scale.flatten()[0] for name in model.sites]).double().pow(-2)
    if not torch.allclose(found, found[0]):
        raise PyroDropoutError("all weights of a replica must have the same prior here: a weight decay is one number.")
    return found[0]


def best_tau(error: Float[Tensor, "*batch n"], extra: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch"]:
    """Return the τ that makes errors most probable under N(0, (1 + s)/τ).

    Example:
        >>> import torch
        >>> from experiments.laplace_splits import best_tau
        >>> best_tau(torch.tensor([0.5, -0.5]), torch.zeros(2))
        tensor(4.)
    """
    return 1 / (error.square() / (1 + extra)).mean(-1)


def log_density(
    error: Float[Tensor, "*batch n"], extra: Float[Tensor, "*batch n"], tau: Float[Tensor, "*batch"]
) -> Float[Tensor, "*batch n"]:
    """Return log N(error; 0, (1 + s)/τ).

    Example:
        >>> import torch
        >>> from experiments.laplace_splits import log_density
        >>> log_density(torch.zeros(1), torch.zeros(1), torch.tensor(1.0))
        tensor([-0.9189])
    """
    variance = (1 + extra) / tau.unsqueeze(-1)
    return -0.5 * (error.square() / variance + variance.log() + math.log(2 * math.pi))
