"""What torch's operations do with their arguments: which they read, which they change, and which rows they mix.

torch gives a handler only the function and its arguments; the rest of what it needs to know is here.
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType
from typing import Any, Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Distribution, Transform

Operation = Callable[..., Any]  # a function of torch's
Args = tuple[Any, ...]  # what it is called with
Kwargs = Mapping[str, Any]
Note = TypeVar("Note")

# Operations that read only the shape of their first argument, or of all but the first, and not its values.
_NOT_THE_FIRST = {"zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like"}
_NOT_THE_FIRST |= {"new_zeros", "new_ones", "new_empty", "new_full", "new_tensor"}
_ONLY_THE_FIRST = {"expand_as", "view_as", "reshape_as", "type_as", "to"}
# Operations that return Python numbers; and those of them with which distributions check their parameters.
_CHECKS = {"__bool__", "is_nonzero", "equal", "allclose"}
_READS = _CHECKS | {"item", "tolist", "numpy", "__float__", "__int__", "__index__", "__complex__", "__array__"}
# Layers that update their own statistics, which are not part of their output.
STATISTICS = (F.batch_norm, F.instance_norm, torch.batch_norm, torch.instance_norm)
# Operations that mix rows without changing the shape when they run along the first dimension.
_ALONG = {"softmax", "log_softmax", "cumsum", "cumprod", "logcumsumexp", "flip", "roll", "sort", "argsort"}
_ALONG |= {"gather", "index_select", "take_along_dim"}
_REDUCTIONS = {"sum", "mean", "prod", "std", "var", "norm", "logsumexp", "max", "min", "amax", "amin", "median", "all"}
_REDUCTIONS |= {"nansum", "nanmean", "any", "argmax", "argmin", "quantile", "mode"}
_IN_PLACE = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")}
_IN_PLACE |= {"__ilshift__", "__irshift__", "__setitem__"}
# What is asked of a tensor that its values do not decide: answers are no tensors, and nothing is made from a draw.
_ASKED = ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "is_sparse", "is_nested", "is_cuda")
QUESTIONS = {getattr(getattr(Tensor, name), "__get__") for name in _ASKED}  # noqa: B009 - properties
QUESTIONS |= {Tensor.dim, Tensor.size, Tensor.stride, Tensor.numel, Tensor.__len__, Tensor.is_contiguous}
QUESTIONS |= {Tensor.is_complex, Tensor.is_floating_point, Tensor.element_size}
PRODUCTS = {"matmul", "mm", "__matmul__", "linear", "mv", "dot"}
_DISTRIBUTIONS = ("torch.distributions", "pyro.distributions")


class Notes(Generic[Note]):
    """Notes on tensors, by identity: stored beside them, and dropped with their last use.

    ``torch.utils.weak.WeakIdKeyDictionary`` does the same, with slower lookups.
    """

    def __init__(self) -> None:
        self._notes: dict[int, tuple[weakref.ref[Tensor], Note]] = {}

    def get(self, value: Tensor) -> Note | None:
        """Return the note on a tensor, or None."""
        found = self._notes.get(id(value))
        return None if found is None or found[0]() is not value else found[1]

    def __setitem__(self, value: Tensor, note: Note) -> None:
        self._notes[id(value)] = (weakref.ref(value), note)


def tensors(values: Iterable[object]) -> Iterator[Tensor]:
    """Yield the tensors among ``values``, and in lists and tuples among them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors(value)


def tensors_in(values: Iterable[object], seen: set[int] | None = None) -> Iterator[Tensor]:
    """Yield all tensors that distributions are made of, including those in their transforms and collections."""
    seen = set() if seen is None else seen
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Distribution | Transform | list | tuple | dict) and id(value) not in seen:
            seen.add(id(value))
            inside = value if isinstance(value, list | tuple) else value if isinstance(value, dict) else vars(value)
            yield from tensors_in(inside.values() if isinstance(inside, dict) else inside, seen)


def name_of(func: Operation) -> str:
    """Return the name of an operation, for messages."""
    return str(getattr(func, "__qualname__", None) or getattr(func, "__name__", func))


def carried(func: Operation, args: Args, kwargs: Kwargs) -> Iterator[Tensor]:
    """Yield the tensors whose values an operation uses, and not only their shapes or types."""
    name = getattr(func, "__name__", "")
    if name in _NOT_THE_FIRST:
        return tensors((*args[1:], *kwargs.values()))
    return tensors(args[:1] if name in _ONLY_THE_FIRST else (*args, *kwargs.values()))


def written_by_name(name: str, args: Args, kwargs: Kwargs) -> list[Tensor]:
    """Return the tensors that an operation changes in place, judging by its name; version counters show the others."""
    in_place = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    in_place = in_place or (name == "__set__" and isinstance(args[-1], Tensor))  # x.data = w
    return [*tensors(args[:1] if in_place else ()), *tensors((kwargs.get("out"),))]


def version(value: Tensor) -> int:
    """Return a number that grows with every in-place change; always 0 for tensors without a version counter."""
    return 0 if value.is_inference() else int(value._version)


def along_rows(name: str, subject: Tensor, args: Args, kwargs: Kwargs) -> bool:
    """Whether an operation combines the rows of its input ``subject``, or reorders them."""
    if name not in _ALONG and name not in _REDUCTIONS:
        return False
    given = kwargs.get("dim", kwargs.get("dims"))
    if given is None:
        if any(isinstance(each, Tensor) and each is not subject for each in args):  # torch.max(a, b)
            return name in _ALONG
        numbers = [each for each in args if isinstance(each, int | tuple | list) and not isinstance(each, bool)]
        if not numbers and name in _REDUCTIONS:
            return True
        given = (numbers[-1] if name == "roll" else numbers[0]) if numbers else -1
    dims = given if isinstance(given, tuple | list) else (given,)
    return any(d in (0, -subject.dim()) for d in dims)


def in_a_distribution() -> bool:
    """Whether an operation is one of a distribution's own, on its parameters."""
    return any(name.startswith(_DISTRIBUTIONS) for name in _callers())


def _callers() -> Iterator[str]:
    """Yield the modules on the call stack, innermost first, as far as a distribution may call torch's operations."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(15):
        if frame is None:
            return
        yield str(frame.f_globals.get("__name__"))
        frame = frame.f_back


def reads_numbers(name: str, only_in_a_check: bool) -> bool:
    """Whether an operation gives the model Python numbers; ``only_in_a_check`` leaves out yes-or-no questions."""
    if name not in _READS:
        return False
    # Pyro's losses sum what the model returned, and check values; the model reads nothing there.
    asks = next((name for name in _callers() if not name.startswith(("pyro_dropout.", "jaxtyping", "typeguard"))), "")
    return not asks.startswith(("pyro.", *_DISTRIBUTIONS)) and not (only_in_a_check and name in _CHECKS)
