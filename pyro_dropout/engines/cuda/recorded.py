"""From a recorded function of tensors to the loops of a kernel, and from its source to the kernel."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from pyro_dropout.engines.cuda.loops import Loops
from pyro_dropout.engines.generated.operations import Lowering
from pyro_dropout.engines.generated.values import WORD, Constants, UnsupportedError, Value, c_type, flat_index
from pyro_dropout.engines.torch_internals import compile_cuda, decompositions
from pyro_dropout.engines.tracing import traced

LANES = 32  # threads that can exchange numbers
# What torch's own table of simpler operations leaves as it is.
_MORE = [
    *(torch.ops.aten.elu, torch.ops.aten.gelu, torch.ops.aten.leaky_relu, torch.ops.aten.hardtanh),
    *(torch.ops.aten._softmax, torch.ops.aten._log_softmax),
]

PREAMBLE = """
#ifdef __CUDACC__
#define DEVICE __device__ __forceinline__
#define BARRIER __syncthreads()
#define NEIGHBOUR(value, away) __shfl_xor_sync(0xffffffffu, value, away)
#define RESTRICT __restrict__
#define UNROLLED(times) _Pragma(TEXT(unroll times))
#define TEXT(words) #words
#define INF __longlong_as_double(0x7ff0000000000000LL)
#endif
template <typename T> DEVICE T larger(T a, T b) { return (a != a || a > b) ? a : b; }
template <typename T> DEVICE T smaller(T a, T b) { return (a != a || a < b) ? a : b; }
DEVICE int row(long long i, int count) {
  const long long at = i < 0 ? i + count : i;
  return (int)(at < 0 ? 0 : at < count ? at : count - 1);
}
template <typename T> DEVICE T absolute(T a) { return a < 0 ? -a : a; }
template <typename T> DEVICE T logaddexp(T a, T b) {
  const T most = larger(a, b);
  return (most == -INF || most == INF) ? most : most + log1p(exp(smaller(a, b) - most));
}
"""


def lowered(
    function: Callable[..., list[Tensor]],
    inputs: list[Tensor],
    values: Sequence[Value],
    constants: Constants,
    prefix: str,
    threads: int,
    lanes: int,
) -> tuple[list[Value], Loops]:
    """Return the results of a function of these inputs, and the loops that compute them."""
    graph, loops = traced(function, inputs), Loops(threads, lanes)
    try:
        return Lowering(graph, values, constants, loops, prefix).outputs, loops
    except UnsupportedError:
        graph, loops = simpler(graph, inputs), Loops(threads, lanes)
        return Lowering(graph, values, constants, loops, prefix).outputs, loops


def outside(name: str, example: Tensor) -> Value:
    """Return a tensor that no loop computes."""
    shape = tuple(example.shape)
    return Value(shape, example.dtype, lambda at: f"{name}[{flat_index(at, shape)}]", name=name)


def simpler(graph: fx.GraphModule, inputs: list[Tensor]) -> fx.GraphModule:
    """Return a graph with fewer kinds of operations."""
    with torch.no_grad():
        found: fx.GraphModule = make_fx(graph, decompositions(_MORE))(*inputs)
    found.graph.eliminate_dead_code()
    return found


def packed(tensors: Sequence[Tensor]) -> tuple[Tensor, list[str]]:
    """Return constants one after another, and the lines that name them."""
    parts, lines, offset = [], [], 0
    for k, tensor in enumerate(tensors):
        kind = c_type(tensor.dtype)
        lines.append(f"const {kind}* c{k} = (const {kind}*)(constants + {offset});")
        flat = tensor.reshape(-1).view(torch.uint8)
        more = -len(flat) % WORD
        parts += [flat, flat.new_zeros(more)]
        offset += len(flat) + more
    return torch.cat(parts) if parts else torch.zeros(WORD, dtype=torch.uint8), lines


# --- compiling --------------------------------------------------------------------------------------------------------


def processor(device: torch.device) -> tuple[int, int]:
    """Return how many bytes the threads of a block can share, and how many processors a GPU has."""
    gpu: Any = torch.cuda.get_device_properties(device)
    return int(gpu.shared_memory_per_block_optin), int(gpu.multi_processor_count)


def compiled_kernel(text: str, name: str, device: torch.device, shared: int = 0) -> Any:
    """Return a kernel: a function of the sizes of its grid and blocks, a list of arguments, and ``shared_mem``."""
    with torch.cuda.device(device), any_headers():
        kernel = compile_cuda(text, name, ["--prec-div=false", "--prec-sqrt=false"])
        if shared:
            kernel.set_shared_memory_config(shared)
    return kernel


@contextmanager
def any_headers() -> Iterator[None]:
    """Within this context torch does not ask where CUDA's headers are: many machines have none, and none is needed."""
    from torch.utils import cpp_extension

    before = cpp_extension.CUDA_HOME
    cpp_extension.CUDA_HOME = before or str(Path(torch.__file__).parent)
    try:
        yield
    finally:
        cpp_extension.CUDA_HOME = before
