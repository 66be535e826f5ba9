"""How the products of wide layers are cut for the programs of their kernels."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tiles:
    """How a product is cut for the programs of a kernel.

    Attributes:
        rows: points of a tile of activations, outputs of a tile of weights.
        columns: units of a tile.
        depth: how many numbers are multiplied and added at a time.
        stages: how many such pieces are loaded ahead.
        warps: of a program.
    """

    rows: int
    columns: int
    depth: int
    stages: int
    warps: int = 4


# The fastest on an H200, for layers of 1024 units and 272 or 512 points.
AHEAD = Tiles(64, 64, 64, 4)
BACK = Tiles(64, 64, 128, 3)
MOVE = Tiles(64, 64, 32, 3)  # of weights
LAST = Tiles(16, 32, 128, 3)  # of the weights of a last layer; it has as many rows as there are outputs
TURN = Tiles(16, 16, 256, 3)  # of the outputs of a last layer
TURN_THIN = Tiles(4, 16, 512, 1)  # of few outputs


def padded(width: int) -> int:
    """Return the size of a tile that holds ``width`` units: a power of two, at least 16.

    Example:
        >>> [padded(width) for width in (1, 16, 50)]
        [16, 16, 64]
    """
    return max(16, 1 << (width - 1).bit_length())
