"""Convert results to values that JSON can hold."""

import math
from collections.abc import Mapping
from pathlib import Path


def plain(value: object) -> object:
    """Return a value that JSON can hold; NaN and infinity become null."""
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return str(value) if isinstance(value, Path) else value
