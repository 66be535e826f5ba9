"""What bad input to commands is tried on."""

from tests.faces.conftest import fitted

__all__ = ["fitted"]
