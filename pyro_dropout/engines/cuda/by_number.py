"""Elements that are chosen by numbers which a kernel reads: rows of data, classes, sums up to an element."""

import torch

from pyro_dropout.engines.cuda.values import Indices, Shape, UnsupportedError, Value, broadcast, c_type


def gathered(value: Value, dim: int, index: Value, shape: Shape) -> Value:
    """Return the elements whose numbers along a dimension are given."""
    dim = dim % max(len(shape), 1)

    def at(indices: Indices) -> str:
        return value.at((*indices[:dim], f"(int)({index.at(indices)})", *indices[dim + 1 :]))

    return Value(shape, value.dtype, at, value.cost + index.cost + 2)


def rows(value: Value, numbers: Value, shape: Shape) -> Value:
    """Return the rows of a tensor by their numbers."""

    def at(indices: Indices) -> str:
        return value.at((f"row({numbers.at(indices[:1])}, {value.shape[0]})", *indices[1:]))

    return Value(shape, value.dtype, at, value.cost + 2)


def scattered(dim: int, index: Value, source: Value, shape: Shape, dtype: torch.dtype) -> Value:
    """Return what is added to each element of a shape: terms, in a last dimension."""
    if any(index.shape[k] != shape[k] for k in range(len(shape)) if k != dim):
        raise UnsupportedError("a kernel has no scatter_add of a part")
    kind = c_type(dtype)

    def at(indices: Indices) -> str:
        *own, term = indices
        there = (*own[:dim], term, *own[dim + 1 :])
        return f"(({kind})({index.at(there)} == {own[dim]} ? {source.at(there)} : 0))"

    return Value((*shape, index.shape[dim]), dtype, at, 2 + index.cost + source.cost)


def placed(other: Value, dim: int, index: Value, source: Value) -> Value:
    """Return a tensor with one element of each row replaced."""
    own = tuple(1 if k == dim else size for k, size in enumerate(other.shape))
    if index.shape != own:
        raise UnsupportedError("a kernel has no scatter of several elements")
    source = broadcast(source, own)

    def at(indices: Indices) -> str:
        there = (*indices[:dim], "0", *indices[dim + 1 :])
        return f"({index.at(there)} == {indices[dim]} ? {source.at(there)} : {other.at(indices)})"

    return Value(other.shape, other.dtype, at, 2 + index.cost + source.cost + other.cost)


def summed_up(value: Value, dim: int, dtype: torch.dtype) -> Value:
    """Return the terms of the sums up to each element, in a last dimension."""

    def at(indices: Indices) -> str:
        *own, term = indices
        return f"({term} <= {own[dim]} ? {value.at((*own[:dim], term, *own[dim + 1 :]))} : 0)"

    return Value((*value.shape, value.shape[dim]), dtype, at, 1 + value.cost)
