"""Predictions of a fleet: all replicas at once, each at its own rows of one data set; results have E in front."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from pyro import poutine
from torch import Tensor
from tqdm.auto import tqdm

from pyro_dropout.errors import PyroDropoutError, ShapeError
from pyro_dropout.generative.inputs import AnyInputs, check_inputs, takes_all
from pyro_dropout.generative.likelihoods.moments import F64, Points, Running, Sums, block_log_prob, block_sums
from pyro_dropout.generative.precision import Precision, check_precision, products_in
from pyro_dropout.generative.process_state import one_at_a_time, seeded
from pyro_dropout.generative.trial_run import evaluating, quietly
from pyro_dropout.mathematics.checks import also, check_choice, check_count, check_seed
from pyro_dropout.prediction.blocks import Block, cuts, run_blocks
from pyro_dropout.prediction.predict_network import Keep, frozen, keeps
from pyro_dropout.prediction.prediction import Prediction
from pyro_dropout.prediction.weight_draws import PerExample
from pyro_dropout.protocols import Distribution, Likelihood
from pyro_dropout.training.compile.functional import Buffers, Parameters, unvalidated
from pyro_dropout.training.fleet.fleet import Fleet
from pyro_dropout.training.fleet.replicas import over_replicas, rows_of

Sum = tuple[Sums, Tensor]  # of a block: sums over draws, and the outputs if they are kept

_CPU_ROWS, _CUDA_ROWS = 2**15, 2**20  # in one forward pass of all replicas


class FleetPrediction(Prediction):
    """The predictions of every replica of a fleet: like ``Prediction``, with E in front of each result.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> def build(seed):
        ...     torch.manual_seed(seed)
        ...     model = pdrop.BayesianNet(torch.nn.Linear(2, 1), likelihood=pdrop.Gaussian(tau=4.0))
        ...     return model, pdrop.AutoDropout(model)
        >>> fleet = pdrop.Fleet(build, {"seed": [0, 1, 2]})
        >>> answer = pdrop.prediction.predict_fleet(fleet, torch.ones(5, 2), torch.zeros(5, 1), samples=50, seed=0)
        >>> answer.mean.shape, answer.log_prob().shape, answer.scores()["log_likelihood"].shape
        (torch.Size([3, 5, 1]), torch.Size([3, 5]), torch.Size([3]))
    """

    _made_by = "predict_fleet"
    likelihoods: tuple[Likelihood, ...] = ()
    targets: Tensor | None = None

    def __repr__(self) -> str:
        replicas, points = self._sums["mean"].shape[:2]
        return f"FleetPrediction({replicas} replicas, {points} points, {self._count} draws, {self.family})"

    def pieces(self) -> Iterator[Points]:
        """Yield the replicas, one by one: their noise may differ."""
        return iter(range(self.samples.shape[1]))

    def distribution_at(self, points: Points) -> Distribution:
        """Return p(y | f) of every draw of one replica, (T, n, D)."""
        assert isinstance(points, int)
        return self.likelihoods[points].distribution(self.samples[:, points])

    def log_prob(self, y: Tensor | None = None) -> Tensor:
        """Return log p(y | x) of each replica and point, (E, n), by default for the targets given to ``predict_fleet``.

        Samples must be kept. ``y`` is (E, n, D), or (E, n) of classes.
        """
        y = (self._targets() if y is None else y).to(self.like.device)
        if len(y) != len(self.likelihoods):
            raise ShapeError(f"y must have targets for each of {len(self.likelihoods)} replicas; got {len(y)}.")
        found = torch.empty(y.shape[:2], dtype=F64, device=y.device)
        with unvalidated():  # a replica may have diverged
            for e, (likelihood, f) in enumerate(zip(self.likelihoods, self.samples[0], strict=True)):
                checked = likelihood.checked(f, y[e])
                likelihood.check_values(f, checked)
                found[e] = block_log_prob(self.distribution_at(e), checked)
        return (found - math.log(self._count)).to(self.like)

    def scores(self) -> dict[str, Tensor]:
        """Return scores of every replica, (E,): "log_likelihood" per point, and "rmse", or "accuracy" for classes."""
        log_likelihood, y = self.log_prob().mean(1), self._targets()
        if self.one_of_several:
            right, counted = self.mean.argmax(-1) == y, self.counted(y)
            share = (right & counted).flatten(1).sum(1) / counted.flatten(1).sum(1)
            share = share.where(self.mean.flatten(1).isfinite().all(1), torch.nan)  # one that diverged has no classes
            return {"log_likelihood": log_likelihood, "accuracy": share.to(self.like.dtype)}
        error = self._sums["mean"] - y.reshape(self.mean.shape)
        return {"log_likelihood": log_likelihood, "rmse": error.square().flatten(1).mean(1).sqrt().to(self.like)}

    def _targets(self) -> Tensor:
        if self.targets is None:
            raise PyroDropoutError("give the targets to predict_fleet(fleet, x, y).")
        return self.targets


@also(num_samples="samples")
@one_at_a_time
def predict_fleet(
    fleet: Fleet,
    x: Any,
    y: Tensor | None = None,
    *,
    indices: Tensor | None = None,
    samples: int = 1000,
    seed: int | None = None,
    keep_samples: Keep = "auto",
    precision: Precision = "float32",
    chunk: int | None = None,
    progress: bool = False,
) -> FleetPrediction:
    """Predict with all replicas of a fleet in one computation, with separate weights for each draw, replica and point.

    Args:
        fleet: the fleet.
        x: data points, (N, ...), or a dict or a tuple of them.
        y: their targets, if scores are needed.
        indices: (E, n), the rows of x that each replica predicts; all of them by default.
        samples: the number T of draws.
        seed: makes the draws reproducible, and leaves torch's random state as it was.
        keep_samples: whether to keep the outputs of every draw as ``samples``, (T, E, n, D), as in ``predict``.
        precision: "bf16" for products in half precision, as in ``predict``.
        chunk: rows, draws times replicas times points, in one forward pass; halved whenever memory runs out.
        progress: whether to show a bar.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> def build(keep):
        ...     model = pdrop.BayesianNet(torch.nn.Linear(2, 1), likelihood=pdrop.Gaussian(tau=4.0))
        ...     return model, pdrop.AutoDropout(model, keep=keep)
        >>> fleet = pdrop.Fleet(build, {"keep": [0.5, 0.99]})
        >>> answer = pdrop.prediction.predict_fleet(fleet, torch.ones(5, 2), samples=200, seed=0)
        >>> bool((answer.epistemic[0] > answer.epistemic[1]).all())  # more dropout, more uncertainty
        True
    """
    check_count("samples", samples)
    if chunk is not None:
        check_count("chunk", chunk)
    check_seed(seed)
    check_choice("keep_samples", keep_samples, ("auto", True, False))
    if not isinstance(fleet, Fleet):
        raise PyroDropoutError(
            f"fleet must be a pyro_dropout.Fleet; got {type(fleet).__name__}. Otherwise use predict."
        )
    check_precision(precision, fleet[0][0])
    device = fleet.place()
    x = check_inputs(x, whole=takes_all(fleet[0][0])).to(device)
    rows = rows_of(x, indices, len(fleet))
    if y is not None and len(y) != len(x):
        raise ShapeError(f"y must have one target for each of {len(x)} points; got {len(y)}.")
    with seeded(seed, device), evaluating(*(part for pair in fleet for part in pair)), products_in(precision):
        forward = _ForwardPass(fleet, x, rows)
        like = forward.like
        shape = (samples, *rows.shape, like.shape[-1])
        forward.keep = keeps(keep_samples, math.prod(shape))
        kept = like.new_empty(shape) if forward.keep else None
        budget = chunk or (_CUDA_ROWS if x.is_cuda else _CPU_ROWS)
        together = max(1, min(len(fleet), budget // rows.shape[1]))
        draws = max(1, min(samples, budget // (together * rows.shape[1])))
        running = Running(len(fleet))

        def receive(block: Block, found: Sum) -> None:
            running.add(block.draws.start, block.count, block.points, found[0])
            if kept is not None:
                kept[block.draws, block.points] = found[1].movedim(0, 1)
            bar.update(block.rows * rows.shape[1])

        blocks = [Block(t, t, e) for e in cuts(len(fleet), together) for t in cuts(samples, draws)]
        with tqdm(total=samples * rows.numel(), disable=not progress, unit="row", unit_scale=True) as bar:
            run_blocks(blocks, lambda block: forward.run(block.points, block.count), receive)
    answer = FleetPrediction(frozen(fleet[0][0].likelihood), running.sums, samples, like, kept)
    answer.likelihoods = tuple(frozen(model.likelihood) for model, _ in fleet)
    answer.targets = None if y is None else y.to(device)[rows]
    return answer


class _ForwardPass:
    """The forward pass of some replicas, as one replica's graph mapped over them."""

    def __init__(self, fleet: Fleet, x: AnyInputs, rows: Tensor) -> None:
        self.x, self.rows, self.keep = x, rows, False
        self.model, self.guide = fleet[0]
        self.weights = PerExample(self.model, self.guide)
        with quietly(self.model, self.guide):
            self.like = self.weights.one(x[:1])
        self.parameters = Parameters(self.model, self.guide, self.weights, (x[:1],), {})
        self.values, self.buffers = fleet.values(self.parameters), fleet.buffers()
        self._maps: dict[int, Callable[..., Sum]] = {}

    def run(self, replicas: slice, count: int) -> Sum:
        """Return the sums of ``count`` draws of some replicas."""
        inputs = ([v[replicas] for v in self.values], [b[replicas] for b in self.buffers], self.rows[replicas])
        if count not in self._maps:
            self._maps[count] = self._mapped(count)
        return self._maps[count](*inputs)

    def _mapped(self, count: int) -> Callable[..., Sum]:
        settings = Buffers(self.model, self.guide)

        def solo(values: list[Tensor], buffers: list[Tensor], index: Tensor) -> Sum:
            with unvalidated(), poutine.block(), self.parameters.replaced(values), settings.replaced(buffers):
                f = self.weights.outputs({}, self.x[index], count)
                return block_sums(self.model.likelihood, f), f if self.keep else f.new_zeros(())

        first = ([v[0] for v in self.values], [b[0] for b in self.buffers], self.rows[0])
        return over_replicas(solo, first, (0, 0, 0), (self.model, self.guide))
