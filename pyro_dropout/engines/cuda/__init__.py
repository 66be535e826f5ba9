"""Recorded functions of tensors as kernels in CUDA C."""
