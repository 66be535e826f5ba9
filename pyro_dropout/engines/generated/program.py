"""A recorded step as plain C: what it calls, as it is kept on disk, and its library."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx

from pyro_dropout.engines.generated.library import LIBRARY
from pyro_dropout.engines.generated.order import Order
from pyro_dropout.engines.generated.source import Source
from pyro_dropout.engines.generated.statement import Call, Memory, Place
from pyro_dropout.engines.generated.translation import Translation


def plain(graph: fx.GraphModule, given: Sequence[Tensor]) -> tuple[dict[str, Any], str]:
    """Return the calls of a step as JSON values, and the source of its library.

    Args:
        graph: a recorded step on a CPU, which writes over its inputs after all else.
        given: its inputs, then its constants.

    Raises:
        NotPlainError: the step has no plain form; it says why.
    """
    statements = Translation(graph, given)
    order = Order(statements)
    source = Source(order, statements.bounds)
    own = {memory: number for number, memory in enumerate(_own(order))}

    def described(place: Place) -> list[Any]:
        whose = ["own", own[place.memory]] if place.memory.given is None else ["given", place.memory.given]
        dtype = str(place.memory.shape.dtype).removeprefix("torch.")
        return [*whose, dtype, list(place.size), list(place.stride), place.offset]

    def whole(memory: Memory) -> list[Any]:
        return described(Place(memory, tuple(memory.shape.shape), memory.shape.stride(), 0))

    def called(call: Call) -> list[Any]:
        if call.kind == "draw":
            return ["draw", call.name, [described(call.write)], {}, None]
        if call.kind == "torch":
            outs = [[number, described(place)] for number, place in call.more]
            return ["torch", call.name, [described(each) for each in call.reads], call.numbers, outs]
        return ["product", call.name, [described(each) for each in call.reads], call.numbers, described(call.write)]

    calls = [called(draw) for draw in order.draws]
    for number, segment in enumerate(order.segments):
        if source.memories[number]:
            calls.append(
                ["plain", LIBRARY, [whole(each) for each in source.memories[number]], {"segment": number}, None]
            )
        calls += [called(call) for call in segment.calls]
    sizes = [max(8, -(-memory.shape.numel() * memory.shape.element_size() // 8) * 8) for memory in own]
    return {"calls": calls, "results": [described(each) for each in statements.results], "own": sizes}, source.text


def _own(order: Order) -> list[Memory]:
    """Return the memories of the program's own, in the order in which they are written."""
    written = [draw.write.memory for draw in order.draws]
    for segment in order.segments:
        written += [s.write.memory for loop in segment.loops for s in loop.statements]
        written += [place.memory for call in segment.calls for place in call.writes]
    return [memory for memory in dict.fromkeys(written) if memory in order.stored]
