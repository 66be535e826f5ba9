"""Saved posteriors and training checkpoints."""
