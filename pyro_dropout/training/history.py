"""The result of a training run: the loss at every step, its speed, and the error that is raised when it diverges."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.guides.summary import card
from pyro_dropout.protocols import Axes
from pyro_dropout.training.out_of_memory import is_out_of_memory

if TYPE_CHECKING:
    from pyro_dropout.training.collapse import Learned
    from pyro_dropout.training.unfinished import StillFalling


REMEDY = "Lower the learning rate, clip gradients (clip_norm=...), or look for values in x and y that are not finite."


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
    unfinished: "StillFalling | None" = None

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
