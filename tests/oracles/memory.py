"""How much memory a piece of code holds at its peak, by torch's own record of allocations."""

import itertools
from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def allocations(action: Callable[[], object]) -> list[int]:
    """Bytes of every allocation (positive) and every release (negative) of torch's allocator, in order."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as recorded:
        action()
    assert recorded.profiler is not None
    assert recorded.profiler.kineto_results is not None
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda e: e.start_ns())]


def peak_allocated(action: Callable[[], object]) -> int:
    """The most bytes that ``action`` has allocated and not yet released, at any time."""
    return max(itertools.accumulate(allocations(action), initial=0))
