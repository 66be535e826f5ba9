"""A training run whose steps kernels of this package take, many at a time; in all else it is one as any other."""

import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from typing import Any, TypeVar

import torch
from torch import Tensor

from pyro_dropout.engines.decision import HowCompiled
from pyro_dropout.generative.precision import precision_now
from pyro_dropout.generative.standardised import Standardised
from pyro_dropout.protocols import Record
from pyro_dropout.training.batches import CHAIN, Batches
from pyro_dropout.training.compile.functional import Buffers, Parameters
from pyro_dropout.training.one_kernel.dropout_network import DropoutNetwork, NotTakenError
from pyro_dropout.training.one_kernel.fused_steps import FusedSteps
from pyro_dropout.training.one_kernel.small_network import small_network
from pyro_dropout.training.optimisers import Update
from pyro_dropout.training.runner import TrainingRun
from pyro_dropout.training.wide_kernels.wide_network import wide_network
from pyro_dropout.training.wide_kernels.wide_steps import WideSteps

Run = TypeVar("Run", bound=TrainingRun)


class FusedRun(TrainingRun):
    """A training run whose steps one kernel takes, or, of a wide network, a few for each layer.

    Args:
        network: what the kernel has to know.
        values: the parameters to start from.
        update: the optimiser, Adam.
        data: returns all inputs and all targets, as they are now.
        buffers: settings of model and guide.
        write: puts parameters back into their owners.
        batch: points of a step.
        num_data: points in all.
        lr: learning rates, one for each network, if there are several.
        rows: the rows that each network sees at every step, without batches.
        batches: where mini-batches come from; None for all data at every step.
        wide: whether the network is wide.
    """

    def __init__(
        self,
        network: DropoutNetwork,
        values: list[Tensor],
        update: Update,
        data: Callable[[], tuple[Tensor, Tensor]],
        buffers: list[Tensor],
        *,
        write: Callable[[list[Tensor]], None],
        batch: int,
        num_data: int,
        lr: Tensor | None = None,
        rows: Tensor | None = None,
        batches: Batches | None = None,
        wide: bool = False,
    ) -> None:
        super().__init__(_no_step, values, update, write=write, lr=lr, batches=batches, compile=False)
        start = time.perf_counter()
        state = update.start(values)
        ordered = batches is not None
        kind = WideSteps if wide else FusedSteps
        self._fused = kind(network, values, state, self.t, self.lr, data, buffers, batch, num_data, rows, ordered)
        self._take_over()
        self.compile_seconds = time.perf_counter() - start

    def _take_over(self) -> None:
        *self.leaves, self.t = self._fused.everything

    @property
    def chained(self) -> bool:
        """Yes: several steps run at a time."""
        return True

    @property
    def compiled(self) -> bool:
        """Yes."""
        return True

    @property
    def engine(self) -> str:
        """Kernels of this package."""
        return "kernels"

    def advance(self, steps: int) -> Tensor:
        """Take ``steps`` steps, or fewer but at least one; return the loss before each."""
        count = min(steps, CHAIN)
        for mine, theirs in zip(self._fused.everything, [*self.leaves, self.t], strict=True):
            if mine is not theirs:  # parameters or a state that were restored
                mine.copy_(theirs)
        order = self._batches.take(count) if isinstance(self._batches, Batches) else None
        losses = self._fused.advance(count, order)
        self._take_over()
        return losses

    def state(self) -> tuple[dict[str, Tensor], Record]:
        """Return everything that later steps depend on, the random numbers of the kernel included."""
        found, rest = super().state()
        return {**found, "stream": self._fused.stream}, rest

    def set_state(self, tensors: dict[str, Tensor], rest: Record) -> None:
        """Restore a state; one of steps that were compiled otherwise has no random numbers of the kernel."""
        super().set_state(tensors, rest)
        if "stream" in tensors:
            self._fused.stream.copy_(tensors["stream"])


def _no_step(*inputs: object) -> tuple[list[Tensor], list[list[Tensor]], Tensor]:
    raise NotImplementedError("the kernel takes all steps")


def is_possible(compile: HowCompiled, device: torch.device) -> bool:
    """Whether steps are to be compiled, on a GPU for which Triton can do it."""
    wanted = compile is True or compile == "auto"
    return wanted and device.type == "cuda" and torch.version.cuda is not None and find_spec("triton") is not None


def fused_run(
    parts: tuple[object, object, object],
    update: Update,
    args: tuple[object, ...],
    parameters: Parameters,
    batch: int,
    batches: object,
    compile: HowCompiled,
) -> FusedRun | None:
    """Return the training of one guide by the kernel, or None where it has to be taken otherwise.

    Args:
        parts: model, guide and loss.
        update: the optimiser.
        args: the model's arguments: x, y and the number of data points.
        parameters: what is trained.
        batch: points of a step.
        batches: where mini-batches come from.
        compile: as in ``fit``.
    """
    values = parameters.values
    if not values or not is_possible(compile, values[0].device) or len(args) != 3:
        return None
    model, guide, loss = parts
    x, y, num_data = args
    if not isinstance(batches, Batches | None) or type(num_data) is not int:
        return None

    def made() -> FusedRun:
        network, wide = _looked_at(model, guide, loss, update, parameters, x, y, batch)
        assert isinstance(x, Tensor)
        assert isinstance(y, Tensor)
        data = _standard(model, x, y) if isinstance(model, Standardised) else lambda: (x, y)
        return FusedRun(
            network,
            values,
            update,
            data,
            Buffers(model, guide).values,
            write=parameters.write,
            batch=batch,
            num_data=num_data,
            batches=batches,
            wide=wide,
        )

    return _attempt(made)


def _looked_at(*training: Any) -> tuple[DropoutNetwork, bool]:
    """Return what the kernels have to know of a training, and whether they are those of wide layers."""
    if precision_now() != "float32":
        with suppress(NotTakenError):
            return wide_network(*training), True
    return small_network(*training), False


def _standard(model: Standardised, x: Tensor, y: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
    """Return what returns standardised data; they are computed again if something has changed."""
    tensors = [x, y, model.x_mean, model.x_std, model.y_mean, model.y_std]
    kept: list[tuple[list[int], tuple[Tensor, Tensor]]] = []

    def data() -> tuple[Tensor, Tensor]:
        seen = [tensor._version for tensor in tensors]
        if not kept or kept[0][0] != seen:
            kept[:] = [(seen, (model.standard_x(x).contiguous(), model.standard_y(y).contiguous()))]
        return kept[0][1]

    return data


def _attempt(made: Callable[[], Run]) -> Run | None:
    """Return what is made, or None if the kernel does not take it; a kernel that fails is warned of."""
    before = torch.get_rng_state()
    try:
        return made()
    except NotTakenError:
        torch.set_rng_state(before)
    except Exception as cause:
        torch.set_rng_state(before)
        warnings.warn(
            f"a kernel of this package failed ({type(cause).__name__}: {cause}), so torch's compiler takes the steps."
            " Please report this with your model.",
            stacklevel=2,
        )
    return None


def fused_fleet(
    kind: Callable[..., Run],
    first: tuple[object, object],
    loss: object,
    update: Update,
    parameters: Parameters,
    values: list[Tensor],
    data: tuple[object, object],
    settings: list[Tensor],
    rows: Tensor,
    batch: int,
    compile: HowCompiled,
    **how: Any,
) -> Run | None:
    """Return the training of a fleet by the kernel, or None where it has to be taken otherwise.

    Args:
        kind: the class of the run.
        first: the first replica.
        loss: the loss.
        update: the optimiser.
        parameters: what is trained in the first replica.
        values: the parameters of all replicas, stacked.
        data: all inputs and all targets.
        settings: the buffers of all replicas, stacked.
        rows: the rows of each replica, (replicas, points).
        batch: points of a step.
        compile: as in ``fit``.
        how: ``write``, ``lr`` and ``batches`` of the run.
    """
    small = CHAIN * len(rows) * batch < 2**31  # the kernel counts in 32 bits
    if not values or not small or not is_possible(compile, rows.device) or isinstance(first[0], Standardised):
        return None
    whole = rows if how["batches"] is None else None

    def made() -> Run:
        network = small_network(*first, loss, update, parameters, *data, batch)
        sizes = {"batch": batch, "num_data": rows.shape[1], "rows": whole}
        return kind(network, values, update, lambda: data, settings, **sizes, **how)

    return _attempt(made)
