"""Run a model without side effects on random states, buffers and the modes of its networks."""

import contextlib
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)

from pyro_dropout.generative.inputs import AnyInputs
from pyro_dropout.generative.random_state import forked
from pyro_dropout.generative.turns import RUNNING
from pyro_dropout.mathematics.whole_sums import is_traced

# What a run that computes shapes alone raises where it would have to know values, or does not know an operation.
_WITHOUT_VALUES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)


@contextlib.contextmanager
def quietly(*roots: object) -> Iterator[None]:
    """Restore random states and the buffers of ``roots`` on leaving the context."""
    buffers = [buffer for module in modules_of(*roots) for buffer in module._buffers.values() if buffer is not None]
    with forked():
        kept = [buffer.detach().clone() for buffer in buffers]
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in zip(buffers, kept, strict=True):
                    buffer.copy_(value)


@contextlib.contextmanager
def aside(*roots: object) -> Iterator[None]:
    """Within this context ``roots`` have copies of their buffers, so that gradients of a run before it are still right.

    No gradients are recorded, and random states are restored.
    """
    holders = [module._buffers for module in modules_of(*roots)]
    with forked(), torch.no_grad():
        kept = [dict(holder) for holder in holders]
        try:
            for holder in holders:
                holder.update({key: None if value is None else value.clone() for key, value in holder.items()})
            yield
        finally:
            for holder, values in zip(holders, kept, strict=True):
                holder.update(values)


@contextlib.contextmanager
def evaluating(*roots: object) -> Iterator[None]:
    """Within this context networks are in evaluation mode and record no gradients."""
    modules = list(modules_of(*roots))
    with RUNNING, torch.no_grad():
        modes = [module.training for module in modules]
        try:
            _set_modes(modules, [False] * len(modules))
            yield
        finally:
            _set_modes(modules, modes)


def _set_modes(modules: list[nn.Module], modes: list[bool]) -> None:
    for module, mode in zip(modules, modes, strict=True):
        if module.training != mode:
            object.__setattr__(module, "training", mode)  # nn.Module's own takes many times as long


def can_run(x: object) -> bool:
    """Whether a network can be run with x to look at it: not while its operations are recorded or mapped."""
    recorded = is_traced() or torch._C._get_tracing_state() is not None
    mapped = torch._C._functorch.peek_interpreter_stack() is not None
    return isinstance(x, AnyInputs) and not recorded and not mapped and not torch.compiler.is_compiling()


@contextlib.contextmanager
def shapes_alone(on_gpu: bool) -> Iterator[None]:
    """On a GPU, operations within this context compute shapes and nothing else.

    A model that is run with other data than its own may look up what is not there. On a CPU that is an error like any
    other; on a GPU the process could not use it any more.
    """
    if not on_gpu:
        yield
        return
    with warnings.catch_warnings(), FakeTensorMode(allow_non_fake_inputs=True):
        warnings.filterwarnings("ignore", message="The .grad attribute")  # which is read of every tensor
        yield


def run_for_shapes(run: Callable[[], object], on_gpu: bool) -> None:
    """Run a network to see which shapes its inputs have; on a GPU without values, if it does not read any."""
    try:
        with shapes_alone(on_gpu):
            run()
    except Exception as error:
        if not on_gpu or not _needs_values(error):
            raise
        run()


def _needs_values(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, _WITHOUT_VALUES):
            return True
        error = error.__cause__
    return False


def modules_of(*roots: object) -> Iterator[nn.Module]:
    """Yield every submodule of those ``roots`` that are modules."""
    for root in roots:
        if isinstance(root, nn.Module):
            yield from root.modules()
