"""Which engine takes the steps: eager ones start at once, recorded ones soon, compiled ones last.

How much is worth preparing depends on the number of steps and on sizes alone, so that the same call always decides the
same. A recorded step replays the tensor operations of one step without Pyro, which is most of the time of a small one.
To record it takes as long as about a hundred eager steps, whatever the model: both grow with the number of operations.
A compiled step is faster by what is left between operations, and by what passes over the weights that compilation
fuses; it takes torch's compiler some fifteen seconds on a CPU. Most small steps can be written as C, which is compiled
in about a second: "plain" is to try that, and to record the step otherwise.
"""

import contextlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Literal

import torch
from torch import Tensor

from pyro_dropout.engines.engine import CannotError, Eager, Engine, Loop, Step, WrongStepError
from pyro_dropout.engines.in_c import InC
from pyro_dropout.engines.in_cuda import InCuda
from pyro_dropout.engines.replayed import Inductor, Replayed
from pyro_dropout.engines.tracing import reads_values
from pyro_dropout.errors import warn_caller
from pyro_dropout.mathematics.checks import check_choice

Compile = Literal["auto"] | bool
HowCompiled = Literal["auto", "traced", "plain"] | bool

_RECORDING = 200  # eager steps
_COMPILING = 15.0  # seconds
_IN_C = 1.5
_BETWEEN = 2e-3  # seconds of a recorded step that a compiled one saves, whatever its size
_FUSED = 1e-8  # the same, for each weight and activation


def check_how_compiled(compile: object) -> None:
    """Raise an error unless ``compile`` is "auto", "traced", True or False."""
    check_choice("compile", compile, ("auto", "traced", True, False))


def step_size(parameters: Iterable[Tensor], batch: int) -> int:
    """Return how many numbers a step passes over: weights, and activations, of which there are as many as biases."""
    return sum(value.numel() * (1 + batch * (value.dim() == 1)) for value in parameters)


def decided(compile: HowCompiled, steps: int, values: int, device: torch.device) -> HowCompiled:
    """Return what is worth preparing: nothing (False), a record ("traced"), C or that ("plain"), a compiled step."""
    if compile != "auto" or device.type != "cpu":
        return compile
    if steps < _RECORDING:
        return False
    saved = steps * (_BETWEEN + _FUSED * values)
    return "auto" if saved > _COMPILING else "plain" if saved > _IN_C else "traced"


def left_out(compile: HowCompiled, how: HowCompiled, engine: str) -> list[str]:
    """Return why engines that are faster than this one were not tried, where ``compile`` left it to ``decided``."""
    if compile != how and engine != InC.name:
        names = ["recorded", "C", "inductor"][[False, "traced", "plain"].index(how) :]
        return [f"{' and '.join(names)}: the training is too short for preparing that to pay"]
    return []


def engines_for(compile: HowCompiled, device: torch.device) -> list[Engine]:
    """Return the engines to try in turn; the last takes any step, unless ``compile`` is True."""
    if compile is False:
        return [Eager()]
    if compile == "traced":
        return [Replayed(), Eager()]
    written: list[Engine] = [InC() if device.type == "cpu" else InCuda()]
    if compile == "plain":
        return [*written, Replayed(), Eager()]
    compiled: list[Engine] = [*written, Inductor()]
    return compiled if compile is True else [*compiled, Replayed(), Eager()]


def chosen(
    compile: HowCompiled,
    step: Step,
    *,
    around: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
    warn: Callable[[Exception, str], None],
) -> tuple[Loop, list[str]]:
    """Return the loop of the first engine that takes a step, and why each one before it does not."""
    why: list[str] = []
    failed: list[tuple[str, Exception]] = []
    for engine in engines_for(compile, step.t.device):
        try:
            with around():
                loop = engine.loop(step)
        except CannotError as reason:
            why.append(f"{engine.name}: {reason}")
        except WrongStepError:
            raise
        except Exception as cause:
            why.append(f"{engine.name}: {'it reads the value of a tensor' if reads_values(cause) else cause}")
            failed.append((engine.name, cause))
        else:
            _tell(failed, loop, warn)
            loop.ready()
            return loop, why
    raise failed[-1][1] if failed else CannotError("; ".join(why))


def _tell(failed: list[tuple[str, Exception]], loop: Loop, warn: Callable[[Exception, str], None]) -> None:
    """Warn of engines that failed where they should not: the model is not for them, or they have a mistake."""
    compiling = [cause for name, cause in failed if name == Inductor.name or loop.name == Eager.name]
    if compiling:
        warn(compiling[-1], loop.name)
        return
    # A schedule may read the number of the step: what is recorded is without it.
    for name, cause in ((name, cause) for name, cause in failed if not reads_values(cause)):
        warn_caller(
            f"the engine {name!r} failed ({type(cause).__name__}: {cause}), so {loop.name!r} takes the steps. Please"
            " report this with your model.",
        )
