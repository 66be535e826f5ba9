"""A function of tensors, recorded once as a graph of tensor operations, and compiled by inductor or replayed."""

import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from pyro_dropout.engines.agreement import agrees, owner, written, written_by
from pyro_dropout.engines.kernel_folder import check_compiler_folder
from pyro_dropout.engines.torch_internals import (
    TreeSpec,
    combined_by,
    compile_fx,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
)
from pyro_dropout.engines.tracing import same, traced
from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.protocols import Tree

# A step: (values, state, t, lr, *inputs) -> (values, state, loss)
Function = Callable[..., tuple[list[Tensor], list[list[Tensor]], Tensor]]

_GRAIN = 2**15  # the size from which torch's own operations use a second thread on a CPU
_LONG = 2**19  # numbers that a reduction reads
_aten = torch.ops.aten
_LITERAL = {_aten.lift_fresh_copy.default, _aten.lift_fresh.default, _aten.lift.default}


@runtime_checkable
class Place(Protocol):
    """Where a tensor is found at every step: a variable, an attribute, or an item of a container."""

    name: str

    def read(self) -> Any:
        """Return what is there now."""


Found = tuple[Place, Tensor]  # where a tensor is, and the tensor that was there first


class Program:
    """A function of tensors, recorded for inputs of fixed shapes, and compiled if it is to be.

    Args:
        function: its inputs and outputs are trees of tensors.
        inputs: an example of its inputs.
        outside: the tensors that the program may use besides its inputs, to be read at every call; without them, the
            program holds what it uses as it is.
        like: programs that may equal this one, which is then not compiled again.
        compile: whether it is compiled; otherwise its tensor operations are replayed one by one.

    Attributes:
        lifted: where the tensors are that it reads besides its inputs, and those that were there first.
        twin: which of ``like`` it equals.
    """

    def __init__(
        self,
        function: Callable[..., Tree],
        *inputs: Tree,
        outside: Sequence[Found] | None = None,
        like: Sequence["Program"] = (),
        compile: bool = True,
    ) -> None:
        flat, self._inputs = tree_flatten(inputs)
        outputs: list[TreeSpec] = []

        def flat_function(*leaves: Tensor) -> list[Tensor]:
            result, spec = tree_flatten(function(*tree_unflatten(leaves, self._inputs)))
            outputs.append(spec)
            return result

        self.graph = traced(flat_function, flat)
        self._outputs = outputs[-1]
        self.lifted = [] if outside is None else lift_constants(self.graph, outside)
        self.twin = next((other for other in like if same(self.graph, other.graph)), None)
        self._run: Callable[..., Sequence[Tensor]] = self.graph if self.twin is None else self.twin._run
        if compile and self.twin is None:
            self.compile(flat)

    def compile(self, inputs: list[Tensor]) -> None:
        """Let inductor compile what was recorded, for an example of the leaves of its inputs."""
        given = [*inputs, *(tensor for _, tensor in self.lifted)]
        self._run = _right(compiled(self.graph, given), self.graph, given)

    def __call__(self, *inputs: Tree) -> Tree:
        """Run the program."""
        return tree_unflatten(self.flat(tree_leaves(inputs)), self._outputs)

    def flat(self, inputs: list[Tensor]) -> list[Tensor]:
        """Run it on the leaves of its inputs."""
        with torch.no_grad():
            return list(self._run(*inputs, *self.outside()))

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


# --- tensors that a program holds -------------------------------------------------------------------------------------
# One that the model makes from Python numbers while it runs is a literal, and stays. One that existed before is neither
# an argument nor a parameter nor a buffer; a compiled step that held it would not notice changes to it.


def lift_constants(graph: torch.fx.GraphModule, outside: Sequence[Found]) -> list[Found]:
    """Turn the tensors that a program holds into additional inputs, and return where each is found."""
    lifted: list[Found] = []
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    last = placeholders[-1] if placeholders else None
    for node in [node for node in graph.graph.nodes if node.op == "get_attr"]:
        held = getattr(graph, str(node.target))
        if not isinstance(held, Tensor) or all(user.target in _LITERAL for user in node.users):
            continue
        same = [(place, tensor) for place, tensor in outside if _is(tensor, held)]
        found = min(same, key=lambda pair: pair[1] is not held, default=None)  # the very tensor, before a view of it
        if found is None:
            raise PyroDropoutError(
                f"it uses a tensor of shape {tuple(held.shape)} that is not an argument, a parameter or a buffer, and"
                " that cannot be found again, so a compiled step would hold its values fixed. Pass it to the model as"
                " an argument, or register it as a buffer"
            )
        with graph.graph.inserting_after(last) if last is not None else graph.graph.inserting_before():
            given = graph.graph.placeholder(f"outside_{len(lifted)}")
        given.meta = dict(node.meta)
        node.replace_all_uses_with(given)
        graph.graph.erase_node(node)
        last = given
        lifted.append(found)
    places = dict(zip(graph.graph.find_nodes(op="placeholder")[len(placeholders) :], lifted, strict=True))
    for node in graph.graph.nodes:
        for each in written_by(node):
            if owner(each) in places:
                raise PyroDropoutError(
                    f"it changes {places[owner(each)][0].name!r}, a tensor that is not a buffer, which a compiled step"
                    " would leave as it is. Register it as a buffer"
                )
    graph.recompile()
    return lifted


def _is(tensor: Tensor, held: Tensor) -> bool:
    """Whether two tensors are the same object, or view the same memory in the same way."""
    return tensor is held or (alike(tensor, held) and tensor.numel() > 0 and tensor.data_ptr() == held.data_ptr())


def alike(now: object, then: Tensor) -> bool:
    """Whether ``now`` is a tensor of the same shape, type, device and layout in memory."""
    if not isinstance(now, Tensor) or now.shape != then.shape or now.stride() != then.stride():
        return False
    return now.dtype == then.dtype and now.device == then.device


# --- torch's compiler -------------------------------------------------------------------------------------------------


def compiled(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Sequence[Tensor]]:
    """Return a graph as a program of inductor's, for an example of its inputs."""
    # Straight to inductor: Dynamo has nothing to find in a finished graph, and its guards cost time at every call. The
    # warnings are about torch's own internals.
    check_compiler_folder()
    on_gpu = any(tensor.is_cuda for tensor in inputs)
    with torch.no_grad(), warnings.catch_warnings(), combined_by(by_shape) if on_gpu else nullcontext():
        warnings.simplefilter("ignore")
        return compile_fx(graph, inputs, settings(on_gpu))


def _right(run: Callable[..., Sequence[Tensor]], graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
    """Return a program of inductor's, if it computes what was recorded: it has lost gradients before.

    On a GPU its random numbers are others, and there is nothing to compare.
    """
    given = [each.clone() for each in inputs]
    if any(each.is_cuda for each in inputs):
        return run
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            right = agrees(lambda: run(*given), graph, given, {k: inputs[k] for k in written(graph)}, distances=(0.0,))
    except Exception as cause:
        raise RuntimeError(f"torch's compiler makes a program of this step that fails ({cause})") from cause
    if not right:
        raise RuntimeError("torch's compiler makes a program of this step that computes something else")
    return run


def settings(on_gpu: bool) -> dict[str, Any]:
    """Return the settings of inductor."""
    # A step has many small sums, one per layer; on a GPU their launches dominate, so they are launched together.
    return {"combo_kernels": on_gpu, "cpp.min_chunk_size": _GRAIN, "fallback_random": not on_gpu}


def by_shape(nodes: list[Any]) -> list[list[Any]]:
    """Return kernels in groups to be launched together: each shape of long reductions, and all others.

    Kernels that are combined share the sizes of their blocks. What suits sums over the points of a batch is far too
    small for a kernel that updates a million weights and sums their squares, which then takes ten times as long.
    """
    groups: dict[object, list[Any]] = {}
    for node in nodes:
        sizes = tuple(node.group[-1])
        known = all(str(size).isdigit() for size in sizes)
        long = known and node.is_reduction() and math.prod(map(int, sizes)) >= _LONG
        groups.setdefault(sizes if long else None, []).append(node)
    return list(groups.values())
