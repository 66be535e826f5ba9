"""Registers trained tensors in Pyro's parameter store, under unique names that are the same in every process.

The first ``AutoMeanField`` of a process is "AutoMeanField" in the store, the second "AutoMeanField_1": one script finds
what another has saved, and two guides never train each other's parameters. A value in the store that no model or guide
of this process has registered was loaded, and takes precedence, as in Pyro. What an owner has registered leaves the
store when the owner is gone.
"""

import contextlib
import itertools
import weakref
from collections.abc import Iterable, Mapping

import pyro
import torch
from pyro.poutine.runtime import effectful
from torch import Tensor, nn
from torch.distributions import constraints
from torch.utils.weak import WeakIdKeyDictionary

from pyro_dropout.errors import ShapeError
from pyro_dropout.generative.process_state import RUNNING

Held = dict[str, "weakref.ref[Tensor]"]  # by name in the store
# The parameters in the store that a model or guide of this process has registered.
_TOLD = WeakIdKeyDictionary()
# The names of the parameters that a program has met, such as those of a network that it registers with pyro.module.
_MET = WeakIdKeyDictionary()
_NAMES: "weakref.WeakKeyDictionary[nn.Module, str]" = weakref.WeakKeyDictionary()
# What each owner has registered, and what owners that are gone had registered and has not left the store yet.
_HELD: "weakref.WeakKeyDictionary[nn.Module, Held]" = weakref.WeakKeyDictionary()
_LEFT: Held = {}


def store_name(owner: nn.Module, kind: str, parameters: Mapping[str, Tensor]) -> str:
    """Return the prefix of an owner's names in the store: its ``kind``, with a number where others have taken that."""
    held = pyro.get_param_store()._params

    def free(prefix: str) -> bool:
        present = ((held.get(f"{prefix}.{name}"), value) for name, value in parameters.items())
        return not any(there is not None and there is not value and there in _TOLD for there, value in present)

    known = _NAMES.get(owner, "")
    prefixes = itertools.chain([known] * known.startswith(kind), [kind], (f"{kind}_{n}" for n in itertools.count(1)))
    _NAMES[owner] = found = next(filter(free, filter(None, prefixes)))
    return found


def tell_pyro(owner: nn.Module, parameters: Mapping[str, Tensor], kind: str = "") -> None:
    """Register each trained parameter of a module with Pyro, so that SVI finds it; a loaded value replaces its own.

    Their names in the store begin with ``kind``, by default the name of the owner's class.
    """
    trained = {name: value for name, value in parameters.items() if value.requires_grad}
    if not trained:
        return
    prefix = store_name(owner, kind or type(owner).__name__, trained)
    store, local = pyro.get_param_store(), pyro.settings.get("module_local_params")
    if _LEFT and not local:
        _clear()
    for name, value in trained.items():
        full = f"{prefix}.{name}"
        present = None if local else store._params.get(full)
        if present is not None and present is not value:
            value, present = _taken_over(owner, full, value, present), None
        if present is None and not local:
            # Not by ``pyro.param(full, value)``: the store would keep a copy of a tensor that is not contiguous.
            store._constraints[full] = constraints.real
            store._params[full] = value
            store._param_to_name[value] = full
            _TOLD[value] = True
            if owner not in _HELD:
                _HELD[owner] = held = Held()
                weakref.finalize(owner, _let_go, held).atexit = False
            _HELD[owner][full] = weakref.ref(value)
        tell_again(full, value)


def _let_go(held: Held) -> None:
    """Take what an owner had registered out of the store, now or, if a model is running, before the next one does."""
    _LEFT.update(held)
    if RUNNING.take_if_free():
        try:
            _clear()
        finally:
            RUNNING.__exit__()


def _clear() -> None:
    """Take out of the store what owners had registered that are gone; what another has replaced stays.

    A store that is set aside (``scope``) may still hold a value, which is then taken out later.
    """
    store = pyro.get_param_store()
    for full, reference in list(_LEFT.items()):
        value = reference()
        if value is not None and store._params.get(full) is not value:
            continue
        if value is not None:
            del store._params[full], store._constraints[full]
            if store._param_to_name.get(value) == full:
                del store._param_to_name[value]
        _LEFT.pop(full, None)


def forget(parameters: Iterable[Tensor]) -> None:
    """Remove parameters from Pyro's store."""
    held, store = {id(value) for value in parameters}, pyro.get_param_store()
    for name in [name for name, value in store._params.items() if id(value) in held]:
        del store[name]


def note_names(program: object, names: Iterable[str]) -> None:
    """Note which parameters of Pyro's store a run of a program has met."""
    _MET.setdefault(program, {}).update(dict.fromkeys(names))


def met_by(*programs: object) -> dict[str, Tensor]:
    """Return the parameters in Pyro's store that runs of these programs have met, by name."""
    store = pyro.get_param_store()._params
    names: dict[str, None] = {}
    for program in programs:
        with contextlib.suppress(TypeError):  # what takes no weak reference, such as None, is no program
            names |= _MET.get(program, {})
    return {name: store[name] for name in names if name in store}


def is_told(value: Tensor) -> bool:
    """Whether a model or guide of this package has registered a parameter."""
    return value in _TOLD


def tell_again(full: str, value: Tensor) -> None:
    """Report a parameter, under its name in the store, to the handlers of ``pyro.param``."""
    if not pyro.settings.get("module_local_params"):
        pyro.param(full)
        return
    _TOLD[value] = True
    value.unconstrained = weakref.ref(value)  # type: ignore[attr-defined]
    effectful(type="param")(lambda *_, **__: value)(full, value, constraint=constraints.real, name=full)


def _taken_over(owner: nn.Module, full: str, value: Tensor, loaded: Tensor) -> nn.Parameter:
    """Replace the owner's parameter by the value loaded into the store, and return it."""
    if loaded.shape != value.shape:
        raise ShapeError(
            f"the parameter store holds {full!r} with shape {tuple(loaded.shape)}, but here it has shape"
            f" {tuple(value.shape)}: it was saved from another model or guide. Call pyro.clear_param_store() to start"
            " afresh."
        )
    taken = loaded.detach().to(value.device, value.dtype)
    same = isinstance(loaded, nn.Parameter) and taken.data_ptr() == loaded.data_ptr()
    parameter = loaded if isinstance(loaded, nn.Parameter) and same else nn.Parameter(taken)
    for module in owner.modules():  # tied parameters have several places
        places = [key for key, held in module._parameters.items() if held is value]
        module._parameters.update(dict.fromkeys(places, parameter))
    return parameter


def buffered(value: float | Tensor) -> Tensor:
    """Return a number as a tensor: hyper-parameters are buffers, so that replicas can have their own.

    In float64, so that a model made in float32 and moved to float64 keeps the number's full precision.
    """
    return value if isinstance(value, Tensor) else torch.as_tensor(value, dtype=torch.float64)
