"""Choose settings by cross-validation inside the training data: all splits, folds and settings train as one fleet.

For every split and every setting, one replica is trained on each fold and one on the whole training set, all together.
The folds choose the setting and the noise of the split; the replica of the whole training set is then evaluated on the
test set, once.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_dropout.generative.likelihoods import Gaussian
from pyro_dropout.judging.stacking import best_noise, log_mixture, noises, stacked
from pyro_dropout.mathematics.checks import check_count
from pyro_dropout.mathematics.errors import ShapeError
from pyro_dropout.prediction.predict_fleet import predict_fleet
from pyro_dropout.training.fleet.fleet import Fleet

_SAMPLES = 2**27  # outputs held in memory at once


@dataclass(frozen=True)
class Chosen:
    """The choice of the folds for every split, and its scores on the test set.

    Attributes:
        settings: the best setting in the folds, for every split.
        tau: the noise precision in the units of y, or the factor of a heteroscedastic one, for every split.
        validation: log-likelihood in the folds of every split and setting, each at its best noise, (S, C).
        log_likelihood: on the test sets, nats per point, (S,).
        rmse: root mean square error on the test sets, (S,).
        weights: of the settings in the mixture that predicts the folds best, (S, C).
        mixture_log_likelihood: of that mixture, on the test sets, (S,).
        mixture_rmse: its root mean square error, (S,).
        twins: share of the test rows whose inputs also occur in a training row, (S,).
        fresh_log_likelihood: on the other test rows, (S,); NaN if there are none.
        mixture_fresh_log_likelihood: of the mixture, on them, (S,).
        seconds: of training.
        compile_seconds: of compilation, before training.
        replicas: number of replicas trained together.
        lost: number of replicas that diverged.
    """

    settings: list[dict[str, object]]
    tau: Tensor
    validation: Tensor
    log_likelihood: Tensor
    rmse: Tensor
    weights: Tensor
    mixture_log_likelihood: Tensor
    mixture_rmse: Tensor
    twins: Tensor
    fresh_log_likelihood: Tensor
    mixture_fresh_log_likelihood: Tensor
    seconds: float
    compile_seconds: float
    replicas: int
    lost: int


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
    samples: int = 10_000,
    validation_samples: int = 100,
    seed: int = 0,
    progress: bool = True,
    **options: Any,
) -> Chosen:
    """Train every setting on every fold of every split, choose by the folds, and score the choice on the test sets.

    Args:
        build: builds one replica: ``build(x, y, **setting)`` -> (model, guide), with the rows that it will train on.
        grid: the values of each setting; all combinations are tried. "lr" is the replica's learning rate, which is
            passed to the training and not to ``build``.
        x: inputs, (N, Q).
        y: targets, (N, 1).
        train_rows: rows of x for training, one tensor for each split.
        test_rows: rows for testing.
        folds: number of parts of the training rows; each is held back once.
        best: maximum number of settings in the mixture.
        samples: draws for the test sets.
        validation_samples: draws for the folds.
        seed: of all random numbers.
        progress: show progress bars.
        options: for ``Fleet.fit``.

    Example:
        >>> import torch, pyro_dropout as pd
        >>> from pyro_dropout.judging.selection import choose
        >>> x = torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
        >>> y = x.sum(1, keepdim=True)
        >>> def build(x, y, drop):
        ...     net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        ...     model = pd.Standardised(pd.BayesianNet(net), x, y)
        ...     return model, pd.AutoDropout(model, keep=1 - drop)
        >>> halves = torch.arange(60).split(30)
        >>> quick = {"steps": 100, "lr": 0.01, "compile": False, "progress": False}
        >>> found = choose(build, {"drop": [0.01, 0.5]}, x, y, [halves[0]], [halves[1]], folds=2, samples=50, **quick)
        >>> found.settings
        [{'drop': 0.01}]
    """
    check_count("folds", folds, least=2)
    check_count("best", best)
    if y.dim() != 2 or y.shape[1] != 1 or len(x) != len(y):
        raise ShapeError(f"x must be (N, Q) and y (N, 1); got {tuple(x.shape)} and {tuple(y.shape)}.")
    if len(train_rows) != len(test_rows) or not len(train_rows):
        lengths = f"{len(train_rows)} and {len(test_rows)}"
        raise ShapeError(f"train_rows and test_rows need a tensor for each split; got {lengths}.")
    combinations = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    splits, count = len(train_rows), len(combinations)
    device = options.get("device") or x.device
    inputs, targets = x.cpu(), y.cpu()  # thousands of small networks are built on the CPU
    x, y = x.to(device), y.to(device)
    parts = [_folds(rows, folds, seed + s) for s, rows in enumerate(train_rows)]
    # Every fold's rows are repeated up to the length of the whole set, so that N and the weight decay stay the same.
    length = min(len(rows) for rows in train_rows)
    each_split = [[*(train for train, _ in part), whole] for part, whole in zip(parts, train_rows, strict=True)]
    rows = torch.stack([_repeated(own, length) for folded in each_split for own in folded * count]).to(device)
    torch.manual_seed(seed)
    values = {name: [each[name] for each in combinations for _ in range(folds + 1)] * splits for name in grid}
    if "lr" in values:
        options = options | {"lr": torch.tensor(values.pop("lr"))}

    def built(row: Tensor, **setting: object) -> object:
        return build(inputs[row.unique()], targets[row.unique()], **setting)

    fleet = Fleet(built, {"row": list(rows.cpu()), **values}, progress=progress)
    history = fleet.fit(x, y, indices=rows, progress=progress, seed=seed, **options)
    place = torch.arange(len(fleet)).view(splits, count, folds + 1)

    kept = min(len(held) for part in parts for _, held in part)
    held = torch.stack([torch.stack([held[:kept] for _, held in part]) for part in parts]).to(device)  # (S, F, kept)
    lost = history.diverged.view(splits, count, folds + 1).any(-1)
    exam = _Exam(fleet, x, y, seed)

    # The folds: one noise for each split and setting, the best setting, and the best mixture
    spread = torch.stack([targets[rows].var() for rows in train_rows])
    asked, where = place[..., :folds].flatten(1), held.unsqueeze(1).expand(-1, count, -1, -1).flatten(1, 2)
    tried = noises(exam.homoscedastic, spread)  # (S, G)
    scores = exam.scores(asked, where, tried, validation_samples).view(splits, count, folds, -1).mean(2)
    precision, validation = best_noise(tried, scores)  # (S, C), log
    validation = torch.where(lost | ~validation.isfinite(), -math.inf, validation)
    each = precision.repeat_interleave(folds, 1)
    points = exam.log_prob(asked, where, each, validation_samples).view(splits, count, folds * kept)
    weights = stacked(torch.where(validation.isfinite().unsqueeze(-1), points, -math.inf), best)

    # The test sets, once
    whole, first = place[..., folds], validation.argmax(1, keepdim=True)
    alone = torch.zeros_like(weights).scatter(1, first, 1.0)
    new = [~_twins(inputs, *pair) for pair in zip(train_rows, test_rows, strict=True)]
    sets = list(zip(test_rows, new, strict=True))
    log_p, error, fresh = exam.test(whole, precision, alone, sets, samples)
    mixed, mixed_error, mixed_fresh = exam.test(whole, precision, weights, sets, samples)
    return Chosen(
        [combinations[int(c)] for c in first],
        precision.gather(1, first).squeeze(1).exp(),
        validation,
        log_p,
        error,
        weights,
        mixed,
        mixed_error,
        torch.stack([1 - each.double().mean() for each in new]),
        fresh,
        mixed_fresh,
        history.seconds,
        history.compile_seconds,
        len(fleet),
        int(history.diverged.sum()),
    )


def _folds(rows: Tensor, folds: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Return (training rows, held-back rows) of each fold, in random order."""
    order = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))]
    held = order.tensor_split(folds)
    return [(torch.cat([*held[:k], *held[k + 1 :]]), held[k]) for k in range(folds)]


def _twins(x: Tensor, train: Tensor, test: Tensor) -> Tensor:
    """Return which test rows have the same inputs as a training row."""
    kind = x[torch.cat([train, test])].unique(dim=0, return_inverse=True)[1]
    return torch.isin(kind[len(train) :], kind[: len(train)])


def _repeated(rows: Tensor, length: int) -> Tensor:
    return rows.repeat(-(-length // len(rows)))[:length]


class _Exam:
    """Log densities of held-out targets under some replicas of a fleet, each at its own rows and its own noise."""

    def __init__(self, fleet: Fleet, x: Tensor, y: Tensor, seed: int) -> None:
        self.fleet, self.x, self.y, self.seed = fleet, x, y, seed
        self.homoscedastic = isinstance(fleet[0][0].likelihood, Gaussian)

    def scores(self, asked: Tensor, where: Tensor, tried: Tensor, samples: int) -> Tensor:
        """Return the mean log density of each replica's rows at each noise, (S, E, G), for asked (S, E)."""
        found = []
        grid = tried.repeat_interleave(asked.shape[1], 0)  # (S·E, G)
        for part, mean, log_tau, y in self._draws(asked.flatten(), where.flatten(0, 1), samples):
            square = (y - mean).square()
            columns = grid[part].to(mean.device).T.unsqueeze(-1)  # (G, e, 1)
            found.append(torch.stack([log_mixture(log_tau + log_g, square).mean(-1) for log_g in columns], -1).cpu())
        return torch.cat(found).view(*asked.shape, -1)

    def log_prob(self, asked: Tensor, where: Tensor, noise: Tensor, samples: int) -> Tensor:
        """Return the log density of each of each replica's rows, (S, E, n), at its noise, (S, E)."""
        found = []
        for part, mean, log_tau, y in self._draws(asked.flatten(), where.flatten(0, 1), samples):
            own = noise.flatten()[part].to(mean.device).unsqueeze(-1)
            found.append(log_mixture(log_tau + own, (y - mean).square()).cpu())
        return torch.cat(found).view(*asked.shape, -1)

    def test(
        self, replicas: Tensor, noise: Tensor, weights: Tensor, sets: list[tuple[Tensor, Tensor]], samples: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return log-likelihood and RMSE of each split's mixture, (S,), and the log-likelihood of its new rows.

        ``sets`` are the test rows of each split, and which of them are new.
        """
        splits = len(sets)
        members = int((weights > 0).sum(1).max())
        weights, chosen = weights.topk(members, 1)
        longest = max(len(own) for own, _ in sets)
        rows = torch.stack([_repeated(own, longest) for own, _ in sets])
        real = torch.stack([torch.arange(longest) < len(own) for own, _ in sets])
        fresh = real & torch.stack([_repeated(new, longest) for _, new in sets])
        asked, where = replicas.gather(1, chosen).flatten(), rows.repeat_interleave(members, 0).to(self.x.device)
        log_p, middle = [], []
        for part, mean, log_tau, y in self._draws(asked, where, max(1, samples // members)):
            own = noise.gather(1, chosen).flatten()[part].to(mean.device).unsqueeze(-1)
            log_p.append(log_mixture(log_tau + own, (y - mean).square()).cpu())
            middle.append(mean.mean(0).cpu())
        share = weights.unsqueeze(-1)
        joint = torch.logsumexp(torch.cat(log_p).view(splits, members, -1) + share.log(), 1)
        error = ((torch.cat(middle).view(splits, members, -1) * share).sum(1) - self.y.cpu()[rows, 0]).square()
        counted = ((joint, real), (error, real), (joint, fresh))
        log_likelihood, mse, of_fresh = (torch.where(of, value, 0).sum(1) / of.sum(1) for value, of in counted)
        return log_likelihood, mse.sqrt(), of_fresh

    def _draws(self, asked: Tensor, where: Tensor, samples: int) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """Yield some replicas at a time: their slice, means and log precisions (T, e, n), and the targets (e, n)."""
        together = max(1, _SAMPLES // (samples * where.shape[1]))
        for start in range(0, len(asked), together):
            part = slice(start, min(start + together, len(asked)))
            some, rows = self.fleet.select(asked[part].tolist()), where[part]
            f = predict_fleet(some, self.x, indices=rows, samples=samples, seed=self.seed, keep_samples=True).samples
            if self.homoscedastic:
                f, log_tau = f[..., 0], f.new_zeros(())
            else:
                f, log_tau = (half.squeeze(-1) for half in some[0][0].likelihood.split(f))
            yield part, f, log_tau, self.y[rows].squeeze(-1)
