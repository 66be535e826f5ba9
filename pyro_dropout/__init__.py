"""MC dropout as a Pyro guide, on one scale with the other posterior approximations of neural networks.

``__init__.pyi`` lists the public names. Each is imported when it is first used, so the command line shows its help
without waiting for torch.
"""

import gc as _gc
from importlib.util import find_spec as _find_spec
from typing import Any as _Any

import lazy_loader as _lazy_loader

from pyro_dropout.registry import FLOORS as _FLOORS

_find, _, __all__ = _lazy_loader.attach_stub(__name__, __file__)
_NEED_SKLEARN = ("DropoutClassifier", "DropoutRegressor")

if _find_spec("sklearn") is None:  # an optional extra: ``import *`` must not fail without it
    __all__ = [name for name in __all__ if name not in _NEED_SKLEARN]


def __getattr__(name: str) -> _Any:
    """Import a public name, or a subpackage, when it is first used."""
    from importlib import import_module

    if name == "__version__":
        return _version()
    if name not in (*__all__, *_FLOORS, *_NEED_SKLEARN):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{_suggestion(name)}", name=name)
    collects = _gc.isenabled()
    _gc.disable()  # an import makes no garbage, and a search for it among all of torch's objects takes long
    try:
        import_module(f"{__name__}.mathematics.divergence")  # registers our q(w) with torch's kl_divergence
        found = import_module(f"{__name__}.{name}") if name in _FLOORS else _find(name)
    except ModuleNotFoundError as missing:
        if name not in _NEED_SKLEARN:
            raise
        raise ImportError(f'{name} needs scikit-learn; pip install "pyro-dropout[sklearn]"') from missing
    finally:
        if collects:
            if not _gc.get_freeze_count():
                _gc.freeze()
                _gc.unfreeze()  # both together: what is there counts as old, and is not searched again soon
            _gc.enable()
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """Return the names that are loaded and those that would be on first use."""
    return sorted({*globals(), *__all__, *_FLOORS, "__version__"})


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("pyro-dropout")
    except PackageNotFoundError:  # a source tree that was never installed
        return "0+source"


def _suggestion(name: str) -> str:
    """Return a question with the public name that is spelt most like this one, if there is one."""
    from difflib import get_close_matches

    known = [*__all__, *_FLOORS]
    close = [] if name.startswith("_") else get_close_matches(name, known, n=1)
    close = close or [each for each in known if each.lower() == name.lower()]
    return f"; did you mean {close[0]!r}?" if close else ""
