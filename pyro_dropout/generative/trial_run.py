"""Run a model without side effects on random states, buffers and the modes of its networks."""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from pyro_dropout.engines.torch_internals import disable_current_modes, is_mapped, is_traced, without_torch_function
from pyro_dropout.generative.inputs import AnyInputs
from pyro_dropout.generative.process_state import RUNNING, forked

# The modules that a program has called that is no module itself, in order.
_CALLED = WeakIdKeyDictionary()
_CHECKED: "weakref.WeakKeyDictionary[nn.Module, set[object]]" = weakref.WeakKeyDictionary()


def checked_with(model: nn.Module) -> set[object]:
    """Return what a model has been checked with; not an attribute, which would be a part of the model."""
    return _CHECKED.setdefault(model, set())


@contextlib.contextmanager
def calls_noted(*roots: object, before: Callable[[nn.Module], object] | None = None) -> Iterator[None]:
    """Within this context, note which modules are called by those ``roots`` that are none; ``before`` sees new ones."""
    programs = [owner_of(root) for root in roots if callable(root)]
    programs = [program for program in programs if not isinstance(program, nn.Module)]
    if not programs:
        yield
        return
    known = {id(module) for module in holders_of(*roots)}

    def meet(module: nn.Module, _: object) -> None:
        if id(module) not in known:
            known.add(id(module))
            for program in programs:
                _CALLED.setdefault(program, []).append(weakref.ref(module))
            if before is not None:
                with disable_current_modes(), without_torch_function():
                    before(module)

    hook = register_module_forward_pre_hook(meet)
    try:
        yield
    finally:
        hook.remove()


@contextlib.contextmanager
def quietly(*roots: object) -> Iterator[None]:
    """Restore random states and buffers on leaving the context: those of ``roots``, and of modules that they call."""
    kept: list[tuple[dict[str, Tensor | None], str, Tensor, Tensor]] = []

    def keep(module: nn.Module) -> None:
        own = module._buffers
        kept.extend((own, key, each, each.detach().clone()) for key, each in own.items() if each is not None)

    with forked():
        for module in holders_of(*roots):
            keep(module)
        try:
            with calls_noted(*roots, before=keep):
                yield
        finally:
            with torch.no_grad():
                for holder, key, buffer, value in kept:
                    holder[key] = buffer.copy_(value)  # a run may have changed it, or assigned another


@contextlib.contextmanager
def aside(*roots: object) -> Iterator[None]:
    """Within this context ``roots`` have copies of their buffers, so that gradients of a run before it are still right.

    No gradients are recorded, and random states are restored.
    """
    holders = [module._buffers for module in holders_of(*roots)]
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
def in_mode(modules: Iterable[nn.Module], training: bool) -> Iterator[None]:
    """Within this context these modules are in training mode, or in evaluation mode."""
    changed = [module for module in modules if module.training is not training]
    try:
        for module in changed:
            object.__setattr__(module, "training", training)  # nn.Module's own takes many times as long
        yield
    finally:
        for module in changed:
            object.__setattr__(module, "training", not training)


@contextlib.contextmanager
def evaluating(*roots: object) -> Iterator[None]:
    """Within this context networks are in evaluation mode and record no gradients."""
    with RUNNING, torch.no_grad(), in_mode(modules_of(*roots), False):
        yield


def can_run(x: object) -> bool:
    """Whether a network can be run with x to look at it: not while its operations are recorded or mapped."""
    return isinstance(x, AnyInputs) and not (is_traced() or is_mapped() or torch.compiler.is_compiling())


def owner_of(root: object) -> object:
    """Return the object that a bound method belongs to; anything else is returned as it is."""
    return getattr(root, "__self__", root)


def modules_of(*roots: object) -> Iterator[nn.Module]:
    """Yield every submodule of those ``roots`` that are modules, or methods of modules."""
    for owner in map(owner_of, roots):
        if isinstance(owner, nn.Module):
            yield from owner.modules()


def holders_of(*roots: object) -> Iterator[nn.Module]:
    """Yield the modules whose buffers a run may change: those of ``roots``, then those that they were seen to call."""
    called = (reference() for root in filter(callable, roots) for reference in _CALLED.get(owner_of(root), ()))
    found = {id(module): module for module in (*modules_of(*roots), *called) if module is not None}
    yield from found.values()
