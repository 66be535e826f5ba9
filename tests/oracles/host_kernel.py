"""Kernels on the CPU: the same source, compiled by a C++ compiler, with a few threads that run side by side.

What a GPU does between barriers in any order, these threads do too, so a barrier that is missing can show.
"""

import ctypes
import functools
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyro_dropout.engines.cuda.recorded import PREAMBLE, lowered, outside, packed
from pyro_dropout.engines.cuda.source import Recorded
from pyro_dropout.engines.cuda.source import Source as StepsSource
from pyro_dropout.engines.cuda.steps import StepsOnGpu, WithDraws
from pyro_dropout.engines.generated.values import Constants, c_type
from pyro_dropout.references.nuts.chains_on_gpu import Source

THREADS = 3
_BEFORE = """
#include <cmath>
#include <omp.h>
#include <vector>
using namespace std;
#define DEVICE static inline
#define BARRIER _Pragma("omp barrier")
#define INF __builtin_inf()
#define RESTRICT
#define UNROLLED(times)
#define NEIGHBOUR(value, away) value
"""
_AFTER = """
extern "C" void chains(int count, double* states, const char* constants, const double* noises, const double* rings,
                       double* draws, long long* spent, int steps, int before) {{
  for (int chain = 0; chain < count; ++chain) {{
    vector<double> memory({words});
    #pragma omp parallel num_threads({threads})
    run(chain, omp_get_thread_num(), memory.data(), states, constants, noises, rings, draws, spent, steps, before);
  }}
}}
"""


_STEPS_AFTER = """
extern "C" void steps(int copies, double* far, const long long* given, int first, int count) {{
  for (int network = 0; network < copies; ++network) {{
    vector<double> memory({words});
    #pragma omp parallel num_threads({threads})
    run(network, omp_get_thread_num(), memory.data(), far, given, first, count);
  }}
}}
"""


class HostSteps(StepsOnGpu):
    """Steps by a kernel on the CPU."""

    processors = 1

    def __init__(self, recorded: Recorded, tensors: Sequence[Tensor]) -> None:
        how: Any = {"threads": THREADS, "lanes": 1, "processors": self.processors}
        super().__init__(recorded, tensors, steps_compiled, **how)


class SharedHostSteps(HostSteps):
    """The same by several processors, which share no memory but the GPU's."""

    processors = 2


class SharedSteps(StepsOnGpu):
    """Steps by several processors of a GPU, however small the network is."""

    def __init__(self, recorded: Recorded, tensors: Sequence[Tensor]) -> None:
        super().__init__(recorded, tensors, processors=16)


class InterpretedSteps(HostSteps):
    """The same steps with the same random numbers, by the recorded operations one by one."""

    def _launched(self, bound: Any, first: int, steps: int, each: Sequence[Tensor]) -> list[Tensor]:
        recorded, source = self._recorded, self._source
        count, many = len(recorded.inputs), bool(recorded.stacked)
        drawn = bound.whole[count + len(self._constants) :][: len(source.draws.counts)]
        for step in range(steps):
            for network in range(recorded.copies):
                given = list(bound.whole[:count])
                for k in recorded.own:
                    given[k] = given[k][network]
                for k, value in zip(recorded.each, each, strict=True):
                    given[k] = value[step][network] if many else value[step]
                numbers = [value[first + step, network] for value in drawn]
                with torch.no_grad():
                    found = WithDraws(recorded.graph, source.draws, numbers).run(*given)
                for place, value in zip(given, found[: recorded.writes], strict=False):
                    place.copy_(value)
                for place, value in zip(bound.results, found[recorded.writes :], strict=True):
                    (place[step][network] if many else place[step]).copy_(value)
        return [value[:steps] for value in bound.results]


def steps_compiled(source: StepsSource, _: torch.device) -> Callable[..., None]:
    """Return a function of what a kernel of steps is called with, as for a GPU."""
    after = _STEPS_AFTER.format(words=source.memory // 8 + 1, threads=source.threads * source.processors)
    function = _library(_BEFORE + source.text + after).steps
    return lambda *given: function(*(_argument(each) for each in given))


def compiled(source: Source, _: torch.device) -> Callable[..., None]:
    """Return a function of the kernel's tensors and numbers, as ``compiled_kernel`` does for a GPU."""
    after = _AFTER.format(words=source.memory // 8, threads=source.threads)
    function = _library(_BEFORE + source.text + after).chains

    def launch(states: Tensor, *others: Tensor | int) -> None:
        function(ctypes.c_int(len(states)), *(_argument(each) for each in (states, *others)))

    return launch


def computed(function: Callable[..., list[Tensor]], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the results of a function of tensors, from its loops in C."""
    constants = Constants()
    given = [outside(f"x{k}", value) for k, value in enumerate(inputs)]
    found, loops = lowered(function, list(inputs), given, constants, "a", THREADS, 1)
    stored = [loops.stored(f"y{k}", value) for k, value in enumerate(found)]
    held, lines = packed(constants.tensors)
    results = [torch.empty(value.shape, dtype=value.dtype) for value in found]
    tensors = [*inputs, *results, held]
    text = [f'extern "C" void all({", ".join(f"void* p{k}" for k in range(len(tensors)))}) {{']
    text += [f"const char* constants = (const char*)p{len(tensors) - 1};", *lines]
    text += [f"{c_type(x.dtype)}* x{k} = ({c_type(x.dtype)}*)p{k};" for k, x in enumerate(inputs)]
    written = loops.written([value.name or "" for value in stored])
    places, words, _ = loops.memory(0)
    text += [f"vector<double> held({words + 1}); double* memory = held.data();", *places]
    text += [f"#pragma omp parallel num_threads({THREADS})", "{ const int tid = omp_get_thread_num();"]
    text += [*written, "BARRIER;"]
    for k, (value, result) in enumerate(zip(stored, results, strict=True)):
        place = f"(({c_type(result.dtype)}*)p{len(inputs) + k})"
        name = f"y{k}" if result.numel() == 1 else f"y{k}[i]"
        text.append(f"if (tid == 0) for (int i = 0; i < {result.numel()}; ++i) {place}[i] = {name};")
        assert value.shape == tuple(result.shape)
    text.append("} }")
    _library("\n".join([_BEFORE, PREAMBLE, *text])).all(*(_argument(each) for each in tensors))
    return results


def _argument(value: Tensor | int) -> Any:
    return ctypes.c_void_p(value.data_ptr()) if isinstance(value, Tensor) else ctypes.c_int(value)


@functools.cache
def _library(text: str) -> Any:
    folder = Path(tempfile.mkdtemp())
    code, library = folder / "kernel.cpp", folder / "kernel.so"
    code.write_text(text.replace("BARRIER;", "BARRIER"))
    command = ["g++", "-O0", "-shared", "-fPIC", "-fopenmp", "-std=c++17", str(code), "-o", str(library)]
    subprocess.run(command, check=True, capture_output=True)
    return ctypes.CDLL(str(library))
