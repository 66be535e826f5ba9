"""Whether a training is worth compiling: eager steps start at once, recorded ones soon, compiled ones last.

The decision depends on the number of steps and on sizes alone, so that the same call always decides
the same. A recorded step replays the tensor operations of one step without Pyro, which is most of the time of a small
one. To record it takes as long as about a hundred eager steps, whatever the model: both grow with the number of
operations. A compiled step is faster by what is left between operations, and by what passes over the weights that
compilation fuses; it takes torch's compiler some fifteen seconds on a CPU. Most small steps can be written as plain C,
which is compiled in about a second: "plain" is to try that, and to record the step otherwise.
"""

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

from pyro_dropout.mathematics.checks import check_choice

Compile = Literal["auto"] | bool
HowCompiled = Literal["auto", "traced", "plain"] | bool

_RECORDING = 200  # eager steps
_COMPILING = 15.0  # seconds
_IN_PLAIN_C = 1.5
_BETWEEN = 6e-4  # seconds of a recorded step that a compiled one saves, whatever its size
_FUSED = 1e-8  # the same, for each weight and activation


def check_how_compiled(compile: object) -> None:
    """Raise an error unless ``compile`` is "auto", "traced", True or False."""
    check_choice("compile", compile, ("auto", "traced", True, False))


def step_size(parameters: Iterable[Tensor], batch: int) -> int:
    """Return how many numbers a step passes over: weights, and activations, of which there are as many as biases.

    Example:
        >>> step_size(torch.nn.Linear(13, 50).parameters(), batch=10)
        1200
    """
    return sum(value.numel() * (1 + batch * (value.dim() == 1)) for value in parameters)


def decided(compile: HowCompiled, steps: int, values: int, device: torch.device, *, plain: bool = False) -> HowCompiled:
    """Return how steps are taken: False, eagerly; "traced", recorded; "plain", as plain C or recorded; else compiled.

    Args:
        compile: what was asked for; all but "auto" is returned as it is. On a GPU, "auto" always compiles.
        steps: how many there will be.
        values: how many numbers a step passes over, by ``step_size``.
        device: where.
        plain: whether they may be plain C.

    Example:
        >>> cpu = torch.device("cpu")
        >>> [decided("auto", steps, 701, cpu) for steps in (100, 1_000, 100_000)]
        [False, 'traced', 'auto']
        >>> decided("auto", 10_000, 701, cpu, plain=True)
        'plain'
        >>> decided("auto", 1_000, 4_000_000, cpu)
        'auto'
    """
    if compile != "auto" or device.type != "cpu":
        return compile
    if steps < _RECORDING:
        return False
    saved = steps * (_BETWEEN + _FUSED * values)
    if saved > _COMPILING:
        return "auto"
    return "plain" if plain and saved > _IN_PLAIN_C else "traced"
