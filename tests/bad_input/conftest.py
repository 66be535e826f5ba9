"""What bad input to commands is tried on."""

from tests.cli.conftest import fitted

__all__ = ["fitted"]
