"""Every private name of torch that this package uses, with the reason, and what happens without it.

torch may change these with any version. Those that are imported here are older than the oldest version that the package
supports, and nothing works without them. The others are looked up when they are asked for: where one is gone, the
engine that needs it fails, the next one takes the steps, and a warning says so. Nothing of torch is patched, and no
source that it generates is read.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

# Without values: shapes and types of what a function computes, for tracing in no memory.
# torch.export uses the same classes. Without them: no compiled step.
from torch._guards import TracingContext, tracing

# What an operation is called in a graph, and its schema: which arguments it writes into, which results are views.
# Every engine but the eager one reads graphs. Without it: eager steps.
from torch._ops import OpOverload
from torch._subclasses import FakeTensorMode

# A graph whose Python is written when it runs for the first time: a recorded step in C never does. Without it:
# fx.GraphModule, which takes a tenth of a second longer.
from torch.fx._lazy_graph_module import _LazyGraphModule as LazyGraphModule

# Sees every operation below autograd: how steps are recorded, counted and checked. Documented, in a private module.
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatch_modes

# Trees of tensors; torch.utils has no public ones. Without them: optree, a package.
from torch.utils._pytree import (
    TreeSpec,
    keystr,
    register_pytree_node,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_unflatten,
    treespec_dumps,
    treespec_loads,
)

Compiled = Callable[..., Any]


# --- what torch is doing now ------------------------------------------------------------------------------------------


def is_traced() -> bool:
    """Whether operations are being recorded for a compiled program."""
    return bool(dispatch_modes())


def is_mapped() -> bool:
    """Whether torch.func maps or differentiates here. Without the name: such a model could not be looked at."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_wrapped(value: Tensor) -> bool:
    """Whether a tensor is one of torch.func's, which cannot be recorded as it runs."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(value))


def without_torch_function() -> Any:
    """Return a context in which modes and classes of tensors see no function of torch."""
    return torch._C.DisableTorchFunction()


@contextmanager
def as_torch_compiles() -> Iterator[None]:
    """Within this context torch says that it compiles: libraries such as transformers then do without values.

    Without the flag: such models run eagerly.
    """
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


@contextmanager
def onednn(on: bool) -> Iterator[None]:
    """Within this context torch's products on a CPU are oneDNN's, or not; torch.backends.mkldnn would warn of TF32."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(on and before)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


# --- operations -------------------------------------------------------------------------------------------------------


def has_cpu_kernel(operation: OpOverload) -> bool:
    """Whether an operation has a kernel of its own on a CPU, and is not taken apart. Without the name: make_fx."""
    return not operation._can_decompose() or bool(
        torch._C._dispatch_has_kernel_for_dispatch_key(operation.name(), "CPU")
    )


def fused_adam(decoupled: bool) -> Callable[..., None]:
    """Return torch's Adam or AdamW of all parameters in one call; torch.optim has it under ``fused=True``."""
    return torch._fused_adamw_ if decoupled else torch._fused_adam_


def decompositions(more: Any) -> dict[Any, Any]:
    """Return how operations are made of simpler ones. Without the name: no kernel for chains on a GPU."""
    from torch._decomp import core_aten_decompositions, get_decompositions  # slow to load

    return {**core_aten_decompositions(), **get_decompositions(more)}


def compile_cuda(text: str, name: str, options: list[str]) -> Any:
    """Return a kernel of CUDA C, compiled while the program runs. Without it: chains run on the CPU."""
    return torch.cuda._compile_kernel(text, name, nvcc_options=options)


def launched_together(kernel: Any, blocks: int, threads: int, given: Sequence[Tensor | int]) -> None:
    """Launch a kernel whose blocks wait for each other. Without it: each network has one processor."""
    from torch.cuda import _utils

    values = [ctypes.c_void_p(x.data_ptr()) if isinstance(x, Tensor) else ctypes.c_int(x) for x in given]
    places = (ctypes.c_void_p * len(values))(*(ctypes.cast(ctypes.byref(x), ctypes.c_void_p) for x in values))
    driver, stream = _utils._get_gpu_runtime_library(), torch.cuda.current_stream()._as_parameter_
    _utils._check_cuda(driver.cuLaunchCooperativeKernel(kernel.func, blocks, 1, 1, threads, 1, 1, 0, stream, places))


# --- inductor ---------------------------------------------------------------------------------------------------------
# torch.compile is the public way to it, and traces Python, which a recorded step does not need: seconds for each step,
# and guards at every call. Without these names: steps in C, or recorded ones.


def compile_fx(graph: torch.fx.GraphModule, inputs: list[Tensor], settings: dict[str, Any]) -> Compiled:
    """Let inductor compile a graph."""
    import torch._inductor.config as inductor
    from torch._inductor.compile_fx import compile_fx as compiled
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    # Inductor looks a program up on disk only if told how shapes were guessed; here none is: of real tensors, it would
    # make variables of all sizes.
    shapes = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True, allow_non_fake_inputs=True)
    # As a sum over scattered places, the gradient of a pooling was read before it was summed (torch 2.13, on a CPU).
    whole = torch.ops.aten.max_pool2d_with_indices_backward.default
    simpler = {operation: how for operation, how in select_decomp_table().items() if operation is not whole}
    with tracing(TracingContext(shapes)), inductor.patch(settings):
        given = [shapes.from_tensor(each) for each in inputs]
        return compiled(graph, given, decompositions=simpler)  # type: ignore[return-value]  # nothing but a function


def cache_folder() -> str:
    """Return the folder where inductor keeps what it has compiled."""
    from torch._inductor.codecache import cache_dir  # type: ignore[attr-defined]

    return str(cache_dir())


@contextmanager
def combined_by(groups: Callable[[list[Any]], list[list[Any]]]) -> Iterator[None]:
    """Within this context inductor launches together only kernels of one group, by the setter that torch has for it.

    Without it: long reductions share the small blocks of short ones, and take several times as long.
    """
    from torch._inductor.codegen import triton_combo_kernel as combined

    usual: Any = getattr(combined, "_default_custom_combo_kernel_horizontal_partition", None)
    choose: Any = getattr(combined, "set_custom_combo_kernel_horizontal_partition", None)
    if usual is None or choose is None:
        yield
        return
    choose(lambda nodes, *rest: [part for group in groups(nodes) for part in usual(group, *rest)])
    try:
        yield
    finally:
        choose(usual)
