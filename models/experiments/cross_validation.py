"""Choose settings by cross-validation inside the training data: all splits, folds and settings train as one fleet.

For every split and every setting, one replica is trained on each fold and one on the whole training set, all together.
The folds choose the setting and the noise of the split; the replica of the whole training set is then evaluated on the
test set, once. With several members, each of these replicas is an ensemble: the equal mixture of its members.

Settings are also mixed by stacking (Yao et al. 2018): the weights of several predictive distributions that make the
held-out targets most probable, max_w Σ_n log Σ_c w_c p_c(y_n). It is a concave problem, which EM solves without a step
size.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from pyro_dropout.generative.likelihoods import Gaussian
from pyro_dropout.generative.process_state import forked
from pyro_dropout.prediction.predict_fleet import predict_fleet
from pyro_dropout.training.fleet.fleet import Fleet

_LEVEL = 0.95  # of the interval whose coverage is measured
_SAMPLES = 2**27  # outputs held in memory at once


@forked()
def choose(
    build: Callable[..., object],
    grid: Mapping[str, Sequence[object]],
    x: Tensor,
    y: Tensor,
    train_rows: Sequence[Tensor],
    test_rows: Sequence[Tensor],
    *,
    folds: int = 5,
    best: int = 5,
    members: int = 1,
    fold_members: int | None = None,
    anchored: bool = False,
    samples: int = 10_000,
    validation_samples: int = 100,
    seed: int = 0,
    progress: bool = True,
    **options: Any,
) -> SimpleNamespace:
    """Train every setting on every fold of every split, choose by the folds, and score the choice on the test sets.

    ``build(x, y, **setting)`` returns a replica, (model, guide), for the rows that it will train on; all combinations
    of ``grid`` are tried, and its "lr" goes to the training. At most ``best`` settings are mixed. A replica of a whole
    training set is an ensemble of ``members`` networks, each with its own noise in the targets if they are
    ``anchored``; that of a fold has ``fold_members``. ``samples`` draws for the test sets are divided among members.
    ``options`` are those of ``Fleet.fit``.
    """
    fold_members = members if fold_members is None else fold_members
    combinations = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    splits, count = len(train_rows), len(combinations)
    device = options.get("device") or x.device
    inputs, targets = x.to("cpu"), y.cpu()  # thousands of small networks are built on the CPU
    x, y = x.to(device), y.to(device)
    parts = [folds_of(rows, folds, seed + s) for s, rows in enumerate(train_rows)]
    # Every fold's rows are repeated up to the length of the whole set, so that N and the weight decay stay the same.
    length = min(len(rows) for rows in train_rows)
    each_split = [
        [*(train for train, _ in part for _ in range(fold_members)), *[whole] * members]
        for part, whole in zip(parts, train_rows, strict=True)
    ]
    each = folds * fold_members + members  # replicas of a split and setting
    rows = torch.stack([repeated(own, length) for folded in each_split for own in folded * count]).to(device)
    torch.manual_seed(seed)
    values = {name: [setting[name] for setting in combinations for _ in range(each)] * splits for name in grid}
    if "lr" in values:
        options = options | {"lr": torch.tensor(values.pop("lr"))}

    def built(row: Tensor, **setting: object) -> object:
        return build(inputs[row.unique()], targets[row.unique()], **setting)

    fleet = Fleet(built, {"row": list(rows.cpu()), **values}, progress=progress)
    known = x, y, rows
    if anchored:  # every replica has targets of its own
        spread = torch.stack([targets[row.unique()].std() for row in rows.cpu()]) / torch.tensor(values["tau"]).sqrt()
        noise = torch.stack([torch.randn(len(y), 1)[row] for row in rows.cpu()]) * spread[:, None, None]
        places = torch.arange(rows.numel(), device=device).view_as(rows)
        known = x[rows].flatten(0, 1), (y[rows] + noise.to(y)).flatten(0, 1), places
    history = fleet.fit(*known[:2], indices=known[2], progress=progress, seed=seed, **options)
    place = torch.arange(len(fleet)).view(splits, count, each)

    kept = min(len(held) for part in parts for _, held in part)
    held = torch.stack([torch.stack([held[:kept] for _, held in part]) for part in parts]).to(device)  # (S, F, kept)
    lost = history.diverged.view(splits, count, each).any(-1)
    exam = _Exam(fleet, x, y, seed)

    # The folds: one noise for each split and setting, the best setting, and the best mixture
    spread = torch.stack([targets[rows].var() for rows in train_rows])
    asked = place[..., :-members].unflatten(-1, (folds, fold_members)).flatten(1, 2)  # (S, C·F, members)
    where = held.unsqueeze(1).expand(-1, count, -1, -1).flatten(1, 2)
    tried = noises(exam.homoscedastic, spread)  # (S, G)
    scores = exam.scores(asked, where, tried, validation_samples).view(splits, count, folds, -1).mean(2)
    precision, validation = best_noise(tried, scores)  # (S, C), log
    validation = torch.where(lost | ~validation.isfinite(), -math.inf, validation)
    noise = precision.repeat_interleave(folds, 1)
    points = exam.log_prob(asked, where, noise, validation_samples).view(splits, count, folds * kept)
    weights = stacked(torch.where(validation.isfinite().unsqueeze(-1), points, -math.inf), best)

    # The test sets, once
    whole, first = place[..., -members:], validation.argmax(1, keepdim=True)
    alone = torch.zeros_like(weights).scatter(1, first, 1.0)
    new = [~_twins(inputs, *pair) for pair in zip(train_rows, test_rows, strict=True)]
    sets = list(zip(test_rows, new, strict=True))
    found: dict[str, Any] = {}  # on the test sets of each split, in nats per point, or in the units of y
    for title, weighed in (("", alone), ("mixture_", weights)):
        scores_of = exam.test(whole, precision, weighed, sets, samples)
        names = ("log_likelihood", "rmse", "coverage", "fresh_log_likelihood")  # fresh: rows that are no twins
        found |= {f"{title}{name}": score for name, score in zip(names, scores_of, strict=True)}
    return SimpleNamespace(
        settings=[combinations[int(c)] for c in first],
        tau=precision.gather(1, first).squeeze(1).exp(),  # in the units of y, or the factor of a heteroscedastic one
        validation=validation,  # log-likelihood in the folds of every split and setting, each at its best noise, (S, C)
        weights=weights,  # of the settings in the mixture that predicts the folds best, (S, C)
        **found,
        twins=torch.stack([1 - own.double().mean() for own in new]),  # share of the test rows that have a twin, (S,)
        seconds=history.seconds,
        compile_seconds=history.compile_seconds,
        replicas=len(fleet),
        lost=int(history.diverged.sum()),
    )


def folds_of(rows: Tensor, folds: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Return (training rows, held-back rows) of each fold, in random order."""
    order = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed), device="cpu")]
    held = order.tensor_split(folds)
    return [(torch.cat([*held[:k], *held[k + 1 :]]), held[k]) for k in range(folds)]


def _twins(x: Tensor, train: Tensor, test: Tensor) -> Tensor:
    """Return which test rows have the same inputs as a training row."""
    kind = x[torch.cat([train, test])].unique(dim=0, return_inverse=True)[1]
    return torch.isin(kind[len(train) :], kind[: len(train)])


def repeated(rows: Tensor, length: int) -> Tensor:
    """Return rows over and over, up to a length."""
    return rows.repeat(-(-length // len(rows)))[:length]


class _Exam:
    """Log densities of held-out targets under ensembles of a fleet's replicas, each at its own rows and noise."""

    def __init__(self, fleet: Fleet, x: Tensor, y: Tensor, seed: int) -> None:
        self.fleet, self.x, self.y, self.seed = fleet, x, y, seed
        self.homoscedastic = isinstance(fleet[0][0].likelihood, Gaussian)

    def scores(self, asked: Tensor, where: Tensor, tried: Tensor, samples: int) -> Tensor:
        """Return the mean log density of each ensemble's rows at each noise, (S, E, G), for asked (S, E, members)."""
        found = []
        grid = tried.repeat_interleave(asked.shape[1], 0)  # (S·E, G)
        for part, mean, log_tau, y in self._draws(asked.flatten(0, 1), where.flatten(0, 1), samples):
            square = (y - mean).square()
            columns = grid[part].to(mean.device).T.unsqueeze(-1)  # (G, e, 1)
            found.append(torch.stack([log_mixture(log_tau + log_g, square).mean(-1) for log_g in columns], -1).cpu())
        return torch.cat(found).view(*asked.shape[:2], -1)

    def log_prob(self, asked: Tensor, where: Tensor, noise: Tensor, samples: int) -> Tensor:
        """Return the log density of each of each ensemble's rows, (S, E, n), at its noise, (S, E)."""
        found = []
        for part, mean, log_tau, y in self._draws(asked.flatten(0, 1), where.flatten(0, 1), samples):
            own = noise.flatten()[part].to(mean.device).unsqueeze(-1)
            found.append(log_mixture(log_tau + own, (y - mean).square()).cpu())
        return torch.cat(found).view(*asked.shape[:2], -1)

    def test(
        self, replicas: Tensor, noise: Tensor, weights: Tensor, sets: list[tuple[Tensor, Tensor]], samples: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return log-likelihood, RMSE and coverage of each split's mixture, (S,), and the first for its new rows.

        ``replicas`` are (S, C, members); ``sets`` are the test rows of each split, and which of them are new.
        """
        splits = len(sets)
        mixed = int((weights > 0).sum(1).max())  # settings in a mixture
        weights, chosen = weights.topk(mixed, 1)
        longest = max(len(own) for own, _ in sets)
        rows = torch.stack([repeated(own, longest) for own, _ in sets])
        real = torch.stack([torch.arange(longest) < len(own) for own, _ in sets])
        fresh = real & torch.stack([repeated(new, longest) for _, new in sets])
        asked = replicas.take_along_dim(chosen.unsqueeze(-1), 1).flatten(0, 1)
        where = rows.repeat_interleave(mixed, 0).to(self.x.device)
        log_p, middle, below = [], [], []
        for part, mean, log_tau, y in self._draws(asked, where, max(1, samples // mixed)):
            own = noise.gather(1, chosen).flatten()[part].to(mean.device).unsqueeze(-1)
            log_p.append(log_mixture(log_tau + own, (y - mean).square()).cpu())
            middle.append(mean.mean(0).cpu())
            below.append(torch.special.ndtr((0.5 * (log_tau + own)).exp() * (y - mean)).mean(0).cpu())
        share = weights.unsqueeze(-1)
        log_each, mean_each, below_each = (torch.cat(part).view(splits, mixed, -1) for part in (log_p, middle, below))
        joint = torch.logsumexp(log_each + share.log(), 1)
        error = ((mean_each * share).sum(1) - self.y.cpu()[rows, 0]).square()
        # A target lies in the central interval where the distribution function at it does.
        inside = (((below_each * share).sum(1) - 0.5).abs() <= _LEVEL / 2).to(joint)
        counted = ((joint, real), (error, real), (inside, real), (joint, fresh))
        log_likelihood, mse, covered, of_fresh = (torch.where(of, value, 0).sum(1) / of.sum(1) for value, of in counted)
        return log_likelihood, mse.sqrt(), covered, of_fresh

    def _draws(self, asked: Tensor, where: Tensor, samples: int) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """Yield some ensembles at a time: their slice, means and log precisions (T, e, n), and the targets (e, n).

        The draws of all members of an ensemble, (E, members), are its draws.
        """
        members = asked.shape[1]
        samples = max(1, samples // members)
        together = max(1, _SAMPLES // (samples * members * where.shape[1]))
        for start in range(0, len(asked), together):
            part = slice(start, min(start + together, len(asked)))
            some, rows = self.fleet.select(asked[part].flatten().tolist()), where[part].repeat_interleave(members, 0)
            f = predict_fleet(some, self.x, indices=rows, samples=samples, seed=self.seed, keep_samples=True).samples
            f = f.unflatten(1, (-1, members)).movedim(2, 1).flatten(0, 1)  # (T, e·m, n, D) to (T·m, e, n, D)
            if self.homoscedastic:
                f, log_tau = f[..., 0], f.new_zeros(())
            else:
                f, log_tau = (half.squeeze(-1) for half in some[0][0].likelihood.split(f))
            yield part, f, log_tau, self.y[where[part]].squeeze(-1)


_STEPS = 300  # of EM; the weights that matter converge much earlier
_LEAST = 0.02  # a member with less weight is dropped


def noises(homoscedastic: bool, spread: Tensor) -> Tensor:
    """Return the log precisions to try, (S, G): from twice the spread of y, (S,), to a thousandth of it.

    For heteroscedastic noise they are log factors, around zero.
    """
    if homoscedastic:
        return torch.linspace(-1.0, 14.0, 181) - spread.log().unsqueeze(-1)
    return torch.linspace(-4.0, 4.0, 97).expand(len(spread), -1)


def best_noise(tried: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return where scores (S, C, G) over the log precisions (S, G) are highest, and the maxima, each (S, C).

    The maximum is interpolated between grid points by a parabola through the best three.
    """
    step = tried[:, 1:2] - tried[:, :1]
    best = scores.nan_to_num(-math.inf).argmax(-1, keepdim=True).clamp(1, scores.shape[-1] - 2)
    left, middle, right = (scores.gather(-1, best + k).squeeze(-1) for k in (-1, 0, 1))
    bend = left - 2 * middle + right
    shift = torch.where(bend < 0, 0.5 * (left - right) / bend, 0.0).clamp(-1, 1)
    at = tried.unsqueeze(1).expand_as(scores).gather(-1, best).squeeze(-1)
    return at + step * shift, middle - 0.25 * (left - right) * shift


def log_mixture(log_tau: Tensor, square: Tensor) -> Tensor:
    """Return log p(y | x) of the equal mixture of T normals, at squared distances (T, ...) from their means."""
    each = 0.5 * (log_tau - math.log(2 * math.pi) - log_tau.exp() * square)
    return torch.logsumexp(each, 0) - math.log(len(square))


def stacked(log_p: Tensor, most: int) -> Tensor:
    """Return the weights, (S, C), of the mixture that makes held-out points most probable; log_p is (S, C, n)."""
    log_p = log_p.double()
    weights = _climb(log_p, torch.ones_like(log_p[..., 0]))
    keep = torch.zeros_like(weights).scatter(1, weights.topk(min(most, weights.shape[1]), 1).indices, 1.0)
    keep = keep * (weights >= torch.minimum(weights.amax(1, keepdim=True), weights.new_tensor(_LEAST)))
    return _climb(log_p, keep).to(torch.get_default_dtype())


def _climb(log_p: Tensor, allowed: Tensor) -> Tensor:
    weights = allowed / allowed.sum(1, keepdim=True)
    for _ in range(_STEPS):
        # E: each member's share of the density of each point. M: the mean of the shares.
        joint = log_p + weights.log().unsqueeze(-1)
        weights = (joint - torch.logsumexp(joint, 1, keepdim=True)).exp().mean(-1)
    return weights
