"""The temperature of the KL in a loss: a number, a function of the number of steps done, or what the prior asks for.

A tempered prior (``Prior(tempered=True)``) keeps a wide network from ignoring its data. A mode has no volume to pay for
the width of a layer, so a point is penalised as by N(0, l⁻²) in every layer. Elsewhere the KL of P weights is
multiplied by T = min(1, √(N/P)/4) for N data, and for anchored members by a rule of their own (``priors``). In a model
with one weight layer T is 1.

A schedule needs the number of the step, which Pyro's losses are not told. Whoever takes a step announces its number
here, as a tensor: in a compiled program it is an input, so the factor is computed anew at every step.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from numbers import Real
from typing import Literal

import torch
from pyro.distributions import Delta
from pyro.poutine.messenger import Messenger
from torch import Tensor

from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.generative.priors import Tempered
from pyro_dropout.generative.process_state import bound
from pyro_dropout.mathematics.checks import check_choice, check_count, check_keep, check_non_negative, describe
from pyro_dropout.protocols import Distribution, Message

Temperature = float | Literal["auto"] | Callable[[Tensor], Tensor]

_STEP: ContextVar[Tensor | None] = ContextVar("the number of the step that is being taken, from 1", default=None)


def at_step(t: Tensor) -> AbstractContextManager[None]:
    """Announce the number of the step that is taken in this context, counted from 1."""
    return bound(_STEP, t)


def current_step() -> Tensor | None:
    """Return the number of the step that is being taken, from 1; None if nobody has announced one."""
    return _STEP.get()


class Marks(Messenger):
    """Collects what a model says of its sites' temperatures, before a replay puts the guide's ``infer`` in place."""

    def __init__(self) -> None:
        super().__init__()
        self.of: dict[str, Tempered] = {}

    def _pyro_sample(self, msg: Message) -> None:
        how = (msg["infer"] or {}).get("tempered")
        if how is not None:
            self.of[msg["name"]] = how


def is_point(q: Distribution) -> bool:
    """Whether a guide has no density at a site: a point, or dropout at σ = 0."""
    return isinstance(q, Delta) or bool(getattr(q, "singular", False))


def numbers_of(drawn: Iterable[Distribution]) -> int:
    """Return how many numbers these distributions are of."""
    return sum((q.batch_shape + q.event_shape).numel() for q in drawn)


def share_of_data(how: Tempered, numbers: int) -> float:
    """Return T of a tempered prior, for P numbers."""
    return 1.0 if how.weights is None else min(1.0, (how.weights / max(1, numbers)) ** how.power)


def warm_up(steps: int, start: float | None = None) -> Callable[[Tensor], Tensor]:
    """A temperature that rises to 1 at step number ``steps``, and stays there.

    The likelihood leads at first, so that means find the data before the prior pulls them towards zero.

    Args:
        steps: the number of the step from which on the loss is the ELBO.
        start: the temperature before the first step, in (0, 1], from which it rises by equal factors. Where weights far
            outnumber the data, take about the ratio of data to weights: the KL is a sum over weights. None: it rises
            from 0 in equal parts.

    Returns:
        A function of the number of steps done, for ``ELBO(temperature=...)``.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> pdrop.training.warm_up(4)(torch.arange(6.0))
        tensor([0.2500, 0.5000, 0.7500, 1.0000, 1.0000, 1.0000])
        >>> pdrop.training.warm_up(2, start=0.01)(torch.arange(3.0))
        tensor([0.1000, 1.0000, 1.0000])
    """
    check_count("steps", steps)
    if start is None:
        return lambda done: ((done + 1) / steps).clamp(max=1.0)
    check_keep("start", start)
    return lambda done: float(start) ** (1 - (done + 1) / steps).clamp(min=0.0)


def check_temperature(temperature: object) -> None:
    """Raise an error unless this is a number of at least 0, or a schedule of such numbers; it is called at step 0."""
    if isinstance(temperature, str):
        check_choice("temperature", temperature, ("auto",), "a number, a function of the step")
        return
    if not callable(temperature) or isinstance(temperature, Tensor):
        check_non_negative("temperature", temperature)
        if isinstance(temperature, Tensor) and temperature.numel() != 1:
            raise PyroDropoutError(f"temperature must be one number; got shape {tuple(temperature.shape)}.")
        return
    found = temperature(torch.zeros(()))
    if not (found.numel() == 1 if isinstance(found, Tensor) else isinstance(found, Real)):
        raise PyroDropoutError(
            f"temperature must return one number to multiply the KL with, as warm_up(1000) does; got {describe(found)}."
        )
    check_non_negative("temperature at step 0", found)
