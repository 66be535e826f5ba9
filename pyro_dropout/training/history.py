"""What became of a training run: its losses and speed, and whether it diverged, ended too soon or lacked memory."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from pyro_dropout.errors import OutOfMemoryError, PyroDropoutError
from pyro_dropout.guides.summary import card
from pyro_dropout.protocols import Axes

if TYPE_CHECKING:
    from pyro_dropout.training.collapse import Learned

Result = TypeVar("Result")

REMEDY = "Lower the learning rate, clip gradients (clip_norm=...), or look for values in x and y that are not finite."
ADVICE = (
    "Raise steps or the learning rate; or give many steps and validation=0.2, which stops when a fifth of the data,"
    " held out, gets no better."
)
_FEWEST_FOR_A_RISE = 20  # steps
_FEWEST = 200  # steps; fewer are a trial, and too few for a trend
_BLOCKS = 10  # in each of three parts
_SURE = 5.0  # standard errors by which the last part must lie below the one before
_SHARE = 0.1  # of the fall since a tenth of the steps that must still be to come
_NATS = 0.02  # per data point that must still be to come
_SLOWEST = 0.97  # the largest r that says how long it takes


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: that of a GPU or, where the system says so, that of the CPU."""
    known = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return known or (isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error))


def unless_out_of_memory(work: Callable[[], Result]) -> Result | None:
    """Return the result of ``work``; None, with its memory released, if memory runs out."""
    try:
        return work()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    # Only here is the traceback released, which holds the tensors of the failed work.
    torch.cuda.empty_cache()
    return None


@contextmanager
def explained(points: int, less: str = "a smaller batch_size") -> Iterator[None]:
    """Within this context steps have some points each; torch's out-of-memory error is one that says what needs less."""
    try:
        yield
        return
    except (RuntimeError, MemoryError) as cause:
        if not is_out_of_memory(cause):
            raise
        said = str(cause).split(". ")[0]
    raise OutOfMemoryError(
        f"memory runs out in a step of {points} points: {said}. Use {less}, a smaller network, fewer particles"
        " (ELBO(num_particles=...)), or another device."
    )


def is_divergence(cause: Exception, values: Iterable[Tensor]) -> bool:
    """Whether a step failed because of its numbers: torch rejects a matrix, or what distributions are made with.

    Any error counts if parameters are not finite, except that memory ran out: draws and checks then fail in many ways.
    """
    if isinstance(cause, PyroDropoutError) or is_out_of_memory(cause):
        return False
    rejected = isinstance(cause, torch.linalg.LinAlgError) or str(cause).startswith("Expected parameter ")  # type: ignore[attr-defined]
    return rejected or not all_finite(values)


def all_finite(values: Iterable[Tensor]) -> bool:
    """Whether all numbers in these tensors are finite."""
    return all(bool(torch.isfinite(value).all()) for value in values)


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

    def sentence(self, taken: int, to_prior: bool = False) -> str:
        """Say it, with what to do; ``to_prior`` says that the posterior goes to a prior that keeps it from the data."""
        about = "at least" if self.at_least else "about"
        told = f"the loss was still falling after {taken:,} steps: {about} {self.gain:.2g} nats per point are to come,"
        if to_prior:
            return (
                f"{told} but they are the prior's. More steps would bring the posterior nearer to the prior and hardly"
                " nearer to the data, because it ignores its inputs; change the prior first, as the other warning says."
            )
        return f"{told} and {about} {self.steps:,} more steps would bring most of them. {ADVICE}"


@dataclass(repr=False)
class History:
    """The record of a training run.

    Attributes:
        losses: -ELBO at every step, before that step: (steps,), or (steps, replicas) of a fleet. Of an ensemble, the
            mean over the members whose loss is finite.
        steps: how many steps were taken.
        seconds: how long they took, without compilation.
        compile_seconds: how long recording and compilation took.
        matmul_precision: torch's setting at the time, ``torch.get_float32_matmul_precision()``.
        validation: (step, -log p(y|w) per point on the validation set), where one was given.
        best_step: the step whose parameters were kept, where a validation set was given.
        member_losses: the losses of each trained member of an ensemble, (steps, members).
        engine: what took the steps: "eager"; "recorded", the tensor operations of one step, replayed; "C", the same
            as a program in C, or "CUDA C"; "inductor", torch's compiler, or "inductor with CUDA graphs".
        why: why faster engines did not, unless ``compile`` asked for this one.
        learned: what the posterior of a network has learned from its inputs: its log-likelihood on training data beside
            that of the best constant, and how much each layer passes on; None where that is not known.
        unfinished: what the training left undone, if its loss was still falling at the end.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> history = pdrop.training.History(losses=torch.tensor([3.0, 2.0]), steps=2, seconds=0.5)
        >>> history, history.steps_per_second
        (History(2 steps in 0.5 s, eager, last loss 2), 4.0)
    """

    losses: Tensor
    steps: int
    seconds: float
    compile_seconds: float = 0.0
    matmul_precision: str = "highest"
    validation: list[tuple[int, float]] = field(default_factory=list)
    best_step: int | None = None
    member_losses: Tensor | None = None
    engine: str = "eager"
    why: str = ""
    learned: "Learned | None" = None
    unfinished: StillFalling | None = None

    def __repr__(self) -> str:
        last = self.losses[-1].double().mean() if len(self.losses) else float("nan")
        of = f" of {self.losses.shape[1]} replicas, on average" if self.losses.dim() > 1 else ""
        return f"History({self.steps} steps in {self.seconds:.3g} s, {self.engine}, last loss {last:.6g}{of})"

    def _repr_html_(self) -> str:
        """Return a table and the curve of the loss, for notebooks."""
        facts: dict[str, object] = {
            "steps": self.steps,
            "seconds": f"{self.seconds:.3g}",
            "steps were taken by": self.engine if not self.why else f"{self.engine} (not by {self.why})",
        }
        if len(self.losses):
            facts["last loss"] = f"{self.losses[-1].double().nanmean():.6g}"
        if self.best_step is not None:
            facts["best step"] = self.best_step
        return card("History", facts, self.plot if len(self.losses) > 1 else None)

    @property
    def summary(self) -> str:
        """How long the training was, in words."""
        best = "" if self.best_step is None else f", the best after {self.best_step} kept"
        return f"{self.steps:,} steps in {self.seconds:.3g} s{best}"

    @property
    def traced(self) -> bool:
        """Whether a recorded step was replayed, without compiling it."""
        return self.engine.startswith("recorded")

    @property
    def compiled(self) -> bool:
        """Whether the steps were compiled."""
        return self.engine != "eager" and not self.traced

    @property
    def steps_per_second(self) -> float:
        """Steps per second, without compilation."""
        return self.steps / self.seconds if self.seconds > 0 else float("nan")

    @property
    def diverged(self) -> Tensor:
        """Whether any loss was not finite: one answer, or one for each replica or trained member."""
        losses = self.losses if self.member_losses is None else self.member_losses
        return ~torch.isfinite(losses).all(0)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Plot the loss against the step, raw and smoothed; returns matplotlib's axes."""
        import matplotlib.pyplot as plt

        if ax is None:
            _, ax = plt.subplots(figsize=(6, 3), layout="constrained")
        losses = self.losses.double()
        if losses.dim() > 1:  # a fleet: its average
            losses = losses.nanmean(1)
        width = max(1, len(losses) // 100)
        smooth = losses[: len(losses) // width * width].reshape(-1, width).mean(1)
        ax.plot(range(1, len(losses) + 1), losses, color="#a6bddb", linewidth=0.6, label="each step")
        middles = [width * k + (width + 1) / 2 for k in range(len(smooth))]
        ax.plot(middles, smooth, color="#045a8d", label=f"mean of {width} steps")
        if self.best_step is not None:
            ax.axvline(self.best_step, color="#d95f0e", linestyle="--", label="best on the validation set")
        ax.set(xlabel="step", ylabel="-ELBO (nats)")
        ax.legend(frameon=False)
        return ax


# --- whether a training ended too soon: its loss was still falling, by more than its noise ----------------------------
# The last half of the losses is cut into blocks, whose means are nearly independent, and these into three parts with
# the medians a, b and c. The fall b - c is r times the fall a - b; if it goes on like this, it brings (b - c) r/(1 - r)
# more.


def rise(losses: Tensor, num_data: int) -> str:
    """Say that a loss ended above where it began, by more than its noise and a nat for each data point; "" if not."""
    values = losses.double()
    if losses.dim() != 1 or len(values) < _FEWEST_FOR_A_RISE or not bool(torch.isfinite(values).all()):
        return ""
    last = values[-(len(values) // 10) :]
    end = last.median()
    some = values[-_FEWEST_FOR_A_RISE // 2 :].min()  # of fewer the noise is not known: the first may be a lucky draw
    if some <= values[0] + num_data or end <= values[0] + 10 * float((last - end).abs().median()):
        return ""
    return (
        f"the loss ended at {end:.6g}, above the {values[0]:.6g} at which it began: the steps were too large. Lower the"
        " learning rate, or clip gradients (clip_norm=...)."
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
