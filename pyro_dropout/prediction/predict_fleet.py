"""Predictions of a fleet: all replicas at once, each at its own rows of one data set; results have E in front."""

import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from pyro import poutine
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_flatten, tree_unflatten
from tqdm.auto import tqdm

from pyro_dropout.generative.random_state import seeded
from pyro_dropout.generative.trial_run import evaluating, quietly
from pyro_dropout.mathematics.checks import check_count, check_finite, check_seed
from pyro_dropout.mathematics.errors import PyroDropoutError, ShapeError
from pyro_dropout.prediction.draws.weight_draws import PerExample
from pyro_dropout.prediction.moments import F64, Running, Sums, block_log_prob, block_sums
from pyro_dropout.prediction.prediction import Prediction
from pyro_dropout.prediction.snapshot import frozen
from pyro_dropout.training.compile.functional import Buffers, Parameters, unvalidated
from pyro_dropout.training.compile.program import Program, traced
from pyro_dropout.training.fleet.fleet import Fleet

_CPU_ROWS, _CUDA_ROWS = 2**15, 2**20  # in one forward pass of all replicas


class FleetPrediction(Prediction):
    """The predictions of every replica of a fleet: like ``Prediction``, with E in front of each result.

    Example:
        >>> import torch, pyro_dropout as pd
        >>> def build(seed):
        ...     torch.manual_seed(seed)
        ...     model = pd.BayesianNet(torch.nn.Linear(2, 1), likelihood=pd.Gaussian(tau=4.0))
        ...     return model, pd.AutoDropout(model)
        >>> fleet = pd.Fleet(build, {"seed": [0, 1, 2]})
        >>> answer = pd.predict_fleet(fleet, torch.ones(5, 2), torch.zeros(5, 1), samples=50, seed=0)
        >>> answer.mean.shape, answer.log_prob().shape, answer.scores()["log_likelihood"].shape
        (torch.Size([3, 5, 1]), torch.Size([3, 5]), torch.Size([3]))
    """

    likelihoods: tuple[Any, ...] = ()
    targets: Tensor | None = None
    given: Tensor | None = None
    log_sums: Tensor | None = None

    def __repr__(self) -> str:
        replicas, points = self._sums["mean"].shape[:2]
        return f"FleetPrediction({replicas} replicas, {points} points, {self._count} draws, {self.family})"

    @property
    def samples(self) -> Tensor:
        """The outputs of every draw, (T, E, n, D), if ``predict_fleet`` was called with ``keep_samples=True``."""
        if self._samples is None:
            raise PyroDropoutError("samples were not kept; call predict_fleet(..., keep_samples=True).")
        return self._samples

    def _blocks(self) -> Iterator[tuple[Any, Any, Tensor]]:
        """Yield each replica with its own likelihood, whose noise may differ from the others', and its samples."""
        samples = self.samples
        return ((e, likelihood, samples[:, e]) for e, likelihood in enumerate(self.likelihoods))

    def log_prob(self, y: Tensor | None = None) -> Tensor:
        """Return log p(y | x) of each replica and point, (E, N), for the targets that ``predict_fleet`` was given."""
        if self.log_sums is None or (y is not None and y is not self.given):
            raise PyroDropoutError(
                "a fleet sums log-likelihoods up as it predicts: give y to predict_fleet(fleet, x, y)."
            )
        return (self.log_sums - math.log(self._count)).to(self._like)

    def scores(self) -> dict[str, Tensor]:
        """Return scores of every replica, (E,): "log_likelihood" per point, and "rmse", or "accuracy" for classes."""
        log_likelihood = self.log_prob().mean(1)
        assert self.targets is not None
        if self.one_of_several:
            right = self.mean.argmax(-1) == self.targets
            return {"log_likelihood": log_likelihood, "accuracy": right.to(self._like.dtype).mean(1)}
        error = self.mean - self.targets.reshape(self.mean.shape)
        return {"log_likelihood": log_likelihood, "rmse": error.square().mean((1, 2)).sqrt()}


def predict_fleet(
    fleet: Fleet,
    x: Tensor,
    y: Tensor | None = None,
    *,
    indices: Tensor | None = None,
    samples: int = 1000,
    seed: int | None = None,
    keep_samples: bool = False,
    compile: bool = False,
    chunk: int | None = None,
    progress: bool = False,
) -> FleetPrediction:
    """Predict with all replicas of a fleet in one computation, with separate weights for each draw, replica and point.

    Args:
        fleet: the fleet.
        x: data points, (N, ...).
        y: their targets, if log-likelihoods and scores are needed.
        indices: (E, n), the rows of x that each replica predicts; all of them by default.
        samples: the number T of draws.
        seed: makes the draws reproducible, and leaves torch's random state as it was.
        keep_samples: whether to keep the outputs of every draw as ``samples``, (T, E, n, D).
        compile: whether to compile the forward pass.
        chunk: rows, draws times replicas times points, in one forward pass; halved whenever memory runs out.
        progress: whether to show a bar.

    Example:
        >>> import torch, pyro_dropout as pd
        >>> def build(keep):
        ...     model = pd.BayesianNet(torch.nn.Linear(2, 1), likelihood=pd.Gaussian(tau=4.0))
        ...     return model, pd.AutoDropout(model, keep=keep)
        >>> fleet = pd.Fleet(build, {"keep": [0.5, 0.99]})
        >>> answer = pd.predict_fleet(fleet, torch.ones(5, 2), samples=200, seed=0)
        >>> bool((answer.epistemic[0] > answer.epistemic[1]).all())  # more dropout, more uncertainty
        True
    """
    check_count("samples", samples)
    if chunk is not None:
        check_count("chunk", chunk)
    check_finite("x", x)
    check_seed(seed)
    if not isinstance(fleet, Fleet):
        raise PyroDropoutError(
            f"fleet must be a pyro_dropout.Fleet; got {type(fleet).__name__}. For one model and guide use predict."
        )
    place = fleet.place()
    x = x.to(place)
    rows = fleet.rows(x, indices)
    given = y
    if y is not None:
        y = y.to(place)
        if len(y) != len(x):
            raise ShapeError(f"y must have one target for each of {len(x)} points; got {len(y)}.")
    device = x.device
    with seeded(seed, device), evaluating(*(part for pair in fleet for part in pair)):
        task = _Task(fleet, x, y, rows, compile, keep_samples)
        kept = x.new_empty((samples, *rows.shape, task.like.shape[-1]), dtype=task.like.dtype) if keep_samples else None
        budget = chunk or (_CUDA_ROWS if x.is_cuda else _CPU_ROWS)
        together = max(1, min(len(fleet), budget // rows.shape[1]))
        draws = max(1, min(samples, budget // (together * rows.shape[1])))
        running, log_sums = Running(len(fleet)), torch.full(rows.shape, -math.inf, dtype=F64, device=device)
        todo = deque((e, t) for e in _cuts(0, len(fleet), together) for t in _cuts(0, samples, draws))
        with tqdm(total=samples * rows.numel(), disable=not progress, unit="row", unit_scale=True) as bar:
            while todo:
                replicas, block = todo.popleft()
                count = block.stop - block.start
                try:
                    sums, log_sum, f = task.run(replicas, count)
                except torch.OutOfMemoryError:
                    if count == 1 and replicas.stop - replicas.start == 1:
                        raise
                    todo.extendleft(reversed(_halved(replicas, block)))
                    continue
                running.add(block.start, count, replicas, sums)
                if kept is not None:
                    kept[block, replicas] = f.movedim(0, 1)
                if y is not None:
                    log_sums[replicas] = torch.logaddexp(log_sums[replicas], log_sum)
                bar.update(count * rows.shape[1] * (replicas.stop - replicas.start))
    like = task.like
    found = FleetPrediction(frozen(fleet[0][0].likelihood), running.sums, samples, like, kept, None)
    found.likelihoods = tuple(frozen(model.likelihood) for model, _ in fleet) if keep_samples else ()
    if y is not None:
        found.targets, found.log_sums, found.given = y[rows], log_sums, given
    return found


class _Task:
    """The forward pass of some replicas, as one replica's graph mapped over them."""

    def __init__(self, fleet: Fleet, x: Tensor, y: Tensor | None, rows: Tensor, compile: bool, keep: bool) -> None:
        self.x, self.y, self.rows, self.compile, self.keep = x, y, rows, compile, keep
        self.model, self.guide = fleet[0]
        self.weights = PerExample(self.model, self.guide)
        with quietly(self.model, self.guide):
            self.like = self.weights.outputs({}, x[:1], 1)
        self.parameters = Parameters(self.model, self.guide, self, (x[:1],), {})
        self.values, self.buffers = fleet.values(self.parameters), fleet.buffers()
        self._maps: dict[int, Callable[..., Any]] = {}
        self._programs: dict[tuple[int, int], Program] = {}

    def differentiable_loss(self, model: Any, guide: Any, x: Tensor) -> Tensor:
        """Run one draw, so that callers can see which parameters it uses."""
        return self.weights.outputs({}, x, 1)

    def run(self, replicas: slice, count: int) -> tuple[Sums, Tensor, Tensor]:
        """Return the sums of ``count`` draws of some replicas, those of their log-likelihoods, and the kept outputs."""
        values, buffers = [v[replicas] for v in self.values], [b[replicas] for b in self.buffers]
        inputs = (values, buffers, self.rows[replicas])
        if count not in self._maps:
            self._maps[count] = self._mapped(count)
        function: Callable[..., Any] = self._maps[count]
        if self.compile:
            key = (replicas.stop - replicas.start, count)
            if key not in self._programs:
                with quietly():
                    self._programs[key] = Program(function, *inputs)
            function = self._programs[key]
        found: tuple[Sums, Tensor, Tensor] = function(*inputs)
        return found

    def _mapped(self, count: int) -> Callable[..., Any]:
        settings = Buffers(self.model, self.guide)

        def solo(values: list[Tensor], buffers: list[Tensor], index: Tensor) -> Any:
            with unvalidated(), poutine.block(), self.parameters.replaced(values), settings.replaced(buffers):
                f = self.weights.outputs({}, self.x[index], count)
                likelihood = self.model.likelihood
                total = f.new_zeros((), dtype=F64)
                if self.y is not None:
                    total = block_log_prob(likelihood, f, likelihood.checked(f[0], self.y[index]))
                return block_sums(likelihood, f), total, f if self.keep else f.new_zeros(())

        first = ([v[0] for v in self.values], [b[0] for b in self.buffers], self.rows[0])
        leaves, shape = tree_flatten(first)
        outputs: list[Any] = []

        def flat(*inputs: Tensor) -> list[Tensor]:
            result, spec = tree_flatten(solo(*tree_unflatten(inputs, shape)))
            outputs.append(spec)
            return result

        with quietly(self.model, self.guide):
            graph = traced(flat, leaves)
        mapped = vmap(graph, randomness="different")
        return lambda *inputs: tree_unflatten(mapped(*tree_flatten(inputs)[0]), outputs[0])


def _cuts(start: int, stop: int, size: int) -> list[slice]:
    return [slice(k, min(k + size, stop)) for k in range(start, stop, size)]


def _halved(replicas: slice, draws: slice) -> list[tuple[slice, slice]]:
    """Split a block in two: half the draws each, or half the replicas if there is only one draw."""
    if draws.stop - draws.start > 1:
        middle = (draws.start + draws.stop) // 2
        return [(replicas, slice(draws.start, middle)), (replicas, slice(middle, draws.stop))]
    middle = (replicas.start + replicas.stop) // 2
    return [(slice(replicas.start, middle), draws), (slice(middle, replicas.stop), draws)]
