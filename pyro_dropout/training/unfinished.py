"""Whether a training ended too soon: the loss was still falling when its steps were over, by more than its noise.

The last half of the losses is cut into blocks, whose means are nearly independent, and these into three parts with
the medians a, b and c. The fall b - c is r times the fall a - b; if it goes on like this, it brings (b - c) r/(1 - r)
more.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

ADVICE = (
    "Raise steps or the learning rate; or give many steps and validation=0.2, which stops when a fifth of the data,"
    " held out, gets no better."
)
_FEWEST = 200  # steps; fewer are a trial, and too few for a trend
_BLOCKS = 10  # in each of three parts
_SURE = 5.0  # standard errors by which the last part must lie below the one before
_SHARE = 0.1  # of the fall since a tenth of the steps that must still be to come
_NATS = 0.02  # per data point that must still be to come
_SLOWEST = 0.97  # the largest r that says how long it takes


@dataclass(frozen=True)
class StillFalling:
    """What a training has left undone.

    Attributes:
        gain: by how much the loss would still fall, in nats per data point; of a straight fall, in as many steps again.
        steps: how many more steps nine tenths of that would take, about.
        at_least: whether the fall does not slow down, so that both are lower bounds.
    """

    gain: float
    steps: int
    at_least: bool

    def sentence(self, taken: int) -> str:
        """Say it, with what to do."""
        about = "at least" if self.at_least else "about"
        return (
            f"the loss was still falling after {taken:,} steps: {about} {self.gain:.2g} nats per point are to come,"
            f" and {about} {self.steps:,} more steps would bring most of them. {ADVICE}"
        )


def still_falling(losses: Tensor, num_data: int) -> StillFalling | None:
    """Return what a training has left undone; None if its loss has settled, rises, or is too short or noisy to say."""
    count = len(losses)
    if losses.dim() != 1 or count < _FEWEST or not bool(torch.isfinite(losses).all()):
        return None
    values = losses.double()
    size = count // 2 // (3 * _BLOCKS)
    parts = values[count - 3 * _BLOCKS * size :].reshape(3, _BLOCKS, size).mean(2)
    before, middle, last = parts.median(1).values.tolist()
    fall = middle - last
    if not before > middle > last or fall <= _SURE * math.sqrt(2 / _BLOCKS) * _noise(parts.flatten()):
        return None
    ratio = min(fall / (before - middle), 1.0)
    straight = ratio > _SLOWEST
    to_come = 3 * fall if straight else fall * ratio / (1 - ratio)
    early = values[max(0, count // 10 - size) : count // 10 + size].median().item()
    if to_come < _SHARE * (early - last) or to_come < _NATS * num_data:
        return None
    more = count if straight else math.log(0.1) / math.log(ratio) * _BLOCKS * size
    digits = 10 ** (len(str(int(more))) - 2)
    return StillFalling(to_come / max(1, num_data), max(1, round(more / digits)) * digits, straight)


def _noise(blocks: Tensor) -> float:
    """Return the noise of a block around a parabola through all; more where neighbours have the same noise."""
    at = torch.linspace(-1, 1, len(blocks), dtype=blocks.dtype)
    basis = torch.linalg.qr(torch.stack([at**k for k in range(3)], 1)).Q
    rest = blocks - basis @ (basis.mT @ blocks)
    squares = rest.square().sum().clamp_min(1e-300)
    same = float((rest[1:] * rest[:-1]).sum() / squares)
    same = min(max(0.0, same + 4 / len(blocks)), 0.9)  # the parabola takes some of it away
    return math.sqrt(float(squares) / (len(blocks) - 3) * (1 + same) / (1 - same))
