"""Synthetic data from formulas, for experiments without a data folder."""

import math
from itertools import pairwise

import torch
from torch import Tensor

_ROWS, _SPLITS, _TEST_SHARE = 400, 20, 0.1
_SIDE = 28  # pixels, as in MNIST


def made_regression() -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
    """Return inputs (400, 5), targets (400, 1), and the rows of 20 random splits into 90% and 10%.

    y = 10 + 4 sin(πx₁) + 3 x₂x₃ + 2 x₄² + (0.3 + 0.4 |x₁|) ε, with x uniform on [−1, 1]⁵ and ε standard normal: a wave,
    a product, a square, an irrelevant input, and noise that grows away from the centre.
    """
    with torch.device("cpu"):
        dice = torch.Generator().manual_seed(2016)
        x = 2 * torch.rand(_ROWS, 5, generator=dice) - 1
        a, b, c, d, _ = x.unbind(-1)
        noise = (0.3 + 0.4 * a.abs()) * torch.randn(_ROWS, generator=dice)
        y = 10 + 4 * torch.sin(math.pi * a) + 3 * b * c + 2 * d.square() + noise
        test_size = round(_TEST_SHARE * _ROWS)
        orders = [torch.randperm(_ROWS, generator=dice) for _ in range(_SPLITS)]
        return x, y.unsqueeze(-1), [o[test_size:] for o in orders], [o[:test_size] for o in orders]


def made_digits(number: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return images (number, 1, 28, 28) in [0, 1] of the digits 0 to 9, and their labels (number,), in random order.

    Each digit is a few strokes; every image shifts, rotates, slants, scales and thickens them at random and adds a
    little noise.
    """
    with torch.device("cpu"):
        dice = torch.Generator().manual_seed(seed)
        labels = torch.arange(number) % 10
        labels = labels[torch.randperm(number, generator=dice)]
        images = torch.empty(number, 1, _SIDE, _SIDE)
        for digit in range(10):
            mine = labels == digit
            images[mine] = _drawn(_STROKES[digit], int(mine.sum()), dice)
        return images, labels


def _drawn(strokes: list[list[tuple[float, float]]], number: int, dice: torch.Generator) -> Tensor:
    """Return images (number, 1, 28, 28) of one glyph: ink falls off with the distance to the nearest stroke."""
    ends = torch.tensor([[*a, *b] for line in strokes for a, b in pairwise(line)])  # (S, 4)
    bent = ends.expand(number, -1, -1) + 0.03 * torch.randn(number, *ends.shape, generator=dice)
    start, stop = bent.split(2, -1)  # (n, S, 2) each
    turn, slant = (0.15 * torch.randn(number, generator=dice) for _ in range(2))
    wide, high = (1 + 0.1 * torch.randn(number, generator=dice) for _ in range(2))
    by_row = (wide * turn.cos(), slant - high * turn.sin(), wide * turn.sin(), high * turn.cos())
    matrix = torch.stack(by_row, -1).view(number, 2, 2)
    shift = 0.12 * torch.randn(number, 1, 2, generator=dice)
    start, stop = (point @ matrix.mT + shift for point in (start, stop))
    middle = (_SIDE - 1) / 2
    line = (torch.arange(_SIDE) - middle) / 10  # 20 of the 28 pixels span [−1, 1], as in MNIST
    pixel = torch.stack([line.expand(_SIDE, -1), line.unsqueeze(-1).expand(-1, _SIDE)], -1).reshape(1, -1, 1, 2)
    along = (stop - start).unsqueeze(1)  # (n, 1, S, 2)
    from_start = pixel - start.unsqueeze(1)  # (n, 784, S, 2)
    share = ((from_start * along).sum(-1) / along.square().sum(-1).clamp(min=1e-6)).clamp(0, 1)
    distance = (from_start - share.unsqueeze(-1) * along).norm(dim=-1).amin(-1)  # (n, 784)
    half_width = 0.08 + 0.07 * torch.rand(number, 1, generator=dice)
    ink = torch.sigmoid((half_width - distance) / 0.03)
    noise = 0.03 * torch.randn(ink.shape, generator=dice)
    return (ink + noise).clamp(0, 1).reshape(number, 1, _SIDE, _SIDE)


def _arc(x: float, y: float, wide: float, high: float, start: float, stop: float) -> list[tuple[float, float]]:
    """Return points on an ellipse between two angles, in degrees clockwise from the right; y points down."""
    steps = max(3, round(abs(stop - start) / 30))
    angles = [math.radians(start + (stop - start) * k / steps) for k in range(steps + 1)]
    return [(x + wide * math.cos(a), y + high * math.sin(a)) for a in angles]


_STROKES: list[list[list[tuple[float, float]]]] = [
    [_arc(0, 0, 0.6, 0.95, 0, 360)],
    [[(-0.3, -0.6), (0.05, -0.95), (0.05, 0.95)]],
    [[*_arc(0, -0.45, 0.55, 0.5, 180, 390), (-0.6, 0.95), (0.6, 0.95)]],
    [[*_arc(-0.05, -0.48, 0.5, 0.47, 200, 450), *_arc(-0.05, 0.45, 0.6, 0.5, 270, 520)]],
    [[(0.25, 0.95), (0.25, -0.95), (-0.6, 0.35), (0.65, 0.35)]],
    [[(0.5, -0.95), (-0.4, -0.95), (-0.45, -0.1), *_arc(-0.05, 0.38, 0.58, 0.55, 235, 520)]],
    [[(0.35, -0.95), (-0.2, -0.45), *_arc(0, 0.42, 0.5, 0.52, 180, -180)]],
    [[(-0.6, -0.95), (0.6, -0.95), (-0.1, 0.95)]],
    [_arc(0, -0.48, 0.45, 0.45, 90, 450), _arc(0, 0.46, 0.55, 0.48, -90, 270)],
    [[*_arc(0, -0.42, 0.5, 0.52, 0, 360), (0.45, 0.2), (0.2, 0.95)]],
]
