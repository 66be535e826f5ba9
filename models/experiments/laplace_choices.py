"""Settings of Laplace approximations, chosen by folds or by the evidence, and scored on test rows, split by split."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from experiments.collection import UCI
from experiments.laplace_splits import best_tau, laplace_fleet, log_density
from pyro_dropout.judging.selection import folds_of, repeated

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
    """Return the test scores of what the folds choose, and of what the evidence chooses, split by split.

    Args:
        build: builds one replica, as in ``laplace_fleet``.
        grid: values of each setting, by name; "lr" is the learning rate.
        multiples: of a replica's weight decay, those that its covariance may have; also chosen.
        data: the set.
        rows: training rows and test rows of every split.
        folds: how many.
        device: where to train.
        how: of ``Fleet.fit``.
    """
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
