"""Many steps in one launch: a recorded step as a kernel, with a block of threads for each network.

Random numbers are drawn by torch, for a block of steps at a time. They depend on a seed and on the number of a step,
and not on how many steps a launch takes. What a step changes lies in the memory that threads share, from the first step
of a launch to the last.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from pyro_dropout.engines.cuda.recorded import LANES, compiled_kernel, processor, simpler
from pyro_dropout.engines.cuda.source import Recorded, Source, TooLargeError, steps_source
from pyro_dropout.engines.engine import exact_products
from pyro_dropout.engines.generated.values import WORD, Draws, UnsupportedError
from pyro_dropout.engines.torch_internals import launched_together

THREADS = 512
_SIDE_BY_SIDE = 128  # networks that run at once, about one on each processor; of more, several share one
_MOST_STEPS = 1000  # of one launch
_DRAWN = 2**26  # random numbers of one launch
STATE = 2**22  # bytes of what a step changes
_CLOSE = {torch.float32: 1e-3, torch.float64: 1e-9}
# How far from the start kernel and step are compared; the second comparison goes on from the first.
_AWAY = (0.0, 0.0, 0.3)


class StepsOnGpu:
    """A recorded step that a kernel takes many times in one launch, for one network or for several."""

    def __init__(
        self,
        recorded: Recorded,
        tensors: Sequence[Tensor],
        compile: Callable[[Source, torch.device], Callable[..., None]] | None = None,
        *,
        threads: int | None = None,
        lanes: int = LANES,
        processors: int = 1,
    ) -> None:
        self._device, self._copies = tensors[0].device, recorded.copies
        threads = threads or (THREADS if recorded.copies <= _SIDE_BY_SIDE else THREADS // 2)
        changed = tensors[: recorded.writes]
        if not all(value.is_contiguous() for value in changed) or any(v.device != self._device for v in tensors):
            raise UnsupportedError("a parameter of the step is not contiguous, or an input lies elsewhere")
        self._copied: list[tuple[Tensor, Tensor]] = []  # tensors that are not contiguous, and their copies
        tensors = [*changed, *(self._contiguous(value) for value in tensors[recorded.writes :])]
        near, most = processor(self._device) if compile is None else (2**16, 1)
        self._recorded = recorded
        try:
            source = steps_source(self._recorded, near, threads, lanes, most, processors)
        except TooLargeError:
            raise
        except UnsupportedError:
            self._recorded = replace(recorded, graph=simpler(recorded.graph, recorded.inputs))
            source = steps_source(self._recorded, near, threads, lanes, most, processors)
        if any(value.numel() >= 2**31 for value in (*tensors, *source.constants)):
            raise TooLargeError("a tensor has more elements than a kernel counts, in 32 bits")
        self._source, self._many = source, bool(recorded.stacked)
        (end,) = (node for node in self._recorded.graph.graph.nodes if node.op == "output")
        self._examples = [node.meta["val"] for node in end.args[0][recorded.writes :]]
        self._constants = [self._contiguous(value.to(self._device)) for value in source.constants]
        self._run = (compile or _compiled)(source, self._device)
        self._far = torch.empty(self._copies * source.far // WORD + 1, dtype=torch.float64, device=self._device)
        per_step = max([1, *source.draws.counts.values()]) * self._copies
        self._block = max(1, min(_MOST_STEPS, _DRAWN // per_step))
        self._generator, self._now = torch.Generator(self._device), (-1, -1)
        self._drawn = self._room_for_draws(self._block)
        self._whole = self._bound(tensors, self._drawn, self._block)
        self._check(tensors)

    def _contiguous(self, value: Tensor) -> Tensor:
        """Return a tensor, or a copy that is contiguous and is made anew before each launch."""
        if value.is_contiguous():
            return value
        self._copied.append((value, value.contiguous()))
        return self._copied[-1][1]

    def room(self, number: int) -> int:
        """Return how many steps one launch may take, from the step of this number."""
        return self._block - number % self._block

    def advance(self, seed: int, number: int, steps: int, each: Sequence[Tensor] = ()) -> list[Tensor]:
        """Take some steps, of which there is ``room`` for; return the results of each, (steps, ...)."""
        block, first = divmod(number, self._block)
        if self._now != (seed, block):
            self._generator.manual_seed((seed + block * 0x9E3779B97F4A7C15) % 2**63)
            self._now = seed, block
            self._draw(self._drawn)
        for value, copy in self._copied:
            copy.copy_(value)
        return [value.clone() for value in self._launched(self._whole, first, steps, each)]

    def _draw(self, places: Sequence[Tensor]) -> None:
        """Draw the random numbers of some steps."""
        for place, (fill, _) in zip(places, self._source.draws.counts, strict=True):
            getattr(place, fill)(generator=self._generator)

    def _room_for_draws(self, steps: int) -> list[Tensor]:
        return [
            torch.zeros(steps, self._copies, count, dtype=dtype, device=self._device)
            for (_, dtype), count in self._source.draws.counts.items()
        ]

    def _bound(self, tensors: Sequence[Tensor], drawn: Sequence[Tensor], steps: int) -> "_Bound":
        """Return what the kernel is called with: these tensors, and new ones for what differs and for results."""
        given, many = list(tensors), (self._copies,) if self._many else ()
        for number in self._recorded.each:
            example = self._recorded.inputs[number]
            given[number] = example.new_empty(steps, *many, *example.shape)
        shapes = [(steps, *many, *each.shape) for each in self._examples]
        pairs = zip(shapes, self._examples, strict=True)
        results = [torch.empty(shape, dtype=each.dtype, device=self._device) for shape, each in pairs]
        whole = [*given, *self._constants, *drawn, *results]
        addresses = torch.tensor([value.data_ptr() for value in whole], dtype=torch.int64).to(self._device)
        return _Bound(addresses, [given[number] for number in self._recorded.each], results, whole)

    def _launched(self, bound: "_Bound", first: int, steps: int, each: Sequence[Tensor]) -> list[Tensor]:
        for place, value in zip(bound.each, each, strict=True):
            place[:steps].copy_(value)
        if self._source.processors > 1:
            self._far[:-1].view(self._copies, -1)[:, 0].zero_()  # nobody has arrived
        self._run(self._copies, self._far, bound.addresses, first, steps)
        return [value[:steps] for value in bound.results]

    def _check(self, tensors: Sequence[Tensor]) -> None:
        """Raise an error unless the kernel does what the step does, with the same random numbers, at several points."""
        writes, own = self._recorded.writes, self._recorded.own
        mine = [value.clone() for value in tensors]
        self._generator.manual_seed(0)
        drawn = self._room_for_draws(1)
        bound = self._bound(mine, drawn, 1)
        each = {k: self._recorded.inputs[k] for k in self._recorded.each}
        for away in _AWAY:
            for value in mine[:writes]:
                if value.is_floating_point():
                    like: Any = {"dtype": value.dtype, "device": value.device, "generator": self._generator}
                    value.add_(torch.randn(value.shape, **like).abs_(), alpha=away)
            self._draw(drawn)
            last = self._copies - 1  # the last network stands for all
            theirs = [each.get(k, value[last] if k in own else value).clone() for k, value in enumerate(mine)]
            numbers = [value[0, last] for value in drawn]
            with torch.no_grad(), exact_products():  # a kernel rounds no factor
                expected = WithDraws(self._recorded.graph, self._source.draws, numbers).run(*theirs)
            pairs = zip(each.values(), bound.each, strict=True)
            found = self._launched(bound, 0, 1, [value.expand(place.shape) for value, place in pairs])
            results = [*mine[:writes], *(value[0] for value in found)]
            results = [value[last] for value in results] if self._many else results
            if not all(_alike(one, other) for one, other in zip(results, expected, strict=True)):
                raise WrongKernelError("the kernel does not compute what the step does")


class _Bound(NamedTuple):
    """What a kernel is called with: addresses of all tensors, what differs from step to step, results, and all."""

    addresses: Tensor
    each: list[Tensor]
    results: list[Tensor]
    whole: list[Tensor]  # they must live as long as their addresses


class WrongKernelError(RuntimeError):
    """A kernel does not compute what the recorded step does."""


class WithDraws(fx.Interpreter):
    """Runs a graph with given random numbers."""

    def __init__(self, graph: fx.GraphModule, draws: Draws, drawn: Sequence[Tensor]) -> None:
        super().__init__(graph)
        self._places, self._drawn = draws.places, dict(zip(draws.counts, drawn, strict=True))

    def run_node(self, n: fx.Node) -> Any:
        """Run one operation, or take its random numbers from those given."""
        if n in self._places:
            key, begin = self._places[n]
            example: Tensor = n.meta["val"]
            return self._drawn[key][begin : begin + example.numel()].view(example.shape)
        return super().run_node(n)


def _alike(left: Tensor, right: Tensor) -> bool:
    slack = _CLOSE.get(left.dtype, 1e-2)
    size = max(1.0, float(right.double().nan_to_num(0.0, 0.0, 0.0).abs().max())) if right.numel() else 1.0
    return torch.allclose(left.double(), right.double(), rtol=slack, atol=slack * size, equal_nan=True)


def _compiled(source: Source, device: torch.device) -> Callable[..., None]:
    kernel = compiled_kernel(source.text, "steps", device, source.memory)

    def run(copies: int, far: Tensor, addresses: Tensor, first: int, count: int) -> None:
        given: list[Tensor | int] = [far, addresses, first, count]
        blocks = copies * source.processors
        with torch.cuda.device(device):
            if source.processors > 1:
                launched_together(kernel, blocks, source.threads, given)
            else:
                kernel((blocks, 1, 1), (source.threads, 1, 1), given, shared_mem=source.memory)

    return run
