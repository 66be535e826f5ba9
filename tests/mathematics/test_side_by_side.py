"""Eigendecompositions of several matrices are those of each."""

import pytest
import torch

from pyro_dropout.mathematics.side_by_side import eigh_each

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


@pytest.mark.parametrize("device", DEVICES)
def test_each_matrix_is_decomposed(device: str) -> None:
    roots = [torch.randn(size, size, dtype=torch.float64, device=device) for size in (5, 1, 40, 7, 5, 9, 3, 2, 11)]
    matrices = [root @ root.mT for root in roots]
    found = eigh_each(matrices)
    assert len(found) == len(matrices)
    for matrix, (values, vectors) in zip(matrices, found, strict=True):
        torch.testing.assert_close(vectors * values @ vectors.mT, matrix)
        assert bool((values.diff() >= 0).all())
    assert eigh_each([]) == []
