"""The errors, where they were: import them from ``pyro_dropout.errors``."""

from pyro_dropout.errors import (
    EmptyModelError,
    IgnoredInputsWarning,
    NotFollowedError,
    NoWeightWarning,
    PyroDropoutError,
    RangeError,
    ShapeError,
    SingularError,
)

__all__ = [
    "EmptyModelError",
    "IgnoredInputsWarning",
    "NoWeightWarning",
    "NotFollowedError",
    "PyroDropoutError",
    "RangeError",
    "ShapeError",
    "SingularError",
]
