"""Properties in both floating-point types: the type is drawn with the rest, and each has its own digits."""

import torch
from hypothesis import strategies as st

dtypes = st.sampled_from([torch.float32, torch.float64])


def digits(dtype: torch.dtype, double: float, single: float = 1e-4) -> float:
    """Return how far apart two numbers may be: what float64 must keep to, or what float32 must."""
    return double if dtype == torch.float64 else single
