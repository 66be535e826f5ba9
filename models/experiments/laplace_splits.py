"""Laplace approximations of many small networks that were trained as one fleet, chosen by folds or by the evidence.

    Σ = (JᵀJ + 2Nλ I)⁻¹ / τ,    f(x) has the variance s(x)/τ,    log p(D) is largest at τ = N / (Σ(y - f)² + 2Nλ‖w‖²)

A weight decay λ determines the point, so everything else is in closed form in τ: the folds' best τ as well. At a point
that was found in another way, such as the mean of a guide that drops, Σ may have another λ than the training.
"""

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap
from tqdm import tqdm

import pyro_dropout as pdrop
from experiments.collection import UCI
from experiments.cross_validation import folds_of, repeated
from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.mathematics.shapes import Float

_NUMBERS = 2**25  # of Jacobians and inputs held at once


class Answers(NamedTuple):
    """What the Laplace approximations of a fleet say; the first dimension is that of its replicas."""

    mean: Float[Tensor, "R n"]  # of f at the rows that were asked, in the units of y
    extra: Float[Tensor, "R K n"]  # s, the variance of f in units of the noise, for each λ
    tau: Float[Tensor, "R K"]  # at which the evidence of each replica is largest, in the units of y
    log_evidence: Float[Tensor, "R K"]  # log p(D) at that τ
    seconds: float  # of training, compiling, curvature and predictions


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
    """Train a fleet, and make the Laplace approximation of each mean, as ``pdrop.laplace`` does one by one.

    Replicas train on ``rows``, all of one length, and predict at those ``asked``, (R, n); models are ``Standardised``,
    with Gaussian noise of precision 1. ``multiples`` are those of the λ of the training that Σ may have.
    """
    start = time.perf_counter()
    own = dict(settings)
    if "lr" in own:
        how = how | {"lr": torch.tensor(own.pop("lr"))}
    inputs, targets = x.cpu(), y.cpu()

    def built(row: Tensor, **setting: Any) -> tuple[Any, Any]:
        return build(inputs[row.unique()], targets[row.unique()], **setting)

    fleet = pdrop.Fleet(built, {"row": list(rows), **own}, progress=False)
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
    """Return the τ that makes errors most probable under N(0, (1 + s)/τ)."""
    return 1 / (error.square() / (1 + extra)).mean(-1)


def log_density(
    error: Float[Tensor, "*batch n"], extra: Float[Tensor, "*batch n"], tau: Float[Tensor, "*batch"]
) -> Float[Tensor, "*batch n"]:
    """Return log N(error; 0, (1 + s)/τ)."""
    variance = (1 + extra) / tau.unsqueeze(-1)
    return -0.5 * (error.square() / variance + variance.log() + math.log(2 * math.pi))


Scored = dict[str, Any]


def choices(
    build: Callable[..., tuple[Any, Any]],
    grid: Mapping[str, Sequence[float]],
    multiples: Sequence[float],
    data: UCI,
    rows: tuple[list[Tensor], list[Tensor]],
    folds: int,
    device: torch.device,
    **how: Any,
) -> dict[str, Scored]:
    """Return the test scores of what the folds choose, and of what the evidence chooses, split by split."""
    train, test = rows
    splits, length, seed = len(train), min(map(len, train)), how["seed"]
    x, y = data.x.to(device), data.y.to(device)
    settings = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    combined = [setting | {"multiple": multiple} for setting in settings for multiple in multiples]

    def fleet(rows: list[Tensor], asked: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
        """Train all settings on each of some sets of rows; return errors and answers by these and by setting."""
        each = {name: [setting[name] for setting in settings] * len(rows) for name in grid}
        own = [row for row in rows for _ in settings]
        where = asked.repeat_interleave(len(settings), 0)
        found = laplace_fleet(build, each, x, y, own, where, multiples, **how)
        mean = found.mean.unsqueeze(1).expand_as(found.extra)
        parts = (part.unflatten(0, (len(rows), -1)).flatten(1, 2) for part in (mean, found.extra))
        means, extra = parts
        tau, evidence = (part.unflatten(0, (len(rows), -1)).flatten(1) for part in (found.tau, found.log_evidence))
        return data.y[asked, 0].double().unsqueeze(1) - means, extra, tau, evidence, found.seconds

    # All training data: what the evidence chooses from, and what is scored in the end.
    longest = max(map(len, test))
    asked = torch.stack([repeated(row, longest) for row in test])
    real = torch.stack([torch.arange(longest) < len(row) for row in test]).double().unsqueeze(1)
    off, extra, tau, evidence, whole_seconds = fleet([repeated(row, length) for row in train], asked)

    # The folds: rows are repeated up to the length of the whole set, so that N and the weight decay stay the same.
    parts = [folds_of(row, folds, seed + s) for s, row in enumerate(train)]
    kept = min(len(held) for part in parts for _, held in part)
    held = torch.stack([held[:kept] for part in parts for _, held in part])
    folded = [repeated(own, length) for part in parts for own, _ in part]
    held_off, held_extra, _, _, fold_seconds = fleet(folded, held)
    held_off, held_extra = (
        part.unflatten(0, (splits, folds)).transpose(1, 2).flatten(2) for part in (held_off, held_extra)
    )
    fold_tau = best_tau(held_off, held_extra)
    validation = log_density(held_off, held_extra, fold_tau).mean(-1)

    def scores(choice: Tensor, tau: Tensor, seconds: float) -> Scored:
        chosen = choice.unsqueeze(1)
        own, wide = (each.take_along_dim(chosen.unsqueeze(-1), 1) for each in (off, extra))
        log_p = log_density(own, wide, tau.gather(1, chosen))
        count = real.sum((1, 2))
        rmse = ((own.square() * real).sum((1, 2)) / count).sqrt()
        return {
            "log_likelihood": ((log_p * real).sum((1, 2)) / count).tolist(),
            "rmse": rmse.tolist(),
            "settings": [combined[k] for k in choice.tolist()],
            "tau": tau.gather(1, chosen).squeeze(1).tolist(),
            "seconds": seconds,
        }

    return {
        "folds": scores(validation.argmax(1), fold_tau, whole_seconds + fold_seconds),
        "evidence": scores(evidence.argmax(1), tau, whole_seconds),
    }
