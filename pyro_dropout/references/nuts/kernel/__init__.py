"""Whole chains as one kernel of a GPU, written from the recorded steps of one chain."""
