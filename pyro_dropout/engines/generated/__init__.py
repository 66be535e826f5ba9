"""Recorded operations as loops over elements, which are written down as plain C or as CUDA C."""
