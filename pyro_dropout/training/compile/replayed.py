"""The kernels of a compiled program alone, for loops of very short calls on a CPU.

Around its kernels a compiled program checks its inputs, makes buffers and frees them, about a microsecond for each. For
a small network that is more than the kernels take. Where all inputs are the same tensors at every call, later calls run
the kernels, matrix products and random draws alone, in the memory that the first call has used.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

Call = tuple[Callable[..., object], tuple[Any, ...], dict[str, Any]]

# A program that can be replayed: it names its inputs, makes and renames buffers, calls kernels, and returns buffers.
_LINES = re.compile(
    r"(?:arg\w+(?:, )?)+ = args|args\.clear\(\)|#.*|del \w+|assert_\w+\(.*\)|"
    r"cpp_fused\w*\(.*\)|extern_kernels\.(?:mm|addmm|bmm|baddbmm)\(.*, out=.*\)|"
    r"\w+ = torch\.ops\.aten\.(?:rand|randn)\.default\(.*device=device\(type='cpu'\).*\)|"
    r"\w+ = (?:empty_strided_cpu\(.*\)|reinterpret_tensor\(.*\)|\w+)(?:; del \w+)?(?:  #.*)?|"
    r"return \((?:buf\w+, )*(?:buf\w+)?\)|"
)
_KERNEL = re.compile(r"^ +(cpp_fused\w*)\(", re.MULTILINE)


def replayable(inner: Any) -> bool:
    """Whether what inductor has made can be replayed: it does nothing but call kernels, and its source is known."""
    call = getattr(inner, "current_callable", None)
    lines = _body(inner)
    known = bool(lines) and all(_LINES.fullmatch(line.strip()) for line in lines)
    return known and hasattr(getattr(call, "__func__", None), "__globals__")


def _body(inner: Any) -> list[str]:
    """Return the lines of a program's function; none if there is no source."""
    _, found, rest = str(getattr(inner, "source_code", "")).partition("def call(self, args):\n")
    lines = rest.splitlines() if found else []
    end = next((k for k, line in enumerate(lines) if line and not line.startswith("  ")), len(lines))
    return lines[:end]


class Replayed:
    """A compiled program whose inputs are the same tensors at every call.

    Args:
        call: runs the whole program, and returns its outputs. Later calls run its kernels alone, if it does nothing
            else, and write over these outputs.
        found: the kernels, with what they are called with, and the outputs, where they are known before the first call.
        note: is given the same after a first call, if later ones run the kernels alone.

    Attributes:
        alone: whether they do; not known before the first call.

    Example:
        >>> import torch
        >>> from pyro_dropout.training.compile.replayed import Replayed
        >>> run = Replayed(lambda: [torch.ones(2)])  # nothing that inductor has made
        >>> run(), run.alone
        ([tensor([1., 1.])], False)
    """

    def __init__(
        self,
        call: Callable[[], list[Tensor]],
        found: tuple[list[Call], list[Tensor]] | None = None,
        note: Callable[[list[Call], list[Tensor]], None] | None = None,
    ) -> None:
        self._call, self.alone, self._called, self._note = call, found is not None, int(found is not None), note
        self._kept, self._last = found or ([], [])

    def __call__(self) -> list[Tensor]:
        """Run the program."""
        if not self._called:
            return self._first()
        if not self.alone:
            return self._call()
        for kernel, inputs, named in self._kept:
            kernel(*inputs, **named)
        return self._last

    def _first(self) -> list[Tensor]:
        """Run the whole program; what inductor has made of it may come from a cache, and is found as it runs."""
        from torch._inductor.output_code import CompiledFxGraph

        real = CompiledFxGraph.__call__

        def noted(inner: Any, inputs: Any) -> Any:
            self._called += 1
            self.alone = self._called == 1 and replayable(inner)
            if not self.alone:
                return real(inner, inputs)
            with self._noted(inner):
                return real(inner, inputs)

        try:
            CompiledFxGraph.__call__ = noted  # type: ignore[method-assign, assignment]
            self._last = self._call()
        finally:
            CompiledFxGraph.__call__ = real  # type: ignore[method-assign]
        self._called += 1
        if self.alone and self._note is not None:
            self._note(self._kept, self._last)
        return self._last

    @contextmanager
    def _noted(self, inner: Any) -> Iterator[None]:
        """Within this context the kernels of a program are kept, with what they are called with."""
        around = inner.current_callable.__func__.__globals__
        names = dict.fromkeys(_KERNEL.findall("\n".join(_body(inner))))
        ours: dict[str, Any] = {name: self._noting(around[name]) for name in names}
        if "extern_kernels" in around:
            ours["extern_kernels"] = _Externs(around["extern_kernels"], self._noting)
        ours["torch"] = _Torch(self._drawing)
        real = {name: around[name] for name in ours}
        try:
            around.update(ours)
            yield
        finally:
            around.update(real)

    def _noting(self, kernel: Callable[..., object]) -> Callable[..., object]:
        def noted(*inputs: Any, **named: Any) -> object:
            self._kept.append((kernel, inputs, named))
            return kernel(*inputs, **named)

        return noted

    def _drawing(self, name: str) -> Callable[..., Tensor]:
        """Return a function that draws as torch's does, and is later drawn into the same tensor."""

        def drawn(*size: Any, **options: Any) -> Tensor:
            found: Tensor = getattr(torch.ops.aten, name).default(*size, **options)
            self._kept.append((found.uniform_ if name == "rand" else found.normal_, (), {}))
            return found

        return drawn


class _Externs:
    """The matrix products that a program calls, noted."""

    def __init__(self, real: Any, noting: Callable[..., Any]) -> None:
        self._real, self._noting = real, noting

    def __getattr__(self, name: str) -> Any:
        return self._noting(getattr(self._real, name))


class _Torch:
    """torch, whose random draws are noted."""

    def __init__(self, drawing: Callable[[str], Callable[..., Tensor]]) -> None:
        draws = {name: SimpleNamespace(default=drawing(name)) for name in ("rand", "randn")}
        self.ops = SimpleNamespace(aten=SimpleNamespace(**draws))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)
