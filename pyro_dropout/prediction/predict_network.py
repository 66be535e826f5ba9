"""Predictions of a network in one process: which weights are drawn, how they are walked through, and what is kept."""

import copy
import math
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from torch import Tensor, nn

from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.generative.inputs import AnyInputs, takes_all
from pyro_dropout.generative.jacobians import check_single_points
from pyro_dropout.generative.likelihoods import likelihood_of
from pyro_dropout.generative.likelihoods.moments import Running, Sums, block_sums
from pyro_dropout.prediction.blocks import Block, Walk
from pyro_dropout.prediction.prediction import Prediction
from pyro_dropout.prediction.weight_draws import PerExample, WholeFunctions, whole_functions
from pyro_dropout.protocols import FunctionPosterior, HasDraws, Predictor

Keep = Literal["auto"] | bool
Part = TypeVar("Part")

_FEW = 2**26  # the most numbers that keep_samples="auto" keeps
_ROWS = 2**16  # pairs of a draw and a point, for functions drawn together


@dataclass(frozen=True)
class Request:
    """The options of ``predict``, checked; it describes them."""

    samples: int
    method: str
    shared: bool
    seed: int | None
    keep_samples: Keep
    compile: bool
    chunk: int | None
    progress: bool
    together: int | None = None  # draws whose weights are made together; by default what fits


def keeps(asked: Keep, numbers: int) -> bool:
    """Whether samples are kept if they are this many numbers."""
    return numbers <= _FEW if asked == "auto" else asked


def predict_network(model: Predictor, posterior: object, x: AnyInputs, asked: Request) -> Prediction:
    """Return the prediction of a network at the points ``x``."""
    likelihood = frozen(likelihood_of(model))
    walk = walk_of(model, posterior, x, asked)
    shape = (asked.samples, len(x), walk.like.shape[-1])
    kept = walk.like.new_empty(shape) if keeps(asked.keep_samples, math.prod(shape)) else None
    running = Running(len(x))

    def reduce(f: Tensor) -> tuple[Sums, list[Tensor]]:
        return block_sums(likelihood, f), [] if kept is None else [f]

    def receive(block: Block, result: tuple[Sums, list[Tensor]]) -> None:
        running.add(block.draws.start, block.count, block.points, result[0])
        if kept is not None:
            kept[block.draws, block.points] = result[1][0]

    walk.run(reduce, receive, asked.progress)
    return Prediction(likelihood, running.sums, asked.samples, walk.like, kept)


def shares_draws(posterior: object, asked: Request) -> bool:
    """Whether all points share each draw, which is then a whole function."""
    whole = isinstance(posterior, HasDraws | FunctionPosterior) or not callable(posterior)
    return asked.shared or whole or bool(getattr(posterior, "whole_functions", False))


def walk_of(model: Predictor, posterior: object, x: AnyInputs, asked: Request) -> Walk:
    """Return the walk, ready to run; raise with advice if weights cannot be drawn for each point."""
    way = whole_functions(model, posterior, asked.method, asked.samples)
    if isinstance(posterior, FunctionPosterior):  # points in different blocks would lie on different functions
        asked = replace(asked, chunk=max(asked.chunk or _ROWS, len(x)), compile=False)
    else:
        check_single_points(model, x)

    def walk(draws: WholeFunctions) -> Walk:
        how = {"chunk": asked.chunk, "seed": asked.seed, "together": asked.together}
        return Walk(draws, x, asked.samples, compile=asked.compile, **how)

    if asked.method == "standard" or shares_draws(posterior, asked) or takes_all(model):
        return walk(way)
    try:
        return walk(PerExample(model, posterior))
    except PyroDropoutError as cause:
        Walk(way, x[:1], 1)  # not an error of per-point draws if this fails too
        raise PyroDropoutError(
            f"weights cannot be drawn for each data point here: {cause} Write predict(..., shared=True)."
        ) from cause


def frozen(part: Part) -> Part:
    """Return a copy of a likelihood or a model that training does not change, whatever history its tensors have."""
    kept: dict[int, Tensor] = {}
    if isinstance(part, nn.Module):
        kept = {id(value): value.detach().clone() for value in part.buffers()}
        kept |= {id(value): nn.Parameter(value.detach().clone(), False) for value in part.parameters()}
    return copy.deepcopy(part, kept)
