"""Shapes broadcast as torch's do."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pyro_dropout.mathematics.shapes import broadcast_shape

SHAPES = st.lists(st.lists(st.sampled_from([0, 1, 1, 2, 3]), max_size=3), max_size=4)


@given(SHAPES)
def test_the_shape_is_that_of_torch(shapes: list[list[int]]) -> None:
    try:
        expected = torch.broadcast_tensors(*(torch.empty(shape) for shape in shapes))[0].shape if shapes else ()
    except RuntimeError:
        with pytest.raises(RuntimeError, match="do not broadcast"):
            broadcast_shape(*shapes)
        return
    assert broadcast_shape(*shapes) == expected
