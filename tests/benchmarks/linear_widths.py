"""The learned width of a linear model beside the best of five fixed ones, all in closed form.

    python -m tests.benchmarks.linear_widths

With XᵀX = N·I and τ = 1 the posterior under N(0, s²) factorises, so mean field is exact: the least squares ŵ are
N(w, 1/N), and the evidence is largest at s² = mean(ŵ²) - 1/N, or at zero. ``Prior(learn=True)`` finds this width:
tests/training/loss/test_learned_widths.py holds it.
"""

import itertools

import numpy as np
from numpy.typing import NDArray

SIZES, NUMBERS, FIXED = ((200, 10), (200, 40), (60, 40), (45, 40)), (0.05, 0.3, 1.0, 3.0), (0.25, 0.5, 1.0, 2.0, 4.0)
REPEATS, TEST, LEAST = 60, 400, 1e-6


def gain(rng: np.random.Generator, count: int, inputs: int, size: float) -> float:
    """Return the mean test log density at the learned width, minus that at the best fixed one."""
    w: NDArray[np.float64] = size * rng.normal(size=inputs)
    found = w + rng.normal(size=inputs) / count**0.5
    x = rng.normal(size=(TEST, inputs))
    y = x @ w + rng.normal(size=TEST)

    def score(square: float) -> float:
        precision = count + 1 / square
        variance = 1 + (x**2).sum(1) / precision
        apart = y - x @ (found * count / precision)
        return float((-0.5 * np.log(2 * np.pi * variance) - 0.5 * apart**2 / variance).mean())

    best = max(LEAST, float((found**2).mean()) - 1 / count)
    return score(best) - max(score(width**2) for width in FIXED)


def main() -> None:
    """Print a row for each number of data, inputs and size of the true weights."""
    rng = np.random.default_rng(0)
    every = []
    for (count, inputs), size in itertools.product(SIZES, NUMBERS):
        gains = [gain(rng, count, inputs, size) for _ in range(REPEATS)]
        every += gains
        within = np.mean(np.array(gains) >= -0.02)
        print(f"N {count}  inputs {inputs}  weights {size}: {np.mean(gains):+.4f} nats, within 0.02 in {within:.0%}")
    print(f"all: within 0.02 nats of the best of five in {np.mean(np.array(every) >= -0.02):.1%}")


if __name__ == "__main__":
    main()
