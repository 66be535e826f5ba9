"""Whether a step runs no code but torch's, Pyro's and this package's, which does the same every time.

A step is recorded twice and compared, because a user's model may draw from Python's or numpy's generators, count its
calls or read a clock. Where no code of a user runs, once is enough.
"""

import functools
import types
from collections.abc import Mapping

import torch
from pyro.poutine.runtime import _PYRO_STACK
from torch import Tensor, nn
from torch.nn.modules import module as hooks_of_all

_KNOWN = ("torch", "pyro", "pyro_dropout", "builtins", "collections")
_PLAIN = (Tensor, str, bytes, int, float, complex, type(None), torch.dtype, torch.device, torch.Size)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_known(*parts: object) -> bool:
    """Return whether models, guides, losses and optimisers run no code of a user.

    Example:
        >>> is_known(nn.Sequential(nn.Linear(1, 2), nn.ReLU())), is_known(nn.Linear(1, 2), lambda x: x)
        (True, False)
    """
    for_all = (hooks_of_all._global_forward_hooks, hooks_of_all._global_forward_pre_hooks)
    return not _PYRO_STACK and not any(for_all) and all(_walk(part, set()) for part in parts)


def _walk(part: object, seen: set[int]) -> bool:
    if isinstance(part, _PLAIN) or id(part) in seen:
        return True
    seen.add(id(part))
    if isinstance(part, Mapping):
        return all(_walk(each, seen) for each in part.values()) and _ours(type(part))
    if isinstance(part, list | tuple | set | frozenset):
        return all(_walk(each, seen) for each in part) and _ours(type(part))
    if isinstance(part, type):
        return _ours(part)
    if isinstance(part, functools.partial):
        return _walk((part.func, part.args, part.keywords), seen)
    if isinstance(part, types.FunctionType):
        kept = (part.__defaults__, part.__kwdefaults__)
        return _ours(part) and _walk(([cell.cell_contents for cell in part.__closure__ or ()], *kept), seen)
    if isinstance(part, types.MethodType):
        return _walk(part.__func__, seen) and _walk(part.__self__, seen)
    if isinstance(part, types.BuiltinFunctionType):
        return _ours(part)
    if isinstance(part, nn.Module) and any(part.__dict__.get(name) for name in _HOOKS):
        return False
    return _ours(type(part)) and _walk(getattr(part, "__dict__", {}), seen)


def _ours(thing: object) -> bool:
    """Whether a class or a function was written here, or in torch or Pyro."""
    return (getattr(thing, "__module__", None) or "builtins").split(".")[0] in _KNOWN
