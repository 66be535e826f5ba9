"""Free-running forecasts: each draw of the weights is one function, and continues from its own draws of y.

    f_t = f(x_{t-L+1}, ..., x_t; ω),   x_{t+1} ~ N(f_t, 1/τ),   with the same ω at every step

Under a posterior over weights one draw applies to the whole future; masks redrawn at every step would average over
futures that no single function produces.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from pyro import poutine
from torch import Tensor

from pyro_dropout.mathematics.shapes import Float
from pyro_dropout.training.loss.per_example import per_example


@dataclass(frozen=True, eq=False)
class FreeRun:
    """Forecasts several steps ahead; returned by ``free_run``.

    Attributes:
        f: the mean forecast of every draw of the weights, given its own draws of y so far, (T, N, steps).
        tau: the precision of the noise around it.
    """

    f: Float[Tensor, "T N steps"]
    tau: float

    def log_prob(self, y: Float[Tensor, "N steps"]) -> Float[Tensor, "N steps"]:
        """Return log (1/T) Σ_t N(y; f_t, 1/τ) of the observed values, step by step."""
        each = 0.5 * math.log(self.tau / (2 * math.pi)) - 0.5 * self.tau * (y - self.f).square()
        return each.logsumexp(0) - math.log(len(self.f))


def free_run(model: Any, guide: Any, windows: Float[Tensor, "N L"], steps: int, *, tau: float, samples: int) -> FreeRun:
    """Run a one-step forecaster on its own draws of y, with one draw of the weights for all steps."""
    rows, found = windows.repeat(samples, 1), []
    with torch.no_grad(), per_example():
        drawn = poutine.trace(guide).get_trace(rows)  # weights are drawn once and replayed at every step
        for _ in range(steps):
            f = poutine.replay(model, trace=drawn)(rows)
            found.append(f)
            rows = torch.cat([rows[:, 1:], f + torch.randn_like(f) / tau**0.5], 1)
    return FreeRun(torch.cat(found, 1).reshape(samples, len(windows), steps), tau)
