"""Compiling a training step into one program."""
