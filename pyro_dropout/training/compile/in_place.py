"""A function of tensors, compiled such that it writes its results over its inputs: for loops of very short calls.

A call of a compiled program takes about a microsecond for each tensor that it makes or passes on, which is more than
small kernels take themselves. A loop that hands the results of one call to the next needs none of that: results have
the places of inputs, and where the whole program is kernels for the CPU, later calls run these alone, in the memory
that the first call has used.
"""

import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from pyro_dropout.training.compile.kernel_folder import check_compiler_folder

Writes = Callable[..., Tensor]

# A program of kernels alone: it names its inputs, makes and renames buffers, calls kernels, and returns.
_PLAIN = re.compile(r"(?:arg\w+(?:, )?)+ = args|args\.clear\(\)|#.*|del \w+|(cpp_fused\w*)\(.*\)|return \(\w+, \)|")
_BUFFER = re.compile(r"\w+ = (?:empty_strided_cpu\(.*\)|reinterpret_tensor\(buf.*\)|\w+)(?:; del \w+)?(?:  #.*)?")


def writing(function: Callable[..., list[Tensor]], state: list[Tensor], *others: Tensor) -> Writes:
    """Return a function of ``others``, compiled, that writes its results over ``state`` and returns the last one.

    Args:
        function: a function of the state and the others. Its first results have the places of the first tensors of the
            state, and it has one result more.
        state: contiguous tensors, of which no two share memory. They are read and written by every call.
        others: an example of the other inputs.

    Returns:
        The function. What it returns is written over by its next call.

    Example:
        >>> x = torch.zeros(3)
        >>> add = writing(lambda x, y: [x + y, x.sum()], [x], torch.ones(3))  # doctest: +SKIP
        >>> add(torch.ones(3)).item(), add(torch.ones(3)).item(), x  # doctest: +SKIP
        (0.0, 3.0, tensor([2., 2., 2.]))
    """
    with torch.no_grad(), warnings.catch_warnings():  # about torch's own internals
        warnings.simplefilter("ignore")
        compiled = _compiled(function, state, others)
    names = _kernels(compiled)

    def plain(*others: Tensor) -> Tensor:
        (last,) = compiled([*state, *others])
        return last  # type: ignore[no-any-return]

    return plain if names is None else _Kernels(compiled.current_callable, names, state)


def _compiled(function: Callable[..., list[Tensor]], state: list[Tensor], others: Sequence[Tensor]) -> Any:
    """Return what inductor makes of a function whose results are written over its inputs."""
    import torch._inductor.config as inductor
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table

    check_compiler_folder()

    def over(*values: Tensor) -> list[Tensor]:
        *results, last = function(*values)
        for place, result in zip(values, results, strict=False):
            if result is not place:
                place.copy_(result)
        return [last]

    inputs = [*state, *others]
    # Inductor looks a program up on disk only if told how shapes were guessed; here none was.
    fake = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True, allow_non_fake_inputs=True)
    with tracing(TracingContext(fake)), inductor.patch(size_asserts=False, alignment_asserts=False):
        copies = [value.clone() for value in inputs]  # what is recorded is also run
        whole = torch.func.functionalize(over, remove="mutations")
        graph = make_fx(whole, decomposition_table=select_decomp_table())(*copies)
        graph.graph.eliminate_dead_code()
        graph.recompile()
        FakeTensorProp(graph, fake).propagate(*copies)
        return compile_fx_inner(graph, [fake.from_tensor(value) for value in inputs])


def _kernels(compiled: Any) -> list[str] | None:
    """Return the names of the kernels that a program calls; None if it does anything else, or cannot be read."""
    source, call = str(getattr(compiled, "source_code", "")), getattr(compiled, "current_callable", None)
    start = source.find("def call(self, args):\n")
    if start < 0 or not hasattr(getattr(call, "__func__", None), "__globals__"):
        return None
    names: list[str] = []
    for line in source[start:].splitlines()[1:]:
        if line and not line.startswith("  "):
            break
        found = _PLAIN.fullmatch(line.strip())
        if found is None and _BUFFER.fullmatch(line.strip()) is None:
            return None
        if found is not None and found.group(1):
            names.append(found.group(1))
    return names if len(names) == len(set(names)) > 0 else None


class _Kernels:
    """Runs a program once, and then its kernels alone, with the tensors that they had."""

    def __init__(self, call: Any, names: list[str], state: list[Tensor]) -> None:
        self._call, self._names, self._state = call, names, state
        self._kept: list[tuple[Any, list[Any], list[tuple[int, int]]]] | None = None
        self._last: Tensor = state[0]

    def __call__(self, *others: Tensor) -> Tensor:
        if self._kept is None:
            return self._first(others)
        for kernel, inputs, places in self._kept:
            for place, number in places:
                inputs[place] = others[number]
            kernel(*inputs)
        return self._last

    def _first(self, others: tuple[Tensor, ...]) -> Tensor:
        """Run the whole program, and keep the kernels with what they were called with."""
        around = self._call.__func__.__globals__
        real = {name: around[name] for name in self._names}
        kept: list[tuple[Any, list[Any], list[tuple[int, int]]]] = []

        def noting(kernel: Any) -> Any:
            def noted(*inputs: Any) -> None:
                places = [(i, k) for i, value in enumerate(inputs) for k, other in enumerate(others) if value is other]
                kept.append((kernel, list(inputs), places))
                kernel(*inputs)

            return noted

        try:
            around.update({name: noting(kernel) for name, kernel in real.items()})
            (last,) = self._call([*self._state, *others])
        finally:
            around.update(real)
        self._last, self._kept = last, kept
        return self._last
