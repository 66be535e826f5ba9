"""Freed memory stays with the process."""

import resource
import sys

import pytest
import torch

from pyro_dropout.engines.malloc_threshold import keep_freed_memory


@pytest.mark.skipif(sys.platform != "linux", reason="other systems keep freed memory by themselves, or never do")
def test_memory_that_is_freed_is_not_faulted_in_again() -> None:
    weights = torch.zeros(1000, 1000)
    keep_freed_memory([weights])
    weights + 1
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        weights + 1  # a temporary of 4 MB, about a thousand pages
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 5000
