"""A function of tensors, recorded once as a graph of tensor operations, and compiled by inductor or replayed.

make_fx or ``record`` turns a whole step, including Pyro's handlers, the gradient and the optimiser, into a graph of
plain tensor operations; inductor fuses that graph.
"""

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from pyro_dropout.engines.aliasing import owner
from pyro_dropout.engines.constants import Found, alike, lift_constants
from pyro_dropout.engines.fused_kernels import by_shape, updates_apart
from pyro_dropout.engines.kernel_folder import check_compiler_folder
from pyro_dropout.engines.recorder import RecordedMasks, reads_values, record
from pyro_dropout.engines.thin_products import rewrite_skinny_products, sum_products_with_vectors
from pyro_dropout.engines.torch_internals import (
    FakeTensorMode,
    TracingContext,
    TreeSpec,
    as_torch_compiles,
    combined_by,
    compile_fx,
    fused_if,
    tracing,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
)
from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.protocols import Tree

# A step: (values, state, t, lr, *inputs) -> (values, state, loss)
Function = Callable[..., tuple[list[Tensor], list[list[Tensor]], Tensor]]

_GRAIN = 2**15  # the size from which torch's own operations use a second thread on a CPU


class Program:
    """A function of tensors, recorded for inputs of fixed shapes, and compiled if it is to be.

    Args:
        function: its inputs and outputs are trees of tensors.
        inputs: an example of its inputs.
        outside: the tensors that the program may use besides its inputs, to be read at every call; without them, the
            program holds what it uses as it is.
        like: programs that may equal this one, which is then not compiled again.
        compile: whether it is compiled; otherwise its tensor operations are replayed one by one.
        writes: how many of its first outputs are written over its first inputs, so that they do not exist twice. No two
            inputs may share memory then. If it is compiled, either all of them are or none.
        fake: whether it is traced without computing anything where that is possible, which takes no memory.

    Attributes:
        lifted: where the tensors are that it reads besides its inputs, and those that were there first.
        twin: which of ``like`` it equals.
        writable: whether inductor would write the first outputs over the first inputs as it should.
    """

    def __init__(
        self,
        function: Callable[..., Tree],
        *inputs: Tree,
        outside: Sequence[Found] | None = None,
        like: Sequence["Program"] = (),
        compile: bool = True,
        writes: int = 0,
        fake: bool = False,
    ) -> None:
        flat, self._inputs = tree_flatten(inputs)
        outputs: list[TreeSpec] = []

        def flat_function(*leaves: Tensor) -> list[Tensor]:
            result, spec = tree_flatten(function(*tree_unflatten(leaves, self._inputs)))
            outputs.append(spec)
            return result

        self.graph = traced(flat_function, flat, fake=fake)
        self._outputs = outputs[-1]
        self.lifted = [] if outside is None else lift_constants(self.graph, outside)
        self.writable = _can_write_over(self.graph.graph, flat[:writes])
        self.writes = writes if not compile or self.writable else 0
        if self.writes:
            _write_over(self.graph.graph, self.writes)
            self.graph.recompile()
        self.twin = next((other for other in like if _same(self.graph, other.graph)), None)
        self._run: Callable[..., Sequence[Tensor]] = self.graph if self.twin is None else self.twin._run
        if compile and self.twin is None:
            self.compile(flat)

    def compile(self, inputs: list[Tensor]) -> None:
        """Let inductor compile what was recorded, for an example of the leaves of its inputs."""
        graph = self.graph
        if any(each.is_cuda for each in inputs) or self._bits:
            graph = torch.fx.GraphModule(graph, copy.deepcopy(graph.graph))  # as it is, others compare it with theirs
            sum_products_with_vectors(graph.graph)
            graph.recompile()
        self._run = _compile(graph, [*inputs, *(tensor for _, tensor in self.lifted)])

    def __call__(self, *inputs: Tree) -> Tree:
        """Run the program."""
        return tree_unflatten(self.flat(tree_leaves(inputs)), self._outputs)

    def flat(self, inputs: list[Tensor], lifted: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Run it on the leaves of its inputs, with ``lifted`` in place of what it would read itself."""
        with torch.no_grad():
            found = self._run(*inputs, *(self.outside() if lifted is None else lifted))
        return [*inputs[: self.writes], *found]

    def outside(self) -> list[Tensor]:
        """Return the tensors that it reads besides its inputs, as they are now."""
        return [place.read() for place, _ in self.lifted]

    def fits(self) -> bool:
        """Whether the tensors that it reads besides its inputs have the shapes and types that it was compiled for."""
        return all(alike(place.read(), tensor) for place, tensor in self.lifted)


def apart_in_memory(tensors: Sequence[Tensor], count: int) -> bool:
    """Whether the first ``count`` tensors can be written over: each fills its own memory, which no other one shares."""
    owners = [tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel()]
    own = [tensor.untyped_storage().data_ptr() for tensor in tensors[:count] if tensor.numel()]
    dense = all(torch.empty_like(each, device="meta").stride() == each.stride() for each in tensors[:count])
    return dense and all(owners.count(each) == 1 for each in own)


def counting(step: Function) -> Callable[..., Tree]:
    """Return the same step with the number of the next one among its results."""

    def counted(values: list[Tensor], state: list[list[Tensor]], t: Tensor, lr: Tensor, *inputs: Tree) -> Tree:
        new_values, new_state, loss = step(values, state, t, lr, *inputs)
        return new_values, new_state, t + 1, loss

    return counted


def traced(function: Callable[..., list[Tensor]], inputs: list[Tensor], *, fake: bool = False) -> torch.fx.GraphModule:
    """Return a function of tensors as a graph of tensor operations.

    It is traced twice, which must give the same graph: a user's model may draw from Python's or numpy's generators,
    count its calls or read a clock.
    """
    try:
        return _traced(function, inputs, fake)
    except Exception as cause:
        if not reads_values(cause):
            raise
        try:
            with as_torch_compiles():
                return _traced(function, inputs, fake)
        except Exception as again:
            raise (again if reads_values(again) else cause) from None


def _traced(function: Callable[..., list[Tensor]], inputs: list[Tensor], fake: bool) -> torch.fx.GraphModule:
    if fake:
        try:
            graph = _trace(function, inputs, "fake")
        except Exception:  # a model that reads the values of its own tensors; it is traced with them
            fake, graph = False, _trace(function, inputs)
    else:
        graph = _trace(function, inputs)
    if not _same(graph, _trace(function, inputs, "fake" if fake else "real")):
        raise PyroDropoutError(
            "it was traced twice and gave two different programs, so something outside torch changes between calls"
            " (Python's or numpy's random numbers, a counter), which a compiled step would hold fixed"
        )
    return graph


def _trace(
    function: Callable[..., list[Tensor]], inputs: list[Tensor], mode: Literal["real", "fake"] = "real"
) -> torch.fx.GraphModule:
    def with_masks(*leaves: Tensor) -> list[Tensor]:
        with RecordedMasks():  # type: ignore[no-untyped-call]
            return function(*leaves)

    graph = None
    if mode == "real" and not any(each.is_cuda for each in inputs):
        with torch.no_grad():
            graph = record(with_masks, inputs)
    if graph is None:
        graph = _made(with_masks, inputs, mode)
    rewrite_skinny_products(graph.graph)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def _made(
    function: Callable[..., list[Tensor]], inputs: list[Tensor], mode: Literal["real", "fake"]
) -> torch.fx.GraphModule:
    # make_fx notes the shape of every value with a mode of its own for each; to find one here takes a third less time.
    # What is traced without values meets tensors that have some: data, and a network's own parameters.
    mixed = mode == "fake" and any(each.is_cuda for each in inputs)
    shapes = TracingContext(FakeTensorMode(allow_fallback_kernels=True, allow_non_fake_inputs=mixed))
    with torch.no_grad(), tracing(shapes):
        graph: torch.fx.GraphModule = make_fx(function, tracing_mode=mode)(*inputs)
    return graph


def _can_write_over(graph: torch.fx.Graph, inputs: list[Tensor]) -> bool:
    """Whether inductor writes the first outputs over these inputs as it should."""
    # Inductor may leave out the copy of what shows an input, and then reads what is written over it. On a GPU a kernel
    # that reads an input by slices would write elsewhere first, which takes half as long again.
    places = graph.find_nodes(op="placeholder")[: len(inputs)]
    slices = graph.find_nodes(op="call_function", target=torch.ops.aten.slice.Tensor)
    by_slices = any(each.is_cuda for each in inputs) and any(owner(node) in places for node in slices)
    return not _showing(graph, len(inputs)) and not by_slices


def _showing(graph: torch.fx.Graph, count: int) -> list[int]:
    """Return which outputs are, or are views of, one of the first inputs other than the one that they replace."""
    places, end = graph.find_nodes(op="placeholder"), graph.find_nodes(op="output")[0]
    written, results = set(places[:count]), list(enumerate(end.args[0]))
    return [k for k, each in results if owner(each) in written and (k >= count or each is not places[k])]


def _write_over(graph: torch.fx.Graph, count: int) -> None:
    """Let a graph write its first outputs over its first inputs, after all else, and return the others."""
    places, end = graph.find_nodes(op="placeholder"), graph.find_nodes(op="output")[0]
    results = list(end.args[0])
    with graph.inserting_before(end):
        for k in _showing(graph, count):  # it would show what is written over the input
            shown = results[k]
            results[k] = graph.call_function(torch.ops.aten.clone.default, (shown,))
            results[k].meta = dict(shown.meta)
        for place, result in zip(places, results[:count], strict=False):
            if result is not place:
                graph.call_function(torch.ops.aten.copy_.default, (place, result)).meta = dict(place.meta)
    end.args = (results[count:],)


def _compile(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Sequence[Tensor]]:
    # Straight to inductor: Dynamo has nothing to find in a finished graph, and its guards cost time at every call. The
    # warnings are about torch's own internals.
    check_compiler_folder()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        on_gpu = any(tensor.is_cuda for tensor in inputs)
        settings = _settings(on_gpu)
        if on_gpu and graph.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
            # Kernels that are launched together need all that they read at once; what is changed in place on a GPU is
            # too large for that.
            with fused_if(updates_apart):
                return compile_fx(graph, inputs, settings | {"combo_kernels": False})
        if on_gpu:
            with combined_by(by_shape):
                return compile_fx(graph, inputs, settings)
        return compile_fx(graph, inputs, settings)


def _settings(on_gpu: bool) -> dict[str, Any]:
    """Return how inductor is to compile."""
    # A step has many small sums, one per layer; on a GPU their launches dominate, so they are launched together.
    return {"combo_kernels": on_gpu, "cpp.min_chunk_size": _GRAIN, "fallback_random": not on_gpu}


def _same(left: torch.fx.GraphModule, right: torch.fx.GraphModule) -> bool:
    """Whether two graphs compute the same with the same constants."""
    if left.code != right.code:
        return False
    names = [node.target for node in left.graph.nodes if node.op == "get_attr"]
    return all(_equal(getattr(left, name), getattr(right, name)) for name in names)


def _equal(left: Tensor, right: Tensor) -> bool:
    """Whether two constants have the same values; NaN equals NaN here."""
    return left is right or (left.shape == right.shape and torch.allclose(left, right, rtol=0, atol=0, equal_nan=True))
