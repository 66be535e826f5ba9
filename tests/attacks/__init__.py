"""Attacks on run folders: ``python -m tests.attacks``."""
