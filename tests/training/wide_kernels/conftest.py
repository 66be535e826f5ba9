"""Wide networks that are small enough for tests: narrower layers, and products in float32 that can be compared."""

import pytest
import torch

from pyro_dropout.training.wide_kernels import launches, wide_network, wide_steps
from pyro_dropout.training.wide_kernels.tiles import Tiles


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of 16 units are wide enough."""
    monkeypatch.setattr(wide_network, "NARROWEST", 16)


@pytest.fixture
def exact(narrow: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products are in full float32; on a GPU, tiles are small: such products are written out one by one."""
    monkeypatch.setattr(wide_steps, "half_on", lambda device: torch.float32)
    if torch.cuda.is_available():
        for name in ("AHEAD", "BACK", "MOVE"):
            monkeypatch.setattr(launches, name, Tiles(16, 32, 16, 2))
        monkeypatch.setattr(launches, "LAST", Tiles(16, 32, 16, 2))
        monkeypatch.setattr(launches, "TURN", Tiles(16, 16, 32, 1))
        monkeypatch.setattr(launches, "TURN_THIN", Tiles(16, 16, 32, 1))
