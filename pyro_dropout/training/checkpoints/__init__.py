"""Posteriors and trainings on disk."""
